"""The executor on real devices: it takes an `IterationPlan` and runs the model's layers over it.

One sub-batch through one layer:

    gpu   pre_attention --- prefill_attn, gpu_attn -----------+--- post_attention
                     |                                        |
    d2h              +-- q, k, v --+                          |
    cpu                            +-- append, cpu_attn --+   |
    h2d                                                   +-- out

Prefills come first in the rows of every tensor, then GPU decodes, then CPU decodes: each part is a slice. On a
machine without CUDA the same calls run on the host, so the tokens are the same. Called by the engine.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial, update_wrapper
from typing import Any, Callable, Iterator

import torch

from neo_lite import attention
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cpu_attention import CompilerMissing
from neo_lite.engine import Engine
from neo_lite.kv_cache import KVCache
from neo_lite.model import Llama, sample
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.timeline import Timeline

Backend = Callable[..., torch.Tensor]


class Rows:
    """The tensors of one sub-batch: what every layer needs to know of its rows, made once an iteration."""

    def __init__(self, batch: SubBatch, block_size: int, device: torch.device) -> None:
        self.works = tuple(batch)
        pairs = [(w.request, p) for w in self.works for p in range(w.start, w.seq_len)]
        self.tokens = torch.tensor([r.token(p) for r, p in pairs], device=device)  # [tokens]
        self.positions = torch.tensor([p for _, p in pairs], device=device)  # [tokens]
        ends = torch.tensor([w.length for w in self.works]).cumsum(0) - 1
        self.samples = [w.request for w in self.works if w.samples]
        self.last = ends[[w.samples for w in self.works]].to(device)  # the row of each request that samples
        self.parts = self._parts(batch, block_size, device)
        self.stores = {d: _slots(pairs, d, block_size, device) for d in ("gpu", "cpu")}

    def _parts(self, batch: SubBatch, block_size: int, device: torch.device) -> list[Part]:
        parts, row = [], 0
        for name, works in (("prefill_attn", batch.prefills), ("gpu_attn", batch.gpu_decodes), ("cpu_attn", batch.cpu_decodes)):
            if works:
                rows = slice(row, row := row + sum(w.length for w in works))
                where = torch.device("cpu") if name == "cpu_attn" else device
                parts.append(Part(name, rows, _view(works, where), [w.request.id for w in works]))
        return parts


@dataclass(frozen=True)
class Part:
    """The rows of one kind in a sub-batch, served by one attention backend."""

    name: str  # prefill_attn, gpu_attn, cpu_attn
    rows: slice
    view: attention.View
    requests: list[int]


class Pipeline:
    """Runs plans on one model and its two KV pools. `backends` names what serves each part."""

    def __init__(self, model: Llama, config: EngineConfig, timeline: Timeline) -> None:
        self.model, self.config, self.timeline = model, config, timeline
        self.cache = KVCache(model.config, config, model.dtype, model.device)
        self.backends: dict[str, Backend] = {
            "prefill_attn": attention.prefill,
            "gpu_attn": attention.gathered_decode,
            "cpu_attn": self._cpu_backend(),
        }

    @torch.inference_mode()
    def run(self, plan: IterationPlan) -> dict[int, int]:
        """Moves first, in order; then each sub-batch through all layers. Returns request id -> next token."""
        for move in plan.moves:
            with self._span("d2h" if move.target == "cpu" else "h2d", "swap", requests=[move.request.id]):
                self.cache.swap(move)
        tokens: dict[int, int] = {}
        for batch in plan.batches:
            if len(batch):
                rows = Rows(batch, self.config.block_size, self.model.device)
                logits = self.logits(rows)
                tokens.update(zip((r.id for r in rows.samples), sample(logits, rows.samples)))
        return tokens

    def logits(self, rows: Rows) -> torch.Tensor:
        """All layers over one sub-batch: float32 [requests that sample, vocabulary]."""
        model = self.model
        with self._span("gpu", "embed"):
            x, rope = model.embed(rows.tokens), model.rope(rows.positions)
        for layer in range(model.config.num_layers):
            with self._span("gpu", "pre", layer=layer):
                q, k, v = model.pre_attention(layer, x, rope)
            self._store(layer, rows, k, v)
            attn = torch.empty_like(q)
            for part in rows.parts:
                attn[part.rows] = self._attend(layer, part, q[part.rows], k[part.rows], v[part.rows])
            with self._span("gpu", "post", layer=layer):
                x = model.post_attention(layer, attn, x)
        with self._span("gpu", "head"):
            return model.head(x[rows.last])

    def _store(self, layer: int, rows: Rows, k: torch.Tensor, v: torch.Tensor) -> None:
        """New keys and values to the pool where each request lives: for the CPU pool a swap-out, layer by layer."""
        for device, (index, slots) in rows.stores.items():
            if len(index):
                pool = self.cache.pools[device]
                with self._span("gpu" if device == "gpu" else "d2h", "store", layer=layer):
                    new_k, new_v = (t[index].to(pool.device) for t in (k, v))
                    pool.store(layer, new_k, new_v, slots.to(pool.device))

    def _attend(self, layer: int, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        backend = self.backends[part.name]
        on_cpu = part.name == "cpu_attn"
        pool = self.cache.pools["cpu" if on_cpu else "gpu"]
        if on_cpu and q.is_cuda:
            with self._span("d2h", "transfer", layer=layer):
                q, k, v = q.cpu(), k.cpu(), v.cpu()
        name = getattr(backend, "__name__", part.name)
        with self._span("cpu" if on_cpu else "gpu", part.name, layer=layer, backend=name, requests=part.requests):
            out = backend(q, k, v, pool.k[layer], pool.v[layer], part.view)
        if out.device != self.model.device:
            with self._span("h2d", "transfer", layer=layer):
                out = out.to(self.model.device)
        return out

    def _cpu_backend(self) -> Backend:
        """The C++ kernel, compiled now if it is not yet; torch, with a word about it, where no compiler is found."""
        model = self.model.config
        q = torch.empty(0, model.num_heads, model.head_dim, dtype=self.model.dtype)
        try:
            attention.kernel_for(q, self.cache.pools["cpu"].k[0])
        except CompilerMissing as error:
            warnings.warn(f"{error}; until then torch computes CPU attention, at a fraction of the speed", stacklevel=3)
            return attention.gathered_decode
        backend = partial(attention.cpu_kernel_decode, threads=self.config.cpu_threads)
        return update_wrapper(backend, attention.cpu_kernel_decode)

    @contextmanager
    def _span(self, lane: str, name: str, **args: Any) -> Iterator[None]:
        """Times a stage. On CUDA it waits for the stage's end, but only while the timeline records."""
        wait = self.timeline.enabled and self.model.device.type == "cuda"
        if wait:
            torch.cuda.synchronize()
        with self.timeline.span(lane, name, **args):
            yield
            if wait:
                torch.cuda.synchronize()


