"""`python -m neo_lite bench`: a seeded load through one mode on real devices, with everything it ran on.

A few iterations amid the run are recorded as a timeline; those run eagerly, since no CUDA graph tells when its kernels
ran, and are timed apart. Called by `__main__`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from neo_lite import machine, metrics
from neo_lite.api import build_engine, load_model
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cost_model import Profile
from neo_lite.engine import Engine, check_sampling
from neo_lite.model import Llama
from neo_lite.profiler import measure_all_reduce
from neo_lite.request import Request, SamplingParams
from neo_lite.simulator import WINDOW_REQUESTS, kind_of
from neo_lite.timeline import Timeline
from neo_lite.workload import Arrival, parse, random_prompt
from neo_lite.workload import source as workload_source

RECORDED = 24  # iterations at most, from 30 % of the output tokens on
WARM_UP = 4  # requests before the clock starts, of 8 tokens at most: kernels compile and libraries load


def main(args: argparse.Namespace, ranks: Any = None) -> int:
    """Runs one benchmark and prints it; several modes, given with commas, one after the other on the same model."""
    check(args)
    partition(args.num_sms)
    costs = Profile.load(Path(args.profile)) if args.profile else None
    arrivals = parse(args.workload, args.requests, args.rate, args.seed)
    model = load_model(args.model, args.device, args.dtype, ranks)
    for a in arrivals:  # before a prompt of that length is made
        check_sampling(SamplingParams(a.output_tokens), a.prompt_tokens, model.whole)
    if not args.cpu_kv_gib:
        tokens = sum(a.prompt_tokens + a.output_tokens + EngineConfig.block_size for a in arrivals)
        args.cpu_kv_gib = min(16.0, math.ceil(1e3 * tokens * kv_bytes(model) / 2**30) / 1e3)
    for mode in args.mode.split(","):
        result = measure(args, mode, model, arrivals, costs)
        shown = {k: v for k, v in result.items() if k not in ("profile", "all_reduce_s", "stamp")}
        print(json.dumps(result) if args.json else "\n".join(f"{k:26}{short(v)}" for k, v in shown.items()), flush=True)
        gc.collect()  # the pools of one mode make way for those of the next
    return 0


def measure(
    args: argparse.Namespace, mode: str, model: Llama, arrivals: list[Arrival], costs: Profile | None
) -> dict[str, Any]:
    """One mode: an engine, a warm-up, the whole load."""
    config = EngineConfig(
        mode=mode, gpu_kv_tokens=args.gpu_kv_tokens, cpu_kv_tokens=int(args.cpu_kv_gib * 2**30 / kv_bytes(model)),
        max_batched_tokens=args.max_batched_tokens, cpu_threads=args.cpu_threads, max_seqs=512,
    )  # fmt: skip
    timeline = Timeline(enabled=False)
    engine = build_engine(model, config, timeline, costs)
    first = [replace(a, time_s=0.0, output_tokens=min(a.output_tokens, 8)) for a in arrivals[:WARM_UP]]
    serve(engine, first, args.seed)
    run, stamp = serve(engine, arrivals, args.seed, RECORDED), machine.stamp(args.num_sms or None)
    if args.trace:
        Path(args.trace).write_text(json.dumps(timeline.chrome_trace()))
    return {
        "command": command_of(args), "source": "measured", "model": args.model, "dtype": str(model.dtype)[6:], "mode": mode,
        "ran_on": ran_on(model.device, stamp, args.cpu_threads), "workload": args.workload,
        "workload_source": workload_source(args.workload), "requests": args.requests,
        "rate_per_s": args.rate if args.rate < float("inf") else None, "seed": args.seed, "gpu_kv_tokens": args.gpu_kv_tokens,
        "cpu_kv_gib": args.cpu_kv_gib, "warm_up_requests": WARM_UP, "repeats": 1, "seconds": run.seconds,
        "mean_per_token_latency_s": metrics.mean_per_token_latency_s(run.requests), **window(run.requests),
        **metrics.summary(run.requests), **run.report(), **busy(timeline), **graphs(engine),
        **({"all_reduce_s": model.shard.together(measure_all_reduce, engine.executor).points} if model.shard else {}),
        **({"profile": engine.costs.plain()} if engine.costs and not costs else {}),  # measured here: to simulate the run
        "tensor_parallel": args.tensor_parallel, "stamp": stamp,
    }  # fmt: skip


def kv_bytes(model: Llama) -> int:
    """Of a token."""
    return model.whole.kv_bytes_per_token(str(model.dtype)[6:])


def short(value: Any) -> str:
    """For people: four digits of a number, a table in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {short(x)}" for name, x in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def window(requests: Sequence[Request]) -> dict[str, float]:
    """Figure 10a's rate, from as many requests on as the paper offered: with 300 it reads three times the run's own."""
    return {"requests_per_s_30_70": metrics.window_throughput(requests)} if len(requests) >= WINDOW_REQUESTS else {}


def ran_on(device: torch.device, stamp: dict[str, Any], threads: int) -> str:
    """What the figures belong to, for people: a part of a card is no card of its own."""
    host = f"{threads or stamp['usable_cores']} of {stamp['usable_cores']} threads of {stamp['cpu']}"
    if device.type != "cuda":
        return host
    card = stamp["gpu"]
    return f"{card['partition_sms'] or 'all'} of the {card['sms']} SMs of an {card['name']}, {host}"


