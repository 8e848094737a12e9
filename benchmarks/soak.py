"""Minutes of random arrivals, cancellations and lengths on a tiny model, where iterations are shortest: is every request
answered, every block given back, and does memory stay as it is?

    python benchmarks/soak.py --seconds 180 --device cuda --mode asymmetric

Pools are so small that requests are swapped, dropped and prefilled again all the time. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import torch

from neo_lite import machine
from neo_lite.api import build_engine, load_model
from neo_lite.engine import Engine
from neo_lite.request import Request, SamplingParams

WARM_UP = 0.3  # of the time: until then memory may grow, while buffers, kernels and graphs are made
ALLOWED_BYTES = 32 << 20  # of growth after it, by the allocators' own rounding


def memory() -> dict[str, int]:
    """Bytes in use: this process's resident memory, torch's tensors on the GPU, and the card as the driver sees it."""
    used = {"host": machine._proc_bytes("VmRSS", "proc/self/status") or 0}
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        used |= {"gpu_tensors": torch.cuda.memory_allocated(), "gpu": total - free}
    return used


def soak(engine: Engine, seconds: float, seed: int = 0, most: int = 40) -> dict[str, Any]:
    """Runs for that long, then to the last answer; what came in, what became of it, and what stayed behind."""
    rng, live, ends = random.Random(seed), [], Counter[str]()
    before: dict[str, int] = {}
    swaps = recomputes = short = 0
    start = time.perf_counter()

    def settle(request: Request) -> None:
        nonlocal swaps, recomputes, short
        ends[request.finish_reason or "unanswered"] += 1
        swaps, recomputes = swaps + request.num_swaps, recomputes + request.num_recomputes
        short += request.finish_reason == "length" and len(request.output) != request.sampling.max_tokens

    while live or time.perf_counter() - start < seconds:
        passed = (time.perf_counter() - start) / seconds
        while passed < 1 and len(live) < most and rng.random() < 0.5:
            prompt = [rng.randrange(3, engine.model.vocab_size) for _ in range(rng.choice((1, 5, 30, 60)))]
            temperature = rng.choice((0.0, 0.0, 0.8))
            live.append(engine.add(prompt, SamplingParams(rng.randint(1, 40), temperature, ignore_eos=True)))
        if live and rng.random() < 0.1:
            engine.cancel(rng.choice(live))
        engine.step()
        for request in [r for r in live if r.finished]:
            live.remove(request)
            settle(request)
        if passed > WARM_UP and not before:
            before = memory()
    blocks = engine.scheduler.blocks
    return {
        "seconds": round(time.perf_counter() - start, 1), "iterations": engine.iterations, "requests": sum(ends.values()),
        "ends": dict(ends), "cut_short": short, "swaps": swaps, "recomputes": recomputes,
        "blocks_leaked": {d: blocks.total[d] - blocks.free(d) for d in ("gpu", "cpu")},
        "left_in_queues": engine.scheduler.unfinished, "memory_before": before,
        "growth_bytes": {name: used - before[name] for name, used in memory().items()},
    }  # fmt: skip


def wrong(result: dict[str, Any]) -> list[str]:
    """What must not be."""
    unanswered = {k: n for k, n in result["ends"].items() if k not in ("length", "cancelled")}
    faults = [f"requests ended as {unanswered}"] if unanswered else []
    faults += [f"{result[name]} {name}" for name in ("cut_short", "left_in_queues") if result[name]]
    faults += [f"{n} {d} blocks leaked" for d, n in result["blocks_leaked"].items() if n]
    return faults + [f"{k} grew by {n} bytes" for k, n in result["growth_bytes"].items() if n > ALLOWED_BYTES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mode", default="asymmetric")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = load_model("random:tiny", args.device, "auto")
    engine = build_engine(model, mode=args.mode, block_size=8, gpu_kv_tokens=480, cpu_kv_tokens=1600)
    result = soak(engine, args.seconds, args.seed)
    faults = wrong(result)
    graphs = engine.executor.graphs  # type: ignore[attr-defined]
    print(json.dumps({
        "source": "measured", "what": "a tiny model under random arrivals, cancellations and lengths",
        "command": f"python benchmarks/soak.py --seconds {args.seconds:g} --device {args.device} --mode {args.mode}"
        f" --seed {args.seed}",
        "wrong": faults, **result, "graphs": {"captured": graphs.captures, "replayed": graphs.replays} if graphs else None,
        "stamp": machine.stamp(),
    }))  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
