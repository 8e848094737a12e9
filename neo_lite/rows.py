"""The tensors of one sub-batch: what every layer needs to know of its rows, made once an iteration.

Rows come in the order of the parts: prefills (those whose KV leaves for the CPU first), GPU decodes, CPU decodes. The
plan's lists become int32 arrays side by side in one buffer, which goes to the device in one copy. Called by the pipeline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from neo_lite.attention import View
from neo_lite.kv_cache import KVCache, KVPool
from neo_lite.request import Request, SubBatch, Work


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one kind in a sub-batch, served by one attention backend."""

    works: tuple[Work, ...]
    rows: slice
    view: View

    def new_places(self, pool: KVPool) -> Tensor:
        """Where in its pool on the host the new token of each decode goes, as in `KVPool.places`."""
        last, table = self.view.seq_lens.numpy() - 1, self.view.block_table.numpy()
        slots = table[np.arange(len(last)), last // pool.block_size] * pool.block_size + last % pool.block_size
        return torch.from_numpy(pool.places(slots))

    @cached_property
    def requests(self) -> list[int]:
        return [w.request.id for w in self.works]


@dataclass(frozen=True, eq=False)
class Stored:
    """Rows whose new keys and values go to one pool, and where: int32 `places` as in `KVPool.places`."""

    rows: slice
    places: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """One sub-batch. New KV of leaving prefills goes `to_cpu`, beside the compute stream; of CPU decodes, with their q."""

    numbers: Tensor  # int32: all that is on the device, side by side
    shapes: list[tuple[int, ...]]
    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    last: Tensor  # [requests that sample]: the row of each
    samples: list[Request]
    prefills: Part
    gpu_decodes: Part
    cpu_decodes: Part
    to_cpu: Stored
    to_gpu: Stored

    def copy(self) -> Rows:
        """The same in tensors of their own, for a CUDA graph, which wants them to stay where they are."""
        kinds, on_host = (self.prefills.works, self.gpu_decodes.works, self.cpu_decodes.works), self.cpu_decodes.view
        lens, table = on_host.seq_lens.clone(), on_host.block_table.clone()
        return _rows(self.numbers.clone(), self.shapes, self.samples, kinds, lens, table)

    def fill(self, new: Rows) -> None:
        """Takes over another iteration's numbers; sizes and widths are the same."""
        self.numbers.copy_(new.numbers)
        self.cpu_decodes.view.seq_lens.copy_(new.cpu_decodes.view.seq_lens)
        self.cpu_decodes.view.block_table.copy_(new.cpu_decodes.view.block_table)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What must not change for a CUDA graph of decodes alone: how many, and how wide their block tables are."""
        tables = (self.gpu_decodes.view.block_table, self.cpu_decodes.view.block_table)
        return tuple(n for table in tables for n in table.shape)


def rows_of(batch: SubBatch, cache: KVCache, step: int = 1) -> Rows:
    """The tensors of a sub-batch, on the model's device; those of its CPU decodes' view on the host. Block tables are as
    wide as a multiple of `step`."""
    leaving = [w for w in batch.prefills if w.request.device == "cpu"]
    prefills = (*leaving, *(w for w in batch.prefills if w.request.device == "gpu"))
    kinds, pool = (prefills, batch.gpu_decodes, batch.cpu_decodes), cache.pools["gpu"]
    works = [w for kind in kinds for w in kind]
    lengths = np.array([w.length for w in works], np.int32)
    ends = lengths.cumsum(dtype=np.int32)
    starts = np.array([w.start for w in works], np.int32)
    positions = (starts - ends + lengths).repeat(lengths) + np.arange(lengths.sum(), dtype=np.int32)
    tokens = np.array([w.request.token(p) for w in works for p in range(w.start, w.start + w.length)], np.int32)
    table = _table(works, step)
    blocks = table[np.arange(len(works)).repeat(lengths), positions // pool.block_size]
    slots = blocks * pool.block_size + positions % pool.block_size  # slot_mapping
    places, first = pool.places(slots[: len(slots) - len(batch.cpu_decodes)]), sum(w.length for w in leaving)
    a, b = len(prefills), len(prefills) + len(batch.gpu_decodes)
    lens, sampling = starts + lengths, [w.samples for w in works]
    last = (ends - 1)[sampling]
    arrays = [tokens, positions, last, places[:first], places[first:], lens[:a], table[:a], lens[a:b], table[a:b]]
    numbers, shapes = to_device(arrays, cache.device), [a.shape for a in arrays]
    samples, on_host = (
        list(itertools.compress(works, sampling)),
        [torch.from_numpy(x[b:].copy()) for x in (lens, table)],
    )
    return _rows(numbers, shapes, [w.request for w in samples], kinds, *on_host)


def _rows(
    numbers: Tensor, shapes: list[tuple[int, ...]], samples: list[Request], kinds: Sequence[tuple[Work, ...]], lens: Tensor,
    table: Tensor,
) -> Rows:  # fmt: skip
    """`shapes` in the order of `rows_of`; `lens`, `table`: of the CPU decodes."""
    tokens, positions, last, leaving, staying, *views = cut(numbers, shapes)
    ends = np.cumsum([0, *(sum(w.length for w in kind) for kind in kinds)]).tolist()
    prefills, on_gpu, on_cpu = (
        Part(kind, slice(*rows), _view(kind, *view))
        for kind, rows, view in zip(kinds, zip(ends, ends[1:]), (views[:2], views[2:], (lens, table)), strict=True)
    )
    middle = len(leaving)
    to_cpu, to_gpu = Stored(slice(0, middle), leaving), Stored(slice(middle, middle + len(staying)), staying)
    return Rows(numbers, shapes, tokens, positions, last, samples, prefills, on_gpu, on_cpu, to_cpu, to_gpu)


def view_of(works: tuple[Work, ...], device: torch.device) -> View:
    arrays = np.array([w.seq_len for w in works], np.int32), _table(works)
    return _view(works, *cut(to_device(arrays, device), [a.shape for a in arrays]))


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """int32 arrays, side by side in one tensor on a device, by one copy."""
    flat = np.zeros(sum(_room(a.shape) for a in arrays), np.int32)
    start = 0
    for array in arrays:
        flat[start : start + array.size] = array.ravel()
        start += _room(array.shape)
    return torch.from_numpy(flat).to(device)


def cut(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The arrays in it, in their order."""
    starts = itertools.accumulate(map(_room, shapes), initial=0)
    return [numbers[start : start + math.prod(shape)].view(shape) for start, shape in zip(starts, shapes)]


def _room(shape: tuple[int, ...]) -> int:
    """Numbers that an array takes: each starts at a multiple of 16 bytes, for which Triton compiles its kernels."""
    return -(-math.prod(shape) // 4) * 4


def blocks_of(request: Request) -> np.ndarray:
    """Its block table as int32, made anew only where it has grown or moved: 64 tables of 7,000 tokens take 1 ms, in which a
    fast GPU would do nothing."""
    table = request.block_table
    known = _known.get(request)
    if known is None or known[0] is not table or len(known[1]) != len(table):
        known = _known[request] = table, np.array(table, np.int32)
    return known[1]


_known: WeakKeyDictionary[Request, tuple[list[int], np.ndarray]] = WeakKeyDictionary()


def _table(works: Sequence[Work], step: int = 1) -> np.ndarray:
    """int32 block_table [works, width], unused entries 0."""
    tables = [blocks_of(w.request) for w in works]
    width = -(-max(map(len, tables), default=0) // step) * step
    padded = np.zeros((len(works), width), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _view(works: tuple[Work, ...], seq_lens: Tensor, table: Tensor) -> View:
    return View(tuple(w.length for w in works), seq_lens, table, tuple(w.seq_len for w in works))
