"""Iterations of decodes alone, captured as CUDA graphs: one launch instead of some thousand. Called by the pipeline.

A graph repeats the same kernels with the same addresses. So each combination of sizes has a graph of its own, and `Rows`
of its own that stay where they are: an iteration copies its tokens, positions, lengths and blocks there and replays. The
first iteration of a combination runs eagerly (which also compiles kernels and warms libraries up), the second captures.
Prefills, swaps and recorded timelines run eagerly. Both ways go through one function, `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from neo_lite.kv_cache import KVCache
from neo_lite.rows import Part, Rows, Stored
from neo_lite.streams import Cuda, Host

KEPT = 32  # graphs; of a model with 32 layers and two sub-batches, each takes 8 MB of GPU memory
Sizes = tuple[tuple[int, int], ...]


class Graphs:
    """The graphs of one pipeline."""

    def __init__(self, forward: Callable[[list[Rows]], Tensor], cache: KVCache, streams: Cuda | Host) -> None:
        self.forward, self.cache, self.streams = forward, cache, streams
        self.captures = self.replays = 0
        self.seen: set[Sizes] = set()
        self.captured: dict[Sizes, tuple[list[Rows], Callable[[], Tensor]]] = {}

    def run(self, batches: list[Rows]) -> Tensor:
        """The logits of sub-batches without prefills; valid until the next run."""
        sizes = tuple((len(b.gpu_decodes.works), len(b.cpu_decodes.works)) for b in batches)
        if sizes not in self.seen:
            self.seen.add(sizes)
            return self.forward(batches)
        if sizes not in self.captured:
            if len(self.captured) == KEPT:
                self.seen.remove(oldest := next(iter(self.captured)))
                del self.captured[oldest]
            fixed = [fix(rows, self.cache) for rows in batches]
            self.captured[sizes] = fixed, self.streams.capture(lambda: self.forward(fixed))
            self.captures += 1
        fixed, replay = self.captured[sizes]
        for i, (rows, new) in enumerate(zip(fixed, batches, strict=True)):
            fill(rows, new)
            self.streams.check(i, self.cache.pools["cpu"], rows.cpu_decodes)
        self.replays += 1
        return replay()


def fix(rows: Rows, cache: KVCache) -> Rows:
    """A copy whose tensors stay, with block tables as wide as any can be."""

    def part(old: Part, num_blocks: int) -> Part:
        table = old.view.block_table.new_zeros(len(old.works), num_blocks)
        table[:, : old.view.block_table.shape[1]] = old.view.block_table
        return replace(old, view=replace(old.view, seq_lens=old.view.seq_lens.clone(), block_table=table))

    gpu, cpu = (cache.pools[device].k.shape[1] for device in ("gpu", "cpu"))
    return replace(
        rows, tokens=rows.tokens.clone(), positions=rows.positions.clone(), last=rows.last.clone(),
        gpu_decodes=part(rows.gpu_decodes, gpu), cpu_decodes=part(rows.cpu_decodes, cpu),
        to_gpu=Stored(rows.to_gpu.rows, rows.to_gpu.places.clone()),
    )  # fmt: skip


def fill(fixed: Rows, new: Rows) -> None:
    """Copies an iteration's numbers into the tensors of a graph."""
    for old, fresh in zip(_tensors(fixed), _tensors(new), strict=True):
        old[..., : fresh.shape[-1]].copy_(fresh)  # of a table, the columns that are in use


def _tensors(rows: Rows) -> list[Tensor]:
    views = rows.gpu_decodes.view, rows.cpu_decodes.view
    tables = [t for view in views for t in (view.seq_lens, view.block_table)]
    return [rows.tokens, rows.positions, rows.to_gpu.places, *tables]