def _view(works: tuple[Work, ...], device: torch.device) -> attention.View:
    width = max(len(w.request.block_table) for w in works)
    tables = [w.request.block_table + [0] * (width - len(w.request.block_table)) for w in works]
    seq_lens = torch.tensor([w.seq_len for w in works], dtype=torch.int32, device=device)
    table = torch.tensor(tables, dtype=torch.int32, device=device)
    return attention.View(tuple(w.length for w in works), seq_lens, table)


def _slots(
    pairs: list[tuple[Request, int]], pool: str, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows whose KV belongs in `pool`, and the place of each: block * block_size + offset."""
    rows = [i for i, (r, _) in enumerate(pairs) if r.device == pool]
    slots = [r.block_table[p // size] * size + p % size for r, p in (pairs[i] for i in rows)]
    return torch.tensor(rows, device=device), torch.tensor(slots, device=device)


def build_engine(model: Llama, config: EngineConfig | None = None, timeline: Timeline | None = None, **changes: Any) -> Engine:
    """An engine on real devices: `build_engine(model, mode="simple", gpu_kv_tokens=4096)`."""
    try:
        config = replace(config or EngineConfig(), **changes)
    except TypeError:
        known = ", ".join(f.name for f in fields(EngineConfig))
        raise NeoLiteError(f"unknown setting among {', '.join(changes)}: choose from {known}") from None
    timeline = timeline or Timeline(enabled=False)
    return Engine(config, model.config, Pipeline(model, config, timeline), timeline=timeline)
