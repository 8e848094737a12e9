"""The tensors of one sub-batch: what every layer needs to know of its rows, made once an iteration.

Rows come in the order of the parts: prefills (those whose KV leaves for the CPU first), GPU decodes, CPU decodes. The
plan's lists become int32 arrays, which go to the device in one copy. Called by the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class Stored:
    """Rows whose new keys and values go to one pool, and where: int64 `places` as in `KVPool.places`."""

    rows: slice
    places: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """One sub-batch. New KV of leaving prefills goes `to_cpu`, beside the compute stream; of CPU decodes, with their q."""

    tokens: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    last: Tensor  # int32 [requests that sample]: the row of each
    samples: list[Request]
    prefills: Part
    gpu_decodes: Part
    cpu_decodes: Part
    to_cpu: Stored
    to_gpu: Stored


def rows_of(batch: SubBatch, cache: KVCache) -> Rows:
    """The tensors of a sub-batch, on the model's device; those of its CPU decodes' view on the host."""
    pool, leaving = cache.pools["gpu"], [w for w in batch.prefills if w.request.device == "cpu"]
    prefills = (*leaving, *(w for w in batch.prefills if w.request.device == "gpu"))
    works = (*prefills, *batch.gpu_decodes, *batch.cpu_decodes)
    tokens, positions, slots = _columns(works, pool.block_size)
    first, end = sum(w.length for w in leaving), len(tokens) - len(batch.cpu_decodes)
    middle = end - len(batch.gpu_decodes)
    ends = np.cumsum([w.length for w in works], dtype=np.int32)
    last = ends[[w.samples for w in works]] - 1
    on_host = _lens_and_table(batch.cpu_decodes)
    tokens_, positions_, last_, places, *views = to_device(
        [
            tokens,
            positions,
            last,
            pool.places(slots[:end]),
            *_lens_and_table(prefills),
            *_lens_and_table(batch.gpu_decodes),
        ],
        cache.device,
    )
    places = places.long()
    return Rows(
        tokens_, positions_, last_, [w.request for w in works if w.samples],
        Part(prefills, slice(0, middle), _view(prefills, *views[:2])),
        Part(batch.gpu_decodes, slice(middle, end), _view(batch.gpu_decodes, *views[2:])),
        Part(batch.cpu_decodes, slice(end, len(tokens)), _view(batch.cpu_decodes, *map(torch.from_numpy, on_host))),
        Stored(slice(0, first), places[:first]),
        Stored(slice(first, end), places[first:]),
    )  # fmt: skip


def _columns(works: Sequence[Work], size: int) -> np.ndarray:
    """int32 [3, tokens]: each row's token, its position, its slot (slot_mapping: block * size + place in the block)."""
    columns: tuple[list[int], ...] = ([], [], [])
    for work in works:
        token, table = work.request.token, work.request.block_table
        for p in range(work.start, work.seq_len):
            for column, number in zip(columns, (token(p), p, table[p // size] * size + p % size)):
                column.append(number)
    return np.array(columns, np.int32)


def view_of(works: tuple[Work, ...], device: torch.device) -> View:
    return _view(works, *to_device(_lens_and_table(works), device))


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """int32 arrays as tensors on a device, in one copy. Each starts at 16 bytes, for which Triton compiles its kernels."""
    starts = np.cumsum([0, *(-(-a.size // 4) * 4 for a in arrays)])
    flat = np.zeros(starts[-1], np.int32)
    for array, start in zip(arrays, starts):
        flat[start : start + array.size] = array.ravel()
    whole = torch.from_numpy(flat).to(device)
    return [whole[s : s + a.size].view(a.shape) for a, s in zip(arrays, starts)]


def _lens_and_table(works: Sequence[Work]) -> list[np.ndarray]:
    """int32 seq_lens [works] and block_table [works, width], unused entries 0."""
    tables = [w.request.block_table for w in works]
    width = max(map(len, tables), default=0)
    table = np.array([t + [0] * (width - len(t)) for t in tables], np.int32).reshape(len(works), width)
    return [np.array([w.seq_len for w in works], np.int32), table]


def _view(works: tuple[Work, ...], seq_lens: Tensor, table: Tensor) -> View:
    return View(tuple(w.length for w in works), seq_lens, table, tuple(w.seq_len for w in works))
