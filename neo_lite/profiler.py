"""Measures the stage times of a model on this machine, for the cost model. Called by `build_engine` and the command line.

Each point runs a stage alone over several layers in turn, so that neither weights nor KV come from a cache. The points of a
stage take turns, and each counts with its lower quartile, which other work on the machine disturbs least. Every second
point is held out first, to see how far interpolation is off (`stamp["held_out"]`), and then joins its curve. CPU attention
is timed with its copies, as the chain that the pipeline enqueues. Overwrites what the pools hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from neo_lite import attention, machine
from neo_lite.cost_model import Curve, Profile
from neo_lite.graphs import EAGER, Replay
from neo_lite.pipeline import Pipeline
from neo_lite.request import Device, IterationPlan, Move, Request, SubBatch, Work
from neo_lite.rows import Part, view_of
from neo_lite.streams import Steps

# Dense enough that a line between two of them is within 4 % of a parabola, which the attention of a long prompt is.
TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
KV_TOKENS = (64, 256, 1024, 4096, 16384, 65536, 131072)
REQUESTS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256)
ROUNDS = 5
POINT_S = 0.4  # a point that has taken longer, its warm-up not counted, is not run again
LEAST_LAYERS, MOST_LAYERS, ENOUGH_S = 4, 16, 0.02  # a few (very slow: one), or so many that no cache holds them all
SEQ_LEN = 1024  # of the decodes that are timed
SHORT_LEN = 64  # of those that show what a request costs besides its KV
Points = list[tuple[float, float]]


@torch.inference_mode()
def measure(pipeline: Pipeline, thorough: bool = False) -> Profile:
    """The profile of a pipeline's model, devices and thread count; in seconds or, with all points, in a minute or two."""
    timeline, recording = pipeline.timeline, pipeline.timeline.enabled
    timeline.enabled = False  # what is timed here belongs to no request
    try:
        return _profile(pipeline, thorough)
    finally:
        pipeline.streams.finish()
        timeline.enabled = recording


@torch.inference_mode()
def measure_all_reduce(pipeline: Pipeline) -> Curve:
    """Tokens -> seconds of one all-reduce of [tokens, hidden] over the ranks of a model. A layer has two: in `linear`."""

    def work_of(tokens: int) -> Callable[[], float]:
        x = torch.zeros_like(_random(pipeline, tokens, pipeline.model.config.hidden_size))
        return _repeated(pipeline, lambda _: pipeline.model.shard and pipeline.model.shard.all_reduce(x))

    widths = [n for n in TOKENS if n <= pipeline.config.max_batched_tokens]
    return Curve(_rising(_points(widths, work_of, agreed=_agreed(pipeline))))


