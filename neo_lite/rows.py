"""The tensors of one sub-batch: what every layer needs to know of its rows, made once an iteration.

Rows come in the order of the parts: prefills (those whose KV leaves for the CPU first), GPU decodes, CPU decodes. The
plan's lists become int32 arrays (`Numbers`), side by side in one buffer, which goes to the device in one copy (`Rows`).
Called by the pipeline and `graphs`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property

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
class Rows:
    """One sub-batch. The new KV of CPU decodes goes with their q."""

    on_host: Tensor  # int32: all that is on the device, side by side
    numbers: Tensor  # the same on the device
    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    last: Tensor  # [requests that sample]: the row of each
    prefills: Part
    gpu_decodes: Part
    cpu_decodes: Part
    to_cpu: Tensor  # where the KV of leaving prefills goes, the first rows of all, as in `KVPool.places`
    to_gpu: Tensor  # and of the rows behind them

    def fill(self, new: Numbers) -> None:
        """Takes over another iteration's numbers; sizes and widths are the same."""
        _pack(new.arrays, self.on_host)
        if self.numbers is not self.on_host:
            self.numbers.copy_(self.on_host, non_blocking=True)  # the driver keeps what it has not sent yet
        view = self.cpu_decodes.view
        view.seq_lens.numpy()[:], view.block_table.numpy()[:] = new.lens, new.table


@dataclass(frozen=True, eq=False)
class Numbers:
    """What a sub-batch's rows are made of, on the host: int32 `arrays` in the order of `rows`, and those of its CPU decodes."""

    kinds: tuple[tuple[Work, ...], ...]  # prefills, those leaving first; GPU decodes; CPU decodes
    arrays: list[np.ndarray]
    lens: np.ndarray  # [CPU decodes]
    table: np.ndarray  # [CPU decodes, width]

    def rows(self, device: torch.device) -> Rows:
        """Tensors of their own, on the device; those of its CPU decodes' view on the host."""
        on_host, numbers = to_device(self.arrays, device)
        tokens, positions, last, to_cpu, to_gpu, *views = cut(numbers, [a.shape for a in self.arrays])
        ends = np.cumsum([0, *(sum(w.length for w in kind) for kind in self.kinds)]).tolist()
        of_cpu = (torch.from_numpy(x.copy()) for x in (self.lens, self.table))
        prefills, on_gpu, on_cpu = (
            Part(kind, slice(*rows), _view(kind, *view))
            for kind, rows, view in zip(self.kinds, zip(ends, ends[1:]), (views[:2], views[2:], of_cpu), strict=True)
        )
        return Rows(on_host, numbers, tokens, positions, last, prefills, on_gpu, on_cpu, to_cpu, to_gpu)


def rows_of(batch: SubBatch, cache: KVCache, step: int = 1) -> Rows:
    """The tensors of a sub-batch, on the model's device; block tables are as wide as a multiple of `step`."""
    return numbers_of(batch, cache, step).rows(cache.device)


def sizes_of(batch: SubBatch, step: int) -> tuple[int, int, int]:
    """What must not change for a CUDA graph of decodes alone: how many there are, and how wide their block tables."""
    return len(batch.gpu_decodes), len(batch.cpu_decodes), _width([w.request.block_table for w in batch], step)


def samples_of(batch: SubBatch) -> list[Request]:
    """Whose logits the head gives, in its order."""
    return [w.request for kind in _kinds(batch) for w in kind if w.samples]


def _kinds(batch: SubBatch) -> tuple[tuple[Work, ...], ...]:
    leaving, staying = (tuple(w for w in batch.prefills if w.request.device == d) for d in ("cpu", "gpu"))
    return leaving + staying, batch.gpu_decodes, batch.cpu_decodes


def numbers_of(batch: SubBatch, cache: KVCache, step: int = 1) -> Numbers:
    """Works a sub-batch out. With decodes alone the GPU waits for this, and for little else."""
    kinds, pool = _kinds(batch), cache.pools["gpu"]
    prefills = kinds[0]
    works = [w for kind in kinds for w in kind]
    a, b = len(prefills), len(prefills) + len(batch.gpu_decodes)
    starts, lengths = (np.array(column, np.int32) for column in list(zip(*works))[1:] or ((), ()))
    ends = lengths.cumsum(dtype=np.int32)
    positions = (starts - ends + lengths).repeat(lengths) + np.arange(lengths.sum(), dtype=np.int32)
    tokens = [w.request.token(p) for w in prefills for p in range(w.start, w.start + w.length)]
    tokens += [request.token(start) for request, start, _ in works[a:]]
    table = _table(works, step)
    blocks = table[np.arange(len(works)).repeat(lengths), positions // pool.block_size]
    slots = blocks * pool.block_size + positions % pool.block_size  # slot_mapping
    places = pool.places(slots[: len(slots) - len(batch.cpu_decodes)])
    first = sum(w.length for w in prefills if w.request.device == "cpu")
    lens, last = starts + lengths, (ends - 1)[[w.samples for w in prefills] + [True] * (len(works) - a)]
    views = lens[:a], table[:a], lens[a:b], table[a:b]
    arrays = [np.array(tokens, np.int32), positions, last, places[:first], places[first:], *views]
    return Numbers(kinds, arrays, lens[b:], table[b:])


def view_of(works: tuple[Work, ...], device: torch.device) -> View:
    arrays = np.array([w.seq_len for w in works], np.int32), _table(works)
    return _view(works, *cut(to_device(arrays, device)[1], [a.shape for a in arrays]))


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 arrays, side by side in one tensor: on the host and on the device."""
    size = sum(_room(a.shape) for a in arrays)
    on_host = torch.zeros(size, dtype=torch.int32)  # not pinned: freed beside a failed GPU, that ends the process
    _pack(arrays, on_host)
    return on_host, on_host.to(device)


def _pack(arrays: Sequence[np.ndarray], target: Tensor) -> None:
    flat, start = target.numpy(), 0
    for array in arrays:
        flat[start : start + array.size] = array.ravel()
        start += _room(array.shape)


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
    known = _known.get(request.id)  # of an engine or another
    if known is None or known[0] is not table or len(known[1]) != len(table):
        if len(_known) >= 1024:
            _known.clear()
        known = _known[request.id] = table, np.array(table, np.int32)
    return known[1]


_known: dict[int, tuple[list[int], np.ndarray]] = {}


def _table(works: Sequence[Work], step: int = 1) -> np.ndarray:
    """int32 block_table [works, width], unused entries 0."""
    tables = [blocks_of(w.request) for w in works]
    padded = np.zeros((len(works), _width(tables, step)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _width(tables: Sequence[Sized], step: int) -> int:
    return -(-max(map(len, tables), default=0) // step) * step


def _view(works: tuple[Work, ...], seq_lens: Tensor, table: Tensor) -> View:
    return View(tuple(w.length for w in works), seq_lens, table, tuple(w.seq_len for w in works))