def check(args: argparse.Namespace) -> None:
    """Refuses, before anything is loaded, what would only fail in the run or after it."""
    for mode in args.mode.split(","):
        EngineConfig(mode=mode)
    if args.profile and not Path(args.profile).is_file():
        raise NeoLiteError(f"--profile {args.profile} is no file: `python -m neo_lite profile --out FILE` makes one")
    if not 0 <= args.cpu_kv_gib < 2**40:  # nan, too
        raise NeoLiteError(f"--cpu-kv-gib {args.cpu_kv_gib}: give GiB above 0, or 0 for what the load can use")
    if not 0 <= args.seed < 2**62:
        raise NeoLiteError(f"--seed {args.seed}: give a whole number from 0 to 2**62 - 1")
    machine.check_writable("--trace", args.trace)


def partition(num_sms: int) -> None:
    """Confines this process to some multiprocessors of the GPU, before anything else touches it."""
    if not num_sms:
        return
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "green_contexts"):
        raise NeoLiteError(f"--num-sms {num_sms} needs a CUDA GPU and torch >= 2.9: leave it out")
    card = torch.cuda.get_device_properties(0)
    most, step = card.multi_processor_count, 8 if card.major >= 9 else 2  # CUDA would silently round up to whole steps
    if not 0 < num_sms <= most or num_sms % step:
        raise NeoLiteError(f"--num-sms {num_sms}: this GPU has {most} multiprocessors, in steps of {step}: choose one")
    try:
        partition.context = torch.cuda.green_contexts.GreenContext.create(num_sms=num_sms)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise NeoLiteError(
            f"--num-sms {num_sms} is refused by this GPU ({str(error).splitlines()[0]}): try 8"
        ) from None
    os.environ["NEO_LITE_NUM_SMS"] = str(num_sms)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(partition.context))  # type: ignore[attr-defined]  # never freed: streams and
    partition.context.set_context()  # type: ignore[attr-defined]  # graphs that outlive it would complain or abort


@dataclass
class Run:
    """What happened: the requests, and kind and seconds of each iteration (recorded or not)."""

    requests: list[Request]
    steps: list[tuple[str, float, bool]] = field(default_factory=list)
    seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        """Iterations by kind, and the median seconds of one, with and without a timeline being recorded."""
        times: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
        for kind, seconds, recorded in self.steps:
            times[recorded].setdefault(kind, []).append(seconds)
        plain, recorded_s = ({k: statistics.median(v) for k, v in times[r].items()} for r in (False, True))
        return {
            "iterations": dict(Counter(kind for kind, _, _ in self.steps)), "iteration_s": plain,
            "recorded_iterations": sum(r for _, _, r in self.steps), "recorded_iteration_s": recorded_s,
            "swaps": sum(r.num_swaps for r in self.requests), "recomputes": sum(r.num_recomputes for r in self.requests),
        }  # fmt: skip


def serve(engine: Engine, arrivals: Sequence[Arrival], seed: int, record: int = 0) -> Run:
    """Each request at its time, to the last answer; `record` iterations of it go into the timeline."""
    vocab, kinds, inner, run = engine.model.vocab_size, [""], engine.executor.run, Run([])
    coming = deque((a, random_prompt(a, vocab, seed + i)) for i, a in enumerate(arrivals))
    enough, start_s = 0.3 * sum(a.output_tokens for a in arrivals), time.perf_counter()

    def noted(plan: Any) -> Any:
        kinds.append(kind_of(plan))
        return inner(plan)

    engine.executor.run = noted  # type: ignore[method-assign]
    try:
        while coming or not all(r.finished for r in run.requests):
            while coming and start_s + coming[0][0].time_s <= time.perf_counter():
                arrival, prompt = coming.popleft()
                request = engine.add(prompt, SamplingParams(arrival.output_tokens, ignore_eos=True))
                request.arrival_s = start_s + arrival.time_s  # which may lie within the iteration that has just ended
                run.requests.append(request)
            recording = record > 0 and sum(len(r.output) for r in run.requests) >= enough
            before, step_s, engine.timeline.enabled = engine.iterations, time.perf_counter(), recording
            engine.step()
            if engine.iterations > before:
                record -= recording
                run.steps.append((kinds[-1], time.perf_counter() - step_s, recording))
            elif coming:  # nothing to do until then
                time.sleep(max(0.0, start_s + coming[0][0].time_s - time.perf_counter()))
            else:
                engine.run()  # which says why there is no progress
    finally:
        engine.executor.run, engine.timeline.enabled = inner, False  # type: ignore[method-assign]
    run.seconds = time.perf_counter() - start_s
    return run


def busy(timeline: Timeline) -> dict[str, Any]:
    """Of the recorded iterations: how much of the time each lane was busy, and how much CPU attention the GPU's work hid."""
    fractions = {lane: round(timeline.busy_fraction(lane), 4) for lane in timeline.lanes()}
    on_cpu_s = timeline.busy_s("cpu")
    hidden = round(timeline.overlap_s("gpu", "cpu") / on_cpu_s, 4) if on_cpu_s else None
    return {"busy_fractions": fractions, "cpu_hidden_behind_gpu": hidden}


def graphs(engine: Engine) -> dict[str, Any]:
    """How often a CUDA graph was captured, and how often one was replayed, warm-up included."""
    made = getattr(engine.executor, "graphs", None)
    return {"graphs": {"captured": made.captures, "replayed": made.replays} if made else None}


def command_of(args: argparse.Namespace) -> str:
    ranks = args.tensor_parallel if args.executor == "torch" else 1
    launcher = f"torch.distributed.run --nproc-per-node {ranks} -m " if ranks > 1 else ""
    return machine.command_line("bench", args, launcher)
