"""Measures the stage times of a model on this machine, for the cost model. Called by `build_engine`.

Each point runs a stage alone over several layers in turn, so that neither weights nor KV come from a cache, and takes
the median of a few rounds. CPU attention is timed with its copies, as the chain that the pipeline enqueues.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from neo_lite import attention, machine
from neo_lite.cost_model import Curve, Profile
from neo_lite.pipeline import Pipeline
from neo_lite.request import Device, Request, Work
from neo_lite.rows import Part, view_of

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
KV_TOKENS = (64, 256, 1024, 4096, 16384, 65536, 131072)
ROUNDS = 3
SLOW_S = 0.02
LAYERS = 4 if not torch.cuda.is_available() else 16
SEQ_LEN = 1024  # of the decodes that are timed


@torch.inference_mode()
def measure(pipeline: Pipeline) -> Profile:
    """The profile of a pipeline's model, devices and thread count; overwrites the contents of both pools."""
    timeline, recording = pipeline.timeline, pipeline.timeline.enabled
    timeline.enabled = False  # what is timed here belongs to no request
    try:
        return _profile(pipeline)
    finally:
        pipeline.streams.finish()
        timeline.enabled = recording


@torch.inference_mode()
def measure_all_reduce(pipeline: Pipeline) -> Curve:
    """Tokens -> seconds of one all-reduce of [tokens, hidden] over the ranks of a model. A layer has two: in `linear`."""

    def work_of(tokens: int) -> Callable[[], float]:
        x = torch.zeros(
            tokens, pipeline.model.config.hidden_size, dtype=pipeline.model.dtype, device=pipeline.model.device
        )
        return lambda: _timed(pipeline, lambda _: pipeline.model.shard and pipeline.model.shard.all_reduce(x))

    return _curve([n for n in TOKENS if n <= pipeline.config.max_batched_tokens], work_of)


def _profile(pipeline: Pipeline) -> Profile:
    model, limit = pipeline.model, pipeline.config.max_batched_tokens
    widths = [n for n in TOKENS if n < limit] + [limit]
    return Profile(
        num_layers=model.config.num_layers,
        linear=_curve(widths, lambda n: _linear(pipeline, n)),
        prefill_attn=_curve([n for n in widths if n <= model.config.max_position], lambda n: _prefill(pipeline, n)),
        gpu_attn=_curve(_kv_points(pipeline, "gpu"), lambda n: _gpu_decode(pipeline, n)),
        cpu_attn=_curve(_kv_points(pipeline, "cpu"), lambda n: _cpu_decode(pipeline, n)),
        head=_curve((1, 16, 64), lambda n: _head(pipeline, n)),
        stamp={**machine.stamp(), "threads": pipeline.config.cpu_threads or machine.usable_cores()},
    )


def _curve(widths: Sequence[int], work_of: Callable[[int], Callable[[], float]]) -> Curve:
    """Seconds of one layer at each point; never falling, as a cost cannot."""
    points: list[tuple[float, float]] = []
    for n in widths:
        run = work_of(n)
        first_s = run()  # a slow stage hides its own warm-up: one run of it is enough
        rounds_s = [first_s] if first_s > SLOW_S else [run() for _ in range(ROUNDS)]
        points.append((n, max([statistics.median(rounds_s), *(s for _, s in points)])))
    return Curve(points)


def _kv_points(pipeline: Pipeline, device: Device) -> list[int]:
    """KV tokens that the pool can hold and max_seqs requests can reach, in decodes of SEQ_LEN."""
    size, pool = pipeline.config.block_size, pipeline.cache.pools[device]
    whole = max(1, SEQ_LEN // size)  # blocks of a decode: all but the last fill them
    most = min(pool.k.shape[1] // whole, pipeline.config.max_seqs) * whole * size or pool.k.shape[1] * size
    return [n for n in KV_TOKENS if n < most] + [most]


def _timed(pipeline: Pipeline, work: Callable[[int], object]) -> float:
    """Seconds of `work(layer)`, over a few layers in turn."""
    layers = min(pipeline.model.config.num_layers, LAYERS)
    wait = torch.cuda.synchronize if pipeline.model.device.type == "cuda" else lambda: None
    wait()
    start_s = time.perf_counter()
    for layer in range(layers):
        work(layer)
    wait()
    shard, seconds = pipeline.model.shard, (time.perf_counter() - start_s) / layers
    return shard.slowest(seconds) if shard else seconds


def _random(pipeline: Pipeline, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=pipeline.model.dtype, device=pipeline.model.device)


def _linear(pipeline: Pipeline, tokens: int) -> Callable[[], float]:
    model, c = pipeline.model, pipeline.model.config
    x, attn = _random(pipeline, tokens, c.hidden_size), _random(pipeline, tokens, c.num_heads, c.head_dim)
    rope = model.rope(torch.arange(tokens, device=model.device))

    def layer(i: int) -> None:
        model.pre_attention(i, x, rope)
        model.post_attention(i, attn, x)

    return lambda: _timed(pipeline, layer)


def _head(pipeline: Pipeline, requests: int) -> Callable[[], float]:
    x = _random(pipeline, requests, pipeline.model.config.hidden_size)
    return lambda: _timed(pipeline, lambda _: pipeline.model.head(x))


def _qkv(pipeline: Pipeline, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    c = pipeline.model.config
    q, k, v = (_random(pipeline, tokens, heads, c.head_dim) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads))
    return q, k, v


def _prefill(pipeline: Pipeline, tokens: int) -> Callable[[], float]:
    q, k, v = _qkv(pipeline, tokens)
    empty = torch.zeros(1, 0, dtype=torch.int32, device=q.device)
    view = attention.View((tokens,), torch.tensor([tokens], dtype=torch.int32, device=q.device), empty, (tokens,))
    return lambda: _timed(pipeline, lambda _: attention.prefill(q, k, v, q, q, view))


def _decodes(pipeline: Pipeline, kv_tokens: int) -> tuple[Work, ...]:
    """Decodes that read `kv_tokens` in all, in blocks of their own in random order."""
    size = pipeline.config.block_size
    whole = max(1, SEQ_LEN // size) * size
    lens = [whole] * (kv_tokens // whole) + ([kv_tokens % whole] if kv_tokens % whole else [])
    free = torch.randperm(sum(-(-n // size) for n in lens)).tolist()
    works = []
    for i, n in enumerate(lens):
        request = Request(i, (0,) * n, block_table=[free.pop() for _ in range(-(-n // size))])
        works.append(Work(request, n - 1, 1))
    return tuple(works)


def _gpu_decode(pipeline: Pipeline, kv_tokens: int) -> Callable[[], float]:
    works, pool = _decodes(pipeline, kv_tokens), pipeline.cache.pools["gpu"]
    (q, k, v), view = _qkv(pipeline, len(works)), view_of(works, pipeline.model.device)
    return lambda: _timed(pipeline, lambda i: pipeline.gpu_decode(q, k, v, pool.k[i], pool.v[i], view))


def _cpu_decode(pipeline: Pipeline, kv_tokens: int) -> Callable[[], float]:
    works, host = _decodes(pipeline, kv_tokens), torch.device("cpu")
    part = Part(works, slice(0, len(works)), view_of(works, host))
    q, k, v = _qkv(pipeline, len(works))
    return lambda: _timed(pipeline, lambda i: pipeline.start_cpu(part, 0, i, q, k, v)())  # type: ignore[misc]
