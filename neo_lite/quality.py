"""What an int8 CPU pool costs in quality: perplexity on a fixed text, and how long greedy text stays the same.

Called by notebook 04, so that no speed of int8 is shown without its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from neo_lite.api import build_engine
from neo_lite.model import Llama
from neo_lite.request import Request, SamplingParams

TEXT = """The tide had gone out further than anyone in the village could remember. Where there had been water in the morning
there was now a wide brown plain, ribbed like the roof of a dog's mouth, and on it lay things that the sea had kept for a
long time: an anchor, the frame of a cart, a church bell without its tongue. The children went first, then the men with
ropes, and last the old harbour master, who walked slowly and counted his steps. He had measured this bay for forty years
and trusted numbers more than stories. At the bell he stopped, wrote the time and the distance in his book, and looked back.
The houses seemed small. It was then that he noticed the birds were leaving, all of them, in one long line to the hills."""


def perplexity(model: Llama, tokens: Sequence[int], **settings: Any) -> float:
    """exp of the mean negative log-likelihood of tokens[2:], fed one by one as decodes through an engine of `settings`."""
    engine = build_engine(model, **settings)
    losses: list[float] = []

    def force(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        target = tokens[requests[0].num_tokens]
        losses.append(float(-torch.log_softmax(logits[0].double(), -1)[target]))
        return [target]

    engine.executor.sample = force  # type: ignore[attr-defined]
    engine.add(tokens[:1], SamplingParams(max_tokens=len(tokens) - 1, ignore_eos=True))
    engine.run()
    return float(torch.tensor(losses[1:], dtype=torch.float64).mean().exp())


def same_greedy_tokens(
    model: Llama, prompts: Sequence[Sequence[int]], count: int, a: dict[str, Any], b: dict[str, Any]
) -> float:
    """The share of greedy tokens that engines of settings `a` and `b` have in common, up to the first difference."""
    outputs = []
    for settings in (a, b):
        engine = build_engine(model, **settings)
        requests = [engine.add(p, SamplingParams(count, ignore_eos=True)) for p in prompts]
        engine.run()
        outputs.append([r.output for r in requests])
    agree = [
        next((i for i, (x, y) in enumerate(zip(*pair, strict=True)) if x != y), count)
        for pair in zip(*outputs, strict=True)
    ]
    return sum(agree) / (count * len(prompts))
