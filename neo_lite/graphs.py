"""Iterations of decodes alone, captured as CUDA graphs: one launch instead of some thousand. Called by the pipeline.

A graph repeats the same kernels with the same addresses. So each combination of sizes has a graph of its own, and `Rows`
of its own that stay where they are: an iteration copies its numbers there and replays. The first `EAGER` iterations of a
combination run eagerly (which also compiles kernels and warms libraries up), the next captures. Prefills, swaps and recorded
timelines run eagerly. Both ways go through one function, `forward`.

On 8 SMs of an H200, 22 decodes of an 8B model take 28.4 ms instead of 29.4, since Python launches them in 0.6 ms instead of
11.5; recording them takes 30.8. Two sub-batches (22 and 20) take 52.9 ms both ways, launched in 1.7 or in 28.2 ms: there it
pays where the GPU is faster than that. A capture costs 27 to 50 ms, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from neo_lite.kv_cache import KVCache
from neo_lite.rows import Rows
from neo_lite.streams import Cuda, Host

KEPT = 32  # graphs; of a model with 32 layers and two sub-batches, each takes 8 MB of GPU memory
EAGER = 4  # iterations of a combination before it is captured: many never come again
Sizes = tuple[tuple[int, ...], ...]


class Graphs:
    """The graphs of one pipeline."""

    def __init__(self, forward: Callable[[list[Rows]], Tensor], cache: KVCache, streams: Cuda | Host) -> None:
        self.forward, self.cache, self.streams = forward, cache, streams
        self.captures = self.replays = 0
        self.seen: Counter[Sizes] = Counter()
        self.captured: dict[Sizes, tuple[list[Rows], Callable[[], Tensor]]] = {}

    def run(self, batches: list[Rows]) -> Tensor:
        """The logits of sub-batches without prefills; valid until the next run."""
        sizes = tuple(rows.sizes for rows in batches)
        self.seen[sizes] += 1
        if self.seen[sizes] <= EAGER:
            return self.forward(batches)
        if sizes not in self.captured:
            if len(self.captured) == KEPT:
                del self.captured[next(iter(self.captured))]
            fixed = [rows.copy() for rows in batches]
            self.captured[sizes] = fixed, self.streams.capture(lambda: self.forward(fixed))
            self.captures += 1
        fixed, replay = self.captured[sizes]
        for i, (rows, new) in enumerate(zip(fixed, batches, strict=True)):
            rows.fill(new)
            self.streams.check(i, self.cache.pools["cpu"], rows.cpu_decodes)
        self.replays += 1
        return replay()
