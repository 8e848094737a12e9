"""How long the stages of one layer take, so that a scheduler can weigh plans before it runs them. Torch-free.

A profile holds points measured on one machine for one model (`profiler` makes it); between them it interpolates, past
the last it goes on along the last segment. Seconds, of one layer unless the name says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Curve = Sequence[tuple[float, float]]  # (x, seconds), x rising


@dataclass(frozen=True)
class Profile:
    """Measured stage times of one model on one machine."""

    num_layers: int
    linear: Curve  # tokens -> pre + post projection
    prefill_attn: Curve  # tokens of one prompt -> its attention
    gpu_attn: Curve  # KV tokens read -> decode attention on the GPU
    cpu_attn: Curve  # KV tokens read -> decode attention on the CPU, copies of q, k, v and of the output included
    head: Curve  # requests that sample -> head, once an iteration
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def t_linear(self, tokens: float) -> float:
        return interpolate(self.linear, tokens)

    def t_prefill_attn(self, prompts: Sequence[int]) -> float:
        return sum(interpolate(self.prefill_attn, n) for n in prompts)

    def t_gpu_attn(self, kv_tokens: float) -> float:
        return interpolate(self.gpu_attn, kv_tokens)

    def t_cpu_attn(self, kv_tokens: float) -> float:
        return interpolate(self.cpu_attn, kv_tokens)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def load(path: Path) -> Profile:
        return Profile(**json.loads(path.read_text()))


def interpolate(curve: Curve, x: float) -> float:
    """Exact at the points, linear between and beyond the last, 0 at and below 0."""
    if x <= 0:
        return 0.0
    xs, ys = zip(*curve, strict=True)
    if x <= xs[-1] or len(xs) == 1:
        return float(np.interp(x, xs, ys))
    return max(ys[-1], ys[-1] + (x - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