def _profile(pipeline: Pipeline, thorough: bool) -> Profile:
    config, model, each = pipeline.config, pipeline.model, _cpu_request_tokens(pipeline)

    def points(widths: list[int], work_of: Callable[[Pipeline, int], Callable[[], float]]) -> Points:
        kept = widths if thorough else sorted({*widths[::4], widths[-1]})
        return _points(kept, lambda n: work_of(pipeline, n), ROUNDS if thorough else 2, _agreed(pipeline))

    # A length that a vector or a tile divides is faster than its neighbours, and few prompts have one.
    most = max(1, min(config.max_batched_tokens, model.config.max_position) - 1)
    measured = {
        "linear": points(_between(TOKENS, config.max_batched_tokens), _linear),
        "prefill_attn": points(_between([n - 1 for n in TOKENS[1:]], most), _prefill),
        "gpu_attn": points(_kv_points(pipeline, "gpu"), _gpu_decode),
        "cpu_attn": [(n + -(-n // SEQ_LEN) * each, s) for n, s in points(_kv_points(pipeline, "cpu"), _cpu_decode)],
        "head": points(_between(REQUESTS, config.max_seqs), _head),
        "transfer": points(_between(KV_TOKENS, _swappable(pipeline)), _swap),
    }
    kv_bytes = model.whole.kv_bytes_per_token(str(model.dtype)[6:])
    measured["transfer"] = [(n * kv_bytes, seconds) for n, seconds in measured["transfer"]]
    fields: dict[str, Any] = {name: Curve(_rising(points)) for name, points in measured.items()}
    fields |= dict(num_layers=model.config.num_layers, model=model.whole.name, dtype=str(model.dtype)[6:])
    fields |= dict(threads=config.cpu_threads or machine.usable_cores(), cpu_request_tokens=each)
    profile = Profile(**fields, stamp={**machine.stamp(), **({"held_out": held_out(measured)} if thorough else {})})
    return _with_overheads(pipeline, profile)


def held_out(measured: dict[str, Points]) -> dict[str, float]:
    """Median relative error of each curve through every second point at the points between, and of all together."""
    errors: dict[str, list[float]] = {}
    for name, points in measured.items():
        curve = Curve(_rising(points[::2]))
        errors[name] = [abs(curve(x) / seconds - 1) for x, seconds in points[1::2]]
    errors["all"] = [error for every in errors.values() for error in every]
    return {name: statistics.median(every) for name, every in errors.items() if every}


def _between(knots: Sequence[int], most: int) -> list[int]:
    """The knots up to `most`, that one too, and between each two of them a point to hold out."""
    kept = [n for n in knots if 4 * n <= 3 * most] + [most]
    halfway = [round((a * b) ** 0.5) for a, b in zip(kept, kept[1:])]
    return [n for pair in zip(kept, halfway) for n in pair] + [most]


def _agreed(pipeline: Pipeline) -> Callable[[float], float]:
    """The longest of all ranks' times: those that share a model wait for one another, so they must decide alike."""
    return pipeline.model.shard.slowest if pipeline.model.shard else float


def _points(
    widths: Sequence[int], work_of: Callable[[int], Callable[[], float]], rounds: int = 2,
    agreed: Callable[[float], float] = float,
) -> Points:  # fmt: skip
    """Seconds at each width: the widths take turns, so that a slow moment of the machine meets all of them."""
    works = [work_of(n) for n in widths]
    times_s: list[list[float]] = [[] for _ in widths]
    spent_s = [0.0] * len(widths)
    for work in works:
        work()  # compiles kernels, warms libraries up
    for _ in range(rounds):
        for i, work in enumerate(works):
            if spent_s[i] < POINT_S:
                start_s = time.perf_counter()
                times_s[i].append(work())
                spent_s[i] += agreed(time.perf_counter() - start_s)
    return [(n, sorted(seconds)[len(seconds) // 4]) for n, seconds in zip(widths, times_s)]


def _rising(points: Points) -> Points:
    """A cost cannot fall, so what falls is noise: halfway between the least curve above all points and the largest below."""
    xs, ys = zip(*points)
    above, below = np.maximum.accumulate(ys), np.minimum.accumulate(ys[::-1])[::-1]
    return list(zip(xs, ((above + below) / 2).tolist()))


def _kv_points(pipeline: Pipeline, device: Device) -> list[int]:
    """KV tokens that the pool can hold and max_seqs requests can reach, in decodes of SEQ_LEN."""
    size, pool = pipeline.config.block_size, pipeline.cache.pools[device]
    whole = max(1, SEQ_LEN // size)  # blocks of a decode: all but the last fill them
    most = min(pool.k.shape[1] // whole, pipeline.config.max_seqs) * whole * size or pool.k.shape[1] * size
    return _between(KV_TOKENS, most)


def _repeated(pipeline: Pipeline, work: Callable[[int], object]) -> Callable[[], float]:
    """What measures the seconds of `work(layer)`: as the pipeline runs it, that is from a CUDA graph where it has those, so
    that a GPU which is faster than its launches is not blamed for them (they count as overheads, where they remain)."""
    if pipeline.graphs is None:
        return lambda: _timed(pipeline, work)
    layers = range(min(pipeline.model.config.num_layers, MOST_LAYERS))
    captured: list[Replay] = []

    def all_layers() -> Steps:
        for layer in layers:
            work(layer)
            yield
        return torch.empty(0)

    def measured() -> float:
        if not captured:
            work(0)  # compiles kernels, warms libraries up
            captured.append(pipeline.streams.capture(all_layers))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        captured[0]([])  # while it runs, the launches of the second run are done
        start.record()
        captured[0]([])
        end.record()
        pipeline.streams.finish()
        return _agreed(pipeline)(start.elapsed_time(end) / 1e3 / len(layers))

    return measured


def _timed(pipeline: Pipeline, work: Callable[[int], object]) -> float:
    """Seconds of `work(layer)`, over the layers in turn until there have been enough."""
    on_one = pipeline.model.shard is None  # several ranks run the same number of layers, without asking the clock
    enough = MOST_LAYERS if on_one or pipeline.model.device.type == "cuda" else LEAST_LAYERS
    most = min(pipeline.model.config.num_layers, enough)
    pipeline.streams.finish()
    start_s = time.perf_counter()
    for layer in range(most):
        work(layer)
        if on_one and time.perf_counter() - start_s > ENOUGH_S * max(1, LEAST_LAYERS - layer):
            break
    pipeline.streams.finish()
    return _agreed(pipeline)((time.perf_counter() - start_s) / (layer + 1))


def _random(pipeline: Pipeline, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=pipeline.model.dtype, device=pipeline.model.device)


def _linear(pipeline: Pipeline, tokens: int) -> Callable[[], float]:
    model, c = pipeline.model, pipeline.model.config
    x, attn = _random(pipeline, tokens, c.hidden_size), _random(pipeline, tokens, c.num_heads, c.head_dim)
    rope = model.rope(torch.arange(tokens, device=model.device))

    def layer(i: int) -> None:
        model.pre_attention(i, x, rope)
        model.post_attention(i, attn, x)

    return _repeated(pipeline, layer)


def _head(pipeline: Pipeline, requests: int) -> Callable[[], float]:
    x = _random(pipeline, requests, pipeline.model.config.hidden_size)
    return _repeated(pipeline, lambda _: pipeline.model.head(x))


def _qkv(pipeline: Pipeline, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    c = pipeline.model.config
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    q, k, v = _random(pipeline, tokens, sum(heads), c.head_dim).split(heads, dim=1)  # side by side, as the projection's
    return q, k, v


def _prefill(pipeline: Pipeline, tokens: int) -> Callable[[], float]:
    q, k, v = _qkv(pipeline, tokens)
    empty = torch.zeros(1, 0, dtype=torch.int32, device=q.device)
    view = attention.View((tokens,), torch.tensor([tokens], dtype=torch.int32, device=q.device), empty, (tokens,))
    return _repeated(pipeline, lambda _: attention.prefill(q, k, v, q, q, view))


def _decodes(pipeline: Pipeline, kv_tokens: int, seq_len: int = SEQ_LEN) -> tuple[Work, ...]:
    """Decodes that read `kv_tokens` in all, in blocks of their own in random order."""
    size = pipeline.config.block_size
    whole = max(1, seq_len // size) * size
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
    return _repeated(pipeline, lambda i: pipeline.gpu_decode(q, k, v, pool.k[i], pool.v[i], view))


def _cpu_decode(pipeline: Pipeline, kv_tokens: int, seq_len: int = SEQ_LEN) -> Callable[[], float]:
    works, host = _decodes(pipeline, kv_tokens, seq_len), torch.device("cpu")
    part = Part(works, slice(0, len(works)), view_of(works, host))
    q, k, v = _qkv(pipeline, len(works))
    return _repeated(pipeline, lambda i: pipeline.start_cpu(part, 0, i, q, k, v)())  # type: ignore[misc]


def _cpu_request_tokens(pipeline: Pipeline) -> float:
    """What a CPU decode costs besides reading its KV, in KV tokens: as many tokens in short requests against long ones."""
    size, pool = pipeline.config.block_size, pipeline.cache.pools["cpu"]
    tokens = min(SHORT_LEN * pipeline.config.max_seqs, pool.k.shape[1] * size, 16 * SEQ_LEN) // SEQ_LEN * SEQ_LEN
    if tokens < 2 * SEQ_LEN:
        return 0.0  # too small a pool to tell
    cases = [(tokens, SHORT_LEN), (tokens, SEQ_LEN), (tokens // 2, SEQ_LEN)]
    of = [_cpu_decode(pipeline, *case) for case in cases]
    (_, short_s), (_, long_s), (_, half_s) = _points(range(3), of.__getitem__, agreed=_agreed(pipeline))
    token_s = (long_s - half_s) / (tokens - tokens // 2)  # a long request's own cost in it, which is little
    more = tokens // SHORT_LEN - tokens // SEQ_LEN
    return max(0.0, (short_s - long_s) / more / token_s) if token_s > 0 else 0.0


def _swappable(pipeline: Pipeline) -> int:
    """KV tokens of a request that fits into both pools, 16 of the profiler's decodes at most."""
    blocks = min(pool.k.shape[1] for pool in pipeline.cache.pools.values())
    return min(blocks * pipeline.config.block_size, 16 * SEQ_LEN)


def _swap(pipeline: Pipeline, kv_tokens: int) -> Callable[[], float]:
    """Seconds of a request's way from one pool to the other, all layers: the mean of out and back."""
    blocks = tuple(range(-(-kv_tokens // pipeline.config.block_size)))
    request = Request(0, (0,) * kv_tokens)
    devices: tuple[Device, ...] = ("cpu", "gpu")
    plans = [IterationPlan("profile", (), (Move(request, device, blocks, blocks),)) for device in devices]

    def work() -> float:
        start_s = time.perf_counter()
        for plan in plans:
            Pipeline.run(pipeline, plan)
        return (time.perf_counter() - start_s) / 2

    return work


def _with_overheads(pipeline: Pipeline, profile: Profile) -> Profile:
    """What iterations take beyond their stages: of decodes alone, of prefills (each of a new length, as in a real load), and
    of two sub-batches whose CPU attention hides behind batch-0's linear stage."""
    decodes = SubBatch(gpu_decodes=_decodes(pipeline, min(16 * SEQ_LEN, _kv_points(pipeline, "gpu")[-1])))
    room = int(profile.capacity(np.array([profile.t_linear(len(decodes))]))[0]) // SEQ_LEN
    most = min(16 * SEQ_LEN, _kv_points(pipeline, "cpu")[-1])
    hidden = SubBatch(cpu_decodes=_decodes(pipeline, max(1, min(room * SEQ_LEN, most))))
    for work in hidden.cpu_decodes:
        work.request.device = "cpu"
    size, pool = pipeline.config.block_size, pipeline.cache.pools["gpu"]
    longest = min(SEQ_LEN if pipeline.model.device.type == "cuda" else SHORT_LEN, pipeline.config.max_batched_tokens)
    longest = min(longest, pool.k.shape[1] * size)

    def prompt(i: int) -> tuple[SubBatch, ...]:
        request = Request(0, (0,) * max(1, longest - 7 * i), block_table=list(range(-(-longest // size))))
        return (SubBatch((Work(request, 0, len(request.prompt)),)),)

    known = replace(profile, overhead_s=_excess_s(pipeline, profile, lambda _: (decodes,)))
    prefill_s = _excess_s(pipeline, known, prompt)
    return replace(
        known, prefill_overhead_s=prefill_s, pair_overhead_s=_excess_s(pipeline, known, lambda _: (decodes, hidden))
    )


def _excess_s(pipeline: Pipeline, profile: Profile, batches_of: Callable[[int], tuple[SubBatch, ...]]) -> float:
    """The median of what iterations take beyond the estimate, the first of them to warm up and to capture a graph."""
    excess_s: list[float] = []
    spent_s, warm_up = 0.0, EAGER + 1 if pipeline.graphs else 3
    for i in range(warm_up + ROUNDS):
        if i > 1 and spent_s > 4 * POINT_S:
            break  # slow enough to tell
        plan = IterationPlan("profile", batches_of(i))
        start_s = time.perf_counter()
        Pipeline.run(pipeline, plan)
        taken_s = _agreed(pipeline)(time.perf_counter() - start_s)
        spent_s += taken_s
        sampling = sum(len(batch) for batch in plan.batches)
        excess_s.append(taken_s - profile.iteration_s(profile.stages(plan.batches), sampling))
    return max(0.0, statistics.median(excess_s[warm_up:] or excess_s[1:]))
