"""What the notebooks show of a small GPU inside a big one: throughput against batch size, and one decode iteration of
simple offloading beside swapping the KV in at every step.

    python benchmarks/gpu_partition.py --num-sms 8 --threads 14 --out data/recorded

Writes h200_8sm_batch_size.json, h200_8sm_decode_attention.json and h200_8sm_simple_offloading.json (the names follow the
card and its partition).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from neo_lite import attention, machine
from neo_lite.api import build_engine, load_model
from neo_lite.bench import partition
from neo_lite.config import EngineConfig
from neo_lite.model import Llama
from neo_lite.request import Move, Request, SamplingParams
from neo_lite.timeline import Timeline
from neo_lite.workload import random_prompt, synthetic

SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]


def timed_s(work: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds on the GPU of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def batch_sizes(model: Llama, context: int, sizes: list[int]) -> list[dict[str, float]]:
    """One decode iteration at each batch size, its linear stages and its attention each measured alone."""
    c, rows = model.config, []
    blocks = context // 16
    pool_blocks = max(sizes) * blocks
    layers = min(4, c.num_layers)  # cycles through enough KV to leave the cache; the iteration is scaled to all layers
    k, v = (
        torch.randn(layers, pool_blocks, c.num_kv_heads, 16, c.head_dim, dtype=model.dtype, device="cuda") for _ in "kv"
    )
    for batch in sizes:
        x = torch.randn(batch, c.hidden_size, dtype=model.dtype, device="cuda")
        rope = model.rope(torch.full((batch,), context - 1, device="cuda"))
        table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
        view = attention.View(
            (1,) * batch, torch.full((batch,), context, dtype=torch.int32, device="cuda"), table, (context,) * batch
        )
        q = torch.randn(batch, c.num_heads, c.head_dim, dtype=model.dtype, device="cuda")

        def linear(x=x, rope=rope, q=q):
            for layer in range(layers):
                model.pre_attention(layer, x, rope)
                model.post_attention(layer, q, x)

        def attend(q=q, view=view):
            for layer in range(layers):
                attention.triton_decode(q, None, None, k[layer], v[layer], view)

        scale = c.num_layers / layers
        linear_s, attention_s = timed_s(linear) * scale, timed_s(attend) * scale
        head_s = timed_s(lambda x=x: model.head(x))
        total_s = linear_s + attention_s + head_s
        kv_gb = 2 * batch * context * c.num_kv_heads * c.head_dim * model.dtype.itemsize * c.num_layers / 1e9
        rows.append({"batch": batch, "iteration_s": total_s, "linear_s": linear_s, "attention_s": attention_s, "head_s": head_s,
                     "tokens_per_s": batch / total_s, "kv_read_gb_per_s": kv_gb / attention_s})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def decode_attention(model: Llama, batch: int, context: int, layers: int = 16) -> dict[str, Any]:
    """The Triton kernel alone, cycling through layers so that no KV comes from the cache; the GB/s it reads."""
    c, blocks = model.config, -(-context // 16)
    k, v = (
        torch.randn(layers, batch * blocks, c.num_kv_heads, 16, c.head_dim, dtype=model.dtype, device="cuda")
        for _ in "kv"
    )
    table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    view = attention.View((1,) * batch, lens, table, (context,) * batch)
    q = torch.randn(batch, c.num_heads, c.head_dim, dtype=model.dtype, device="cuda")

    def attend() -> None:
        for layer in range(layers):
            attention.triton_decode(q, q, q, k[layer], v[layer], view)

    layer_s = timed_s(attend, repeats=20) / layers
    num_bytes = 2 * batch * context * c.num_kv_heads * c.head_dim * model.dtype.itemsize
    return {
        "batch": batch,
        "context_tokens": context,
        "layer_s": layer_s,
        "kv_read_gb_per_s": num_bytes / layer_s / 1e9,
    }


def simple_offloading(model: Llama, requests: int, context: int, threads: int) -> dict[str, Any]:
    """One decode iteration of mode simple as a timeline, and per layer the two ways to attend to KV on the host."""
    timeline = Timeline(enabled=False)
    tokens = (context + 64) * requests
    config = EngineConfig(
        mode="simple", gpu_kv_tokens=tokens, cpu_kv_tokens=tokens + 4096, cpu_threads=threads, max_batched_tokens=4096
    )
    engine = build_engine(model, config, timeline)
    arrivals = synthetic(requests, context, 50, spread=0.0)
    for i, arrival in enumerate(arrivals):
        engine.add(random_prompt(arrival, model.config.vocab_size, i), SamplingParams(50, ignore_eos=True))
    while engine.scheduler.waiting or any(r.num_computed < r.num_tokens - 1 for r in engine.scheduler.running):
        engine.step()
    plain = []
    for _ in range(8):
        start = time.perf_counter()
        engine.step()
        plain.append(time.perf_counter() - start)
    timeline.enabled = True
    engine.step()
    events = [[e.lane, e.name, e.start_s, e.end_s, e.args.get("layer")] for e in timeline.events]
    t0 = min(e[2] for e in events)
    events = [[lane, name, round(a - t0, 7), round(b - t0, 7), layer] for lane, name, a, b, layer in events]
    cpu = [e.duration_s for e in timeline.events if e.name == "cpu_attn"]
    return {"requests": requests, "context_tokens": context, "threads": threads,
            "iteration_s": statistics.median(plain), "events": events,
            "per_layer_s": {"cpu_attention": statistics.median(cpu), **swap_each_step(engine, model)},
            **sizes(model, engine)}  # fmt: skip


def sizes(model: Llama, engine: Any) -> dict[str, Any]:
    tokens = sum(r.num_tokens for r in engine.scheduler.running)
    c = model.config
    return {
        "kv_bytes_per_layer": 2 * tokens * c.num_kv_heads * c.head_dim * model.dtype.itemsize,
        "link_gb_per_s": link_gb_per_s(),
    }


def link_gb_per_s() -> float:
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return (1 << 28) / timed_s(lambda: card.copy_(host, non_blocking=True)) / 1e9


def swap_each_step(engine: Any, model: Llama) -> dict[str, float]:
    """The alternative: a layer's KV comes over the link, and the GPU attends to it there."""
    cache, running = engine.executor.cache, engine.scheduler.running
    first, moves = 0, []
    for request in running:
        count = len(request.block_table)
        moves.append(
            Move(Request(request.id, (1,)), "gpu", tuple(request.block_table), tuple(range(first, first + count)))
        )
        first += count
    swaps = [cache.prepare(m) for m in moves]
    width = max(len(m.target_blocks) for m in moves)
    table = torch.tensor(
        [[*m.target_blocks, *[0] * (width - len(m.target_blocks))] for m in moves], dtype=torch.int32, device="cuda"
    )
    lens = [r.num_tokens for r in running]
    view = attention.View((1,) * len(lens), torch.tensor(lens, dtype=torch.int32, device="cuda"), table, tuple(lens))
    q = torch.randn(len(lens), model.config.num_heads, model.config.head_dim, dtype=model.dtype, device="cuda")
    pool = cache.pools["gpu"]

    def link_copy():
        for swap in swaps:
            swap.layer(0)

    def both():
        link_copy()
        attention.triton_decode(q, None, None, pool.k[0], pool.v[0], view)

    return {"link_copy": timed_s(link_copy), "swap_in_and_gpu_attention": timed_s(both)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--num-sms", type=int, default=0, help="0: the whole card")
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--context", type=int, default=1008)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--only", default="", help="batch_size, decode_attention or simple_offloading: this one alone")
    parser.add_argument("--out", type=Path, default=Path("data/recorded"))
    args = parser.parse_args()
    partition(args.num_sms)
    model = load_model(args.model, "cuda", "float16")
    command = (
        f"python benchmarks/gpu_partition.py --model {args.model} --num-sms {args.num_sms} --threads {args.threads}"
    )
    common = {
        "source": "recorded",
        "command": command,
        "stamp": machine.stamp(args.num_sms or None),
        "model": args.model,
        "dtype": "float16",
    }
    name = torch.cuda.get_device_name().split()[-1].lower() + (f"_{args.num_sms}sm" if args.num_sms else "")
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "batch_size": (
            "one decode iteration against batch size: linear stages, attention and head, each measured alone",
            lambda: {"context_tokens": args.context, "rows": batch_sizes(model, args.context, SIZES)},
        ),
        "decode_attention": (
            "paged decode attention on the GPU alone, layers in turn", lambda: decode_attention(model, 20, 1200)
        ),
        "simple_offloading": (
            "one decode iteration of simple offloading; per layer, CPU attention against swapping the KV in at every step",
            lambda: simple_offloading(model, args.requests, args.context, args.threads),
        ),
    }  # fmt: skip
    for part, (what, measure) in parts.items():
        if args.only in ("", part):
            write(args.out / f"{name}_{part}.json", {"what": what, **common, **measure()})


def write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print("wrote", path)


if __name__ == "__main__":
    main()
