"""Iterations of decodes alone, captured as CUDA graphs: a few launches instead of some thousand. Called by the pipeline.

A graph repeats the same kernels with the same addresses. So each combination of sizes has graphs of its own, and `Rows`
of its own that stay where they are: an iteration fills in its numbers and replays. The first `EAGER` iterations of a
combination run eagerly (which also compiles kernels and warms libraries up), the next captures. Prefills, swaps and recorded
timelines run eagerly. Both ways go through one function, `forward`.

The GPU waits for nothing but the first sub-batch's numbers: an iteration is cut into three graphs, the first layer of that
sub-batch, a layer or two more, and the rest. While the GPU and the CPU are at one, Python fills in and launches the next.

On 8 SMs of an H200, 22 decodes of an 8B model take 26.4 ms instead of 27.7, since Python launches them in 0.4 ms instead of
12; recording them takes 28.8. Two sub-batches (22 and 20) take 46.6 ms instead of 48.1, launched in 1.2 or in 31 ms
(`data/recorded/h200_8sm_iteration_bound.json`; on slower hosts Python takes twice as long). A capture costs 27 to 50 ms, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from neo_lite.kv_cache import KVCache
from neo_lite.request import SubBatch
from neo_lite.rows import Rows, numbers_of, rows_of, sizes_of
from neo_lite.streams import Cuda, Fills, Host, Steps, finished

KEPT = 32  # graphs; of a model with 32 layers and two sub-batches, each takes 8 MB of GPU memory
TABLE_STEP = 64  # blocks: a CUDA graph serves until a request needs a wider table
EAGER = 4  # iterations of a combination before it is captured: many never come again
Sizes = tuple[tuple[int, ...], ...]
Replay = Callable[[Fills], Tensor]


def turn(cpu_decodes: Sequence[int]) -> list[int]:
    """The order of sub-batches, given how many CPU decodes each has: one without waits until the other's are under way."""
    return sorted(range(len(cpu_decodes)), key=lambda i: not cpu_decodes[i])


class Graphs:
    """The graphs of one pipeline."""

    def __init__(self, forward: Callable[[list[Rows]], Steps], cache: KVCache, streams: Cuda | Host) -> None:
        self.forward, self.cache, self.streams = forward, cache, streams
        self.captures = self.replays = 0
        self.seen: Counter[Sizes] = Counter()
        self.captured: dict[Sizes, tuple[list[Rows], Replay]] = {}

    def run(self, batches: Sequence[SubBatch]) -> Tensor:
        """The logits of sub-batches without prefills; valid until the next run."""
        sizes = tuple(sizes_of(b, TABLE_STEP) for b in batches)
        self.seen[sizes] += 1
        if self.seen[sizes] <= EAGER:
            return finished(self.forward([rows_of(b, self.cache, TABLE_STEP) for b in batches]))
        if sizes not in self.captured:
            if len(self.captured) == KEPT:
                del self.captured[next(iter(self.captured))]
            fixed = [rows_of(b, self.cache, TABLE_STEP) for b in batches]
            self.captured[sizes] = fixed, self.streams.capture(lambda: self.forward(fixed))
            self.captures += 1
        fixed, replay = self.captured[sizes]
        self.replays += 1
        return replay([partial(self._fill, fixed[i], batches[i]) for i in turn([len(b.cpu_decodes) for b in batches])])

    def _fill(self, rows: Rows, batch: SubBatch) -> None:
        rows.fill(numbers_of(batch, self.cache, TABLE_STEP))
