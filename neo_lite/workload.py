"""What arrives: lengths and arrival times of requests, seeded. Called by benchmarks, figures and notebooks.

Today the synthetic workload of the paper's figures 9 and 10a (lengths uniform within 10 % of a mean) with arrivals
at once or from a Poisson process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neo_lite.config import NeoLiteError


@dataclass(frozen=True)
class Arrival:
    """One request to come: when, how long its prompt is, how many tokens it will generate."""

    time_s: float
    prompt_tokens: int
    output_tokens: int


def synthetic(
    count: int, prompt_tokens: int, output_tokens: int, rate_per_s: float = float("inf"), spread: float = 0.1,
    seed: int = 0,
) -> list[Arrival]:  # fmt: skip
    """`count` requests, lengths uniform in mean x (1 +- spread); all at time 0 if the rate is infinite."""
    for name, value in (("count", count), ("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if value < 1:
            raise NeoLiteError(f"{name} is {value}: a workload needs at least 1")
    rng = np.random.default_rng(seed)
    prompts, outputs = (_uniform(rng, mean, spread, count) for mean in (prompt_tokens, output_tokens))
    times = poisson(rng, rate_per_s, count)
    return [Arrival(float(t), int(p), int(o)) for t, p, o in zip(times, prompts, outputs)]


def poisson(rng: np.random.Generator, rate_per_s: float, count: int) -> np.ndarray:
    """Arrival times of a Poisson process: exponential gaps with mean 1 / rate."""
    return np.cumsum(rng.exponential(1 / rate_per_s, count))


def _uniform(rng: np.random.Generator, mean: int, spread: float, count: int) -> np.ndarray:
    low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
    return rng.integers(max(1, low), max(1, high) + 1, count)


def random_prompt(arrival: Arrival, vocab_size: int, seed: int) -> tuple[int, ...]:
    """A prompt of that length with random token ids, for speed measurements (ids from 3 up: not BOS, EOS, padding)."""
    rng = np.random.default_rng(seed)
    return tuple(int(t) for t in rng.integers(min(3, vocab_size - 1), vocab_size, arrival.prompt_tokens))
