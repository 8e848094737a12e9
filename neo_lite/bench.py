"""`python -m neo_lite bench`: a seeded batch of requests through one mode on real devices, with everything it ran on.

Reports the whole run and, apart from it, a few recorded iterations at the end, since recording events costs time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from neo_lite import machine, metrics
from neo_lite.api import build_engine, load_model
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.engine import Engine
from neo_lite.request import Request, SamplingParams
from neo_lite.timeline import Timeline
from neo_lite.workload import Arrival, random_prompt, synthetic

RECORDED = 24  # iterations at most
WARM_UP = 4  # requests before the clock starts: kernels compile and libraries load


def main(args: argparse.Namespace, ranks: Any = None) -> int:
    """Runs one benchmark and prints it."""
    check(args)
    partition(args.num_sms)
    arrivals = parse_workload(args.workload, args.requests, args.seed)
    model = load_model(args.model, args.device, args.dtype, ranks)
    bytes_per_token = model.whole.kv_bytes_per_token(str(model.dtype)[6:])
    config = EngineConfig(
        mode=args.mode, gpu_kv_tokens=args.gpu_kv_tokens, cpu_kv_tokens=int(args.cpu_kv_gib * 2**30 / bytes_per_token),
        max_batched_tokens=args.max_batched_tokens, cpu_threads=args.cpu_threads, max_seqs=512,
    )  # fmt: skip
    timeline = Timeline(enabled=False)
    engine = build_engine(model, config, timeline)
    serve(engine, arrivals[:WARM_UP], args.seed)
    requests, counts, seconds = serve(engine, arrivals, args.seed)
    result = {
        "command": command_of(args), "source": "measured", "model": args.model, "dtype": str(model.dtype)[6:], "mode": args.mode,
        "workload": args.workload, "requests": args.requests, "seed": args.seed, "gpu_kv_tokens": args.gpu_kv_tokens,
        "cpu_kv_gib": args.cpu_kv_gib, "warm_up_requests": WARM_UP, "repeats": 1, "seconds": seconds,
        "requests_per_s_30_70": metrics.window_throughput(requests), **metrics.summary(requests),
        "iterations": dict(counts), "swaps": sum(r.num_swaps for r in requests),
        "recomputes": sum(r.num_recomputes for r in requests), **busy(engine, arrivals, args, sum(counts.values()) // 2),
        **({"all_reduce_s": engine.executor.measure_all_reduce()} if ranks else {}),  # type: ignore[attr-defined]
        "tensor_parallel": args.tensor_parallel, "stamp": machine.stamp(args.num_sms or None),
    }  # fmt: skip
    print(json.dumps(result) if args.json else "\n".join(f"{k:24}{v}" for k, v in result.items()))
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuses, before anything is loaded, what would only fail in the run or after it."""
    if not 0 < args.cpu_kv_gib < 2**40:  # nan, too
        raise NeoLiteError(f"--cpu-kv-gib {args.cpu_kv_gib}: give a number of GiB above 0")
    if not 0 <= args.seed < 2**62:
        raise NeoLiteError(f"--seed {args.seed}: give a whole number from 0 to 2**62 - 1")
    trace = Path(args.trace)
    if args.trace and (trace.is_dir() or not os.access(trace if trace.exists() else trace.parent, os.W_OK)):
        raise NeoLiteError(f"--trace {args.trace} cannot be written: name a file in a folder that exists")


def partition(num_sms: int) -> None:
    """Confines this process to some multiprocessors of the GPU, before anything else touches it."""
    if not num_sms:
        return
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "green_contexts"):
        raise NeoLiteError(f"--num-sms {num_sms} needs a CUDA GPU and torch >= 2.9: leave it out")
    most = torch.cuda.get_device_properties(0).multi_processor_count
    if not 0 < num_sms <= most:
        raise NeoLiteError(f"--num-sms {num_sms}: this GPU has {most} multiprocessors; choose 8 to {most}")
    try:
        partition.context = torch.cuda.green_contexts.GreenContext.create(num_sms=num_sms)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise NeoLiteError(
            f"--num-sms {num_sms} is refused by this GPU ({str(error).splitlines()[0]}): try 8"
        ) from None
    os.environ["NEO_LITE_NUM_SMS"] = str(num_sms)
    partition.context.set_context()  # type: ignore[attr-defined]  # kept to the process's end: freed earlier, it aborts


def parse_workload(text: str, count: int, seed: int) -> list[Arrival]:
    kind, _, numbers = text.partition(":")
    parts = numbers.split(",")
    if kind != "synthetic" or len(parts) != 2 or not all(p.isdecimal() for p in parts):
        raise NeoLiteError(f"workload {text!r} is unknown: write synthetic:PROMPT,OUTPUT such as synthetic:1000,200")
    return synthetic(count, int(parts[0]), int(parts[1]), seed=seed)


def serve(engine: Engine, arrivals: list[Arrival], seed: int) -> tuple[list[Request], Counter[str], float]:
    """All requests at once, to the last answer; iterations counted by kind."""
    vocab, counts = engine.model.vocab_size, Counter[str]()
    start_s = time.perf_counter()
    requests = [
        engine.add(random_prompt(a, vocab, seed + i), SamplingParams(a.output_tokens, ignore_eos=True))
        for i, a in enumerate(arrivals)
    ]
    inner = engine.executor.run

    def run(plan: Any) -> Any:
        counts[kind_of(plan)] += 1
        return inner(plan)

    engine.executor.run = run  # type: ignore[method-assign]
    try:
        engine.run()
    finally:
        engine.executor.run = inner  # type: ignore[method-assign]
    return requests, counts, time.perf_counter() - start_s


def kind_of(plan: Any) -> str:
    """one or two sub-batches, with or without prefills"""
    size = "two batches" if len(plan.batches) == 2 else "one batch"
    return size + (", with prefills" if any(b.prefills for b in plan.batches) else ", decodes only")


def busy(engine: Engine, arrivals: list[Arrival], args: argparse.Namespace, first: int) -> dict[str, Any]:
    """The same load once more: busy fractions of each lane over iterations recorded from number `first` on; the trace."""
    timeline = engine.timeline
    requests = [
        engine.add(
            random_prompt(a, engine.model.vocab_size, args.seed + i), SamplingParams(a.output_tokens, ignore_eos=True)
        )
        for i, a in enumerate(arrivals)
    ]
    for _ in range(first):
        engine.step()
    before, timeline.enabled = engine.iterations, True
    while engine.iterations < before + RECORDED and not all(r.finished for r in requests):
        engine.step()
    timeline.enabled = False
    if args.trace:
        Path(args.trace).write_text(json.dumps(timeline.chrome_trace()))
    fractions = {lane: round(timeline.busy_fraction(lane), 4) for lane in timeline.lanes()}
    on_cpu_s = timeline.busy_s("cpu")
    hidden = round(timeline.overlap_s("gpu", "cpu") / on_cpu_s, 4) if on_cpu_s else None
    return {
        "busy_fractions": fractions, "cpu_hidden_behind_gpu": hidden, "recorded_iterations": engine.iterations - before
    }  # fmt: skip


def command_of(args: argparse.Namespace) -> str:
    skip = ("command", "json", "trace")
    ranks = args.tensor_parallel if args.executor == "torch" else 1
    launch = f"torch.distributed.run --nproc-per-node {ranks} -m " if ranks > 1 else ""
    return f"python -m {launch}neo_lite bench " + " ".join(
        f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if k not in skip
    )
