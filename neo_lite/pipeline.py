"""The executor on real devices: it takes an `IterationPlan` and runs the model's layers over it.

Each sub-batch is a generator that stops once a layer, where its CPU attention is under way, and lets the other go on:

    gpu   pre0 ga0 | post1 pre1 | post0 pre0 ga0 | post1 pre1 | ...      0, 1: the sub-batches
    cpu        |---- ca0 ----|      |---- ca1 ----|  |-- ca0 ...

`post`, `pre` are the linear stages (the paper's po and pr), `ga` the attention of prefills and GPU decodes, `ca` that of
CPU decodes, with the copies of q, k, v before and of the output after it. A join makes the compute stream wait for `ca`
and nothing else. So with one layer's times T, and as long as Tca0 <= Tpref0 + Tga0 + Tl1, which the scheduler sees to, an
iteration takes at most layers x max(Tl0 + Tpref0 + Tga0 + Tl1, Tca1 + Tl1, Tca0 + Tca1); measured on 8 SMs of an H200:
1.03 to 1.05 x that, head included. One sub-batch alone is simple offloading (figure 3) or GPU-only. The KV of a prefill
that belongs on the CPU, and requests that change pools, are copied layer by layer beside the compute stream. On a machine
without CUDA the same calls run on the host, in the same order. Called by the engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from neo_lite import attention
from neo_lite.attention import Backend
from neo_lite.config import EngineConfig
from neo_lite.cpu_attention import CompilerMissing, Kernel
from neo_lite.kv_cache import KVCache
from neo_lite.model import Llama, sample
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.streams import Cuda, Host, Pending
from neo_lite.timeline import Timeline


class Rows:
    """The tensors of one sub-batch: what every layer needs to know of its rows, made once an iteration."""

    def __init__(self, batch: SubBatch, block_size: int, device: torch.device) -> None:
        leaving = [w for w in batch.prefills if w.request.device == "cpu"]
        prefills = (*leaving, *(w for w in batch.prefills if w.request.device == "gpu"))
        works = (*prefills, *batch.gpu_decodes, *batch.cpu_decodes)
        pairs = [(w.request, p) for w in works for p in range(w.start, w.seq_len)]
        self.tokens = torch.tensor([r.token(p) for r, p in pairs], device=device)  # [tokens]
        self.positions = torch.tensor([p for _, p in pairs], device=device)  # [tokens]
        ends = torch.tensor([w.length for w in works]).cumsum(0) - 1
        self.samples = [w.request for w in works if w.samples]
        self.last = ends[[w.samples for w in works]].to(device)  # the row of each request that samples
        parts = [prefills, batch.gpu_decodes, batch.cpu_decodes]
        self.prefills, self.gpu_decodes, self.cpu_decodes = _parts(parts, block_size, device)
        first, end = sum(w.length for w in leaving), len(pairs) - len(batch.cpu_decodes)
        # new KV that the compute stream sees to: of leaving prefills to the CPU pool, of the rest to the GPU pool
        self.to_cpu, self.to_gpu = (
            _stored(pairs, rows, block_size, device) for rows in (slice(first), slice(first, end))
        )


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one kind in a sub-batch, served by one attention backend."""

    works: tuple[Work, ...]
    rows: slice
    view: attention.View

    def new_places(self, size: int) -> tuple[Tensor, Tensor]:
        """The block and the place in it of each decode's new token, from the host's copy of the view."""
        last = self.view.seq_lens.long() - 1
        return self.view.block_table.long().gather(1, (last // size)[:, None])[:, 0], last % size

    @property
    def requests(self) -> list[int]:
        return [w.request.id for w in self.works]


class Pipeline:
    """Runs plans on one model and its two KV pools."""

    sample = staticmethod(sample)

    def __init__(self, model: Llama, config: EngineConfig, timeline: Timeline) -> None:
        self.model, self.config, self.timeline = model, config, timeline
        self.cache = KVCache(model.config, config, model.dtype, model.device)
        self.gpu_decode = attention.gpu_decode_backend(model.device)
        self.cpu_decode, kernel = self._cpu_backend()
        self.streams: Host | Cuda
        if model.device.type == "cuda" and kernel is not None:
            self.streams = Cuda(timeline, self.cpu_decode, kernel, model.config, config)
        else:
            self.streams = Host(timeline, self.cpu_decode)

    @torch.inference_mode()
    def run(self, plan: IterationPlan) -> dict[int, int]:
        """One iteration: request id -> next token of each request that samples."""
        size, device = self.config.block_size, self.model.device
        self.streams.begin()
        try:
            swapped = self._swap(plan)
            batches = [Rows(batch, size, device) for batch in plan.batches if len(batch)]
            logits = alternate([self._layers(rows, slot, swapped) for slot, rows in enumerate(batches)])
            requests = [r for rows in batches for r in rows.samples]
            tokens = self.sample(torch.cat(logits), requests) if requests else []
        finally:
            self.streams.finish()
        return {r.id: token for r, token in zip(requests, tokens, strict=True)}

    def _layers(self, rows: Rows, slot: int, swapped: list[Any]) -> Generator[None, None, Tensor]:
        """One sub-batch through all layers; stops in each, once its CPU attention is under way. Returns the logits."""
        model, stage = self.model, self.streams.stage
        with stage("gpu", "embed", batch=slot):
            x, rope = model.embed(rows.tokens), model.rope(rows.positions)
        for layer in range(model.config.num_layers):
            if swapped:
                self.streams.wait(swapped[layer])
            with stage("gpu", "pre", layer=layer, batch=slot):
                q, k, v = model.pre_attention(layer, x, rope)
            pending = self.start_cpu(rows.cpu_decodes, slot, layer, q, k, v)
            self._store(layer, rows, k, v)
            attn = self._gpu_attention(rows, slot, layer, q, k, v)
            yield
            if pending is not None:
                attn.append(pending())
            with stage("gpu", "post", layer=layer, batch=slot):
                x = model.post_attention(layer, torch.cat(attn) if len(attn) > 1 else attn[0], x)
        with stage("gpu", "head", batch=slot):
            return model.head(x[rows.last])

    def start_cpu(self, part: Part, slot: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Pending | None:
        if not part.works:
            return None
        q, k, v = (t[part.rows] for t in (q, k, v))
        if isinstance(self.streams, Host) and q.is_cuda:  # no kernel to put on a stream: wait for torch instead
            pending = self.streams.cpu_attention(slot, self.cache.pools["cpu"], layer, part, q.cpu(), k.cpu(), v.cpu())
            return lambda: pending().to(self.model.device)
        return self.streams.cpu_attention(slot, self.cache.pools["cpu"], layer, part, q, k, v)

    def _gpu_attention(self, batch: Rows, slot: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The outputs of prefills and of GPU decodes, as far as there are any."""
        pool, outputs = self.cache.pools["gpu"], []
        for name, part, backend in (
            ("prefill_attn", batch.prefills, attention.prefill), ("gpu_attn", batch.gpu_decodes, self.gpu_decode)
        ):  # fmt: skip
            if part.works:
                what = {"backend": backend.__name__, "requests": part.requests}
                with self.streams.stage("gpu", name, layer=layer, batch=slot, **what):
                    rows = part.rows
                    outputs.append(backend(q[rows], k[rows], v[rows], pool.k[layer], pool.v[layer], part.view))
        return outputs

    def _store(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        """New keys and values to the pool where each request lives; to the CPU's beside the compute stream."""
        to = rows.to_gpu
        if len(to.blocks):
            with self.streams.stage("gpu", "store", layer=layer):
                self.cache.pools["gpu"].put(layer, k[to.rows], v[to.rows], to.blocks, to.places)
        to_cpu = rows.to_cpu
        if len(to_cpu.blocks):
            pool = self.cache.pools["cpu"]
            leave = partial(pool.put, layer, k[to_cpu.rows], v[to_cpu.rows], to_cpu.blocks, to_cpu.places)
            self.streams.aside("d2h", "store", leave, reads=(k, v), layer=layer)

    def _swap(self, plan: IterationPlan) -> list[Any]:
        """Starts the moves of requests between the pools; for each layer what its compute has to wait for."""
        if not plan.moves:
            return []
        moves = [self.cache.prepare(move) for move in plan.moves]
        lane = "d2h" if plan.moves[0].target == "cpu" else "h2d"
        what = {"requests": [m.request.id for m in plan.moves]}
        reads = tuple(t for move in moves for t in (move.from_blocks, move.to_blocks))

        def swap_layer(layer: int) -> None:
            for move in moves:
                move.layer(layer)

        layers = range(self.model.config.num_layers)
        return [self.streams.aside(lane, "swap", partial(swap_layer, i), reads, layer=i, **what) for i in layers]

    def _cpu_backend(self) -> tuple[Backend, Kernel | None]:
        """The C++ kernel, compiled now if it is not yet; torch, with a word about it, where no compiler is found."""
        model = self.model.config
        q = torch.empty(0, model.num_heads, model.head_dim, dtype=self.model.dtype)
        try:
            kernel = attention.kernel_for(q, self.cache.pools["cpu"].k[0])
        except CompilerMissing as error:
            if self.cache.pools["cpu"].int8:
                raise
            warnings.warn(f"{error}; until then torch computes CPU attention, at a fraction of the speed", stacklevel=3)
            return attention.gathered_decode, None
        backend = partial(attention.cpu_kernel_decode, threads=self.config.cpu_threads)
        return update_wrapper(backend, attention.cpu_kernel_decode), kernel


def alternate(batches: Sequence[Generator[None, None, Tensor]]) -> list[Tensor]:
    """Runs generators in turn, each to its next stop, until all have returned; their results in order."""
    results: dict[int, Tensor] = {}
    while len(results) < len(batches):
        for i, batch in enumerate(batches):
            if i not in results:
                try:
                    next(batch)
                except StopIteration as end:
                    results[i] = end.value
    return [results[i] for i in range(len(batches))]


def _parts(kinds: list[tuple[Work, ...]], block_size: int, device: torch.device) -> list[Part]:
    """Prefills, GPU decodes, CPU decodes: in the order of the rows, so that each is a slice."""
    parts, row = [], 0
    for works, where in zip(kinds, (device, device, torch.device("cpu")), strict=True):
        rows = slice(row, row := row + sum(w.length for w in works))
        parts.append(Part(works, rows, view_of(works, where)))
    return parts


def view_of(works: tuple[Work, ...], device: torch.device) -> attention.View:
    width = max((len(w.request.block_table) for w in works), default=0)
    tables = [w.request.block_table + [0] * (width - len(w.request.block_table)) for w in works]
    seq_lens = [w.seq_len for w in works]
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    table = torch.tensor(tables, dtype=torch.int32, device=device).view(len(works), width)
    return attention.View(tuple(w.length for w in works), lens, table, tuple(seq_lens))


@dataclass(frozen=True)
class Stored:
    """Rows whose new keys and values go to one pool, and where: int64 [rows] each."""

    rows: slice
    blocks: Tensor
    places: Tensor


def _stored(pairs: list[tuple[Request, int]], rows: slice, size: int, device: torch.device) -> Stored:
    blocks = [r.block_table[p // size] for r, p in pairs[rows]]
    places = [p % size for _, p in pairs[rows]]
    return Stored(rows, *(torch.tensor(x, dtype=torch.int64, device=device) for x in (blocks, places)))
