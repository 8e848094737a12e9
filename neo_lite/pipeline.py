"""The executor on real devices: it takes an `IterationPlan` and runs the model's layers over it.

Each sub-batch is a generator that stops once a layer, where its CPU attention is under way, and lets the other go on:

    gpu   pre0 ga0 | post1 pre1 | post0 pre0 ga0 | post1 pre1 | ...      0, 1: the sub-batches
    cpu        |---- ca0 ----|      |---- ca1 ----|  |-- ca0 ...

    gpu   pre1 | pre0 ga0 post0 | post1 pre1 | pre0 ga0 post0 | ...      with no CPU decodes in batch-0
    cpu        |----- ca1 -----|             |----- ca1 -----|

`post`, `pre` are the linear stages (the paper's po and pr), `ga` the attention of prefills and GPU decodes, `ca` that of CPU
decodes, with the copies of q, k, v before and of the output after it. A join makes the compute stream wait for `ca` and
nothing else. So with one layer's times T, and as long as Tca0 <= Tpref0 + Tga0 + Tl1, which the scheduler sees to, an
iteration takes at most layers x max(Tl0 + Tpref0 + Tga0 + Tl1, Tca1 + Tl1, Tca0 + Tca1); measured on 8 SMs of an H200: 1.04 x
that, with 512 prefill tokens and with decodes alone, of which the head, outside the bound, is 0.03; the rest is 0.5 ms before
the GPU starts and after it ends, and layers in which GPU and CPU are equally long and wait for one another. One sub-batch
alone is simple offloading (figure 3) or GPU-only. The KV of a prefill that belongs on the CPU, and requests that change
pools, are copied layer by layer beside the compute stream. On a machine without CUDA the same calls run on the host, in the
same order. Called by the engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from neo_lite import attention
from neo_lite.attention import Backend
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cpu_attention import CompilerMissing, Kernel
from neo_lite.graphs import Graphs, turn
from neo_lite.kv_cache import KVCache, Swap
from neo_lite.model import Llama, sample
from neo_lite.request import IterationPlan
from neo_lite.rows import Part, Rows, rows_of, samples_of
from neo_lite.streams import Cuda, Host, Pending, Steps, failure, finished
from neo_lite.timeline import Timeline

UNPIPELINED = ("gpu-only", "gpu-only-unchunked", "simple")  # modes in which nothing need run beside the GPU


class Pipeline:
    """Runs plans on one model and its two KV pools."""

    sample = staticmethod(sample)

    def __init__(self, model: Llama, config: EngineConfig, timeline: Timeline) -> None:
        self.model, self.config, self.timeline = model, config, timeline
        self.cache = KVCache(model.config, config, model.dtype, model.device)
        self.gpu_decode = attention.gpu_decode_backend(model.device, config.block_size)
        self.cpu_decode, kernel = self._cpu_backend()
        self.streams: Host | Cuda
        if model.device.type == "cuda" and kernel is not None:
            self.streams = Cuda(timeline, self.cpu_decode, kernel, model.config, config)
        else:
            self.streams = Host(timeline, self.cpu_decode)
        on_streams = isinstance(self.streams, Cuda) and self.gpu_decode is attention.triton_decode
        self.graphs = Graphs(self.forward, self.cache, self.streams) if on_streams else None

    def run(self, plan: IterationPlan) -> dict[int, int]:
        """One iteration: request id -> next token of each request that samples. Raises NeoLiteError where the GPU's memory
        does not suffice, or the GPU has failed."""
        try:
            return self._run(plan)
        except RuntimeError as error:
            problem = failure(error)
            if problem is None:
                raise
        with suppress(RuntimeError):  # out here, where no traceback holds the iteration's tensors any more
            torch.cuda.empty_cache()
        raise NeoLiteError(problem)

    @torch.inference_mode()
    def _run(self, plan: IterationPlan) -> dict[int, int]:
        self.streams.begin()
        try:
            swap = self.cache.prepare(*plan.moves) if plan.moves else None  # its tensors live until all of it has run
            swapped = self._start(swap, plan) if swap else []
            batches = [b for b in plan.batches if len(b)]
            decodes_only = not swapped and not any(b.prefills for b in batches)
            if self.graphs and batches and decodes_only and not self.timeline.enabled:
                logits = self.graphs.run(batches)
            else:
                logits = finished(self.forward([rows_of(b, self.cache) for b in batches], swapped))
            requests = [request for b in batches for request in samples_of(b)]
            tokens = self.sample(logits, requests) if requests else []
        finally:
            self.streams.finish()
        return {r.id: token for r, token in zip(requests, tokens, strict=True)}

    def forward(self, batches: Sequence[Rows], swapped: Sequence[Any] = ()) -> Steps:
        """All layers, of two sub-batches in turn, and the head: logits [requests that sample, vocabulary]. Stops where they
        do."""
        steps = [self._layers(rows, i, swapped) for i, rows in enumerate(batches)]
        last = yield from alternate(steps, turn([len(rows.cpu_decodes.works) for rows in batches]))
        with self.streams.stage("gpu", "head"):  # for all at once: its weights are a fifteenth of an 8B model's
            return self.model.head(torch.cat(last)) if last else torch.empty(0)

    def _layers(self, rows: Rows, batch: int, swapped: Sequence[Any]) -> Steps:
        """One sub-batch through all layers; stops in each, once its CPU attention is under way, or at its end where there is
        none. Returns the hidden states [requests that sample, hidden] that the head reads."""
        model, stage = self.model, self.streams.stage
        with stage("gpu", "embed", batch=batch):
            x, rope = model.embed(rows.tokens), model.rope(rows.positions)
            to_cpu, to_gpu = rows.to_cpu.long(), rows.to_gpu.long()
        for layer in range(model.config.num_layers):
            if swapped:
                self.streams.wait(swapped[layer])
            with stage("gpu", "pre", layer=layer, batch=batch):
                q, k, v = model.pre_attention(layer, x, rope)
            pending = self.start_cpu(rows.cpu_decodes, batch, layer, q, k, v)
            self._store(layer, k, v, to_cpu, to_gpu)
            attn = self._gpu_attention(rows, batch, layer, q, k, v)
            if pending is not None:
                yield
                attn.append(pending())
            with stage("gpu", "post", layer=layer, batch=batch):
                x = model.post_attention(layer, torch.cat(attn) if len(attn) > 1 else attn[0], x)
            if pending is None:
                yield
        return x.index_select(0, rows.last)

    def start_cpu(self, part: Part, batch: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Pending | None:
        if not part.works:
            return None
        q, k, v = (t[part.rows] for t in (q, k, v))
        if isinstance(self.streams, Host) and q.is_cuda:  # no kernel to put on a stream: wait for torch instead
            pending = self.streams.cpu_attention(batch, self.cache.pools["cpu"], layer, part, q.cpu(), k.cpu(), v.cpu())
            return lambda: pending().to(self.model.device)
        return self.streams.cpu_attention(batch, self.cache.pools["cpu"], layer, part, q, k, v)

    def _gpu_attention(self, rows: Rows, batch: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The outputs of prefills and of GPU decodes, as far as there are any."""
        pool, outputs = self.cache.pools["gpu"], []
        for name, part, backend in (
            ("prefill_attn", rows.prefills, attention.prefill), ("gpu_attn", rows.gpu_decodes, self.gpu_decode)
        ):  # fmt: skip
            if part.works:
                what = {"backend": backend.__name__, "requests": part.requests}
                with self.streams.stage("gpu", name, layer=layer, batch=batch, **what):
                    new = part.rows
                    outputs.append(backend(q[new], k[new], v[new], pool.k[layer], pool.v[layer], part.view))
        return outputs

    def _store(self, layer: int, k: Tensor, v: Tensor, to_cpu: Tensor, to_gpu: Tensor) -> None:
        """New keys and values to the pool where each request lives; to the CPU's beside the compute stream."""
        middle, end = len(to_cpu), len(to_cpu) + len(to_gpu)
        if len(to_gpu):
            with self.streams.stage("gpu", "store", layer=layer):
                self.cache.pools["gpu"].put(layer, k[middle:end], v[middle:end], to_gpu)
        if len(to_cpu):
            leave = partial(self.cache.pools["cpu"].put, layer, k[:middle], v[:middle], to_cpu)
            self.streams.aside("d2h", "store", leave, reads=(k, v), layer=layer)

    def _start(self, swap: Swap, plan: IterationPlan) -> list[Any]:
        """Starts the moves of requests between the pools; for each layer what its compute has to wait for."""
        lane, ids = "d2h" if swap.target.name == "cpu" else "h2d", [m.request.id for m in plan.moves]
        layers = range(self.model.config.num_layers)
        return [self.streams.aside(lane, "swap", partial(swap.layer, i), layer=i, requests=ids) for i in layers]

    def _cpu_backend(self) -> tuple[Backend, Kernel | None]:
        """The C++ kernel, compiled now if it is not yet; torch, with a word about it, where no compiler is found."""
        model = self.model.config
        q = torch.empty(0, model.num_heads, model.head_dim, dtype=self.model.dtype)
        try:
            kernel = attention.kernel_for(q, self.cache.pools["cpu"].k[0])
        except CompilerMissing as error:
            if self.cache.pools["cpu"].int8:
                raise
            if self.model.device.type == "cuda" and self.config.mode not in UNPIPELINED:
                raise NeoLiteError(f"mode {self.config.mode} needs the CPU kernel on a CUDA stream, and there is {error};"
                                   f" without it this machine runs {', '.join(UNPIPELINED)}") from None  # fmt: skip
            warnings.warn(f"{error}; until then torch computes CPU attention, at a fraction of the speed", stacklevel=3)
            return attention.gathered_decode, None
        backend = partial(attention.cpu_kernel_decode, threads=self.config.cpu_threads)
        return update_wrapper(backend, attention.cpu_kernel_decode), kernel


def alternate(batches: Sequence[Steps], order: Sequence[int]) -> Generator[None, None, list[Tensor]]:
    """Runs generators in turn, each to its next stop, until all have returned; their results. `order`: of a turn. Stops after
    each of them."""
    results: dict[int, Tensor] = {}
    while len(results) < len(batches):
        for i in order:
            if i not in results:
                try:
                    next(batches[i])
                except StopIteration as end:
                    results[i] = end.value
                yield
    return [results[i] for i in range(len(batches))]
