"""How fast the simulator is, on one core: iterations a second of each policy with 24 requests running, and the time of
one plan with exactly 256 running, where the policy can a tenth and nine tenths of them on the CPU. 2,000 wait all along.

    python benchmarks/simulator_speed.py [--seconds 2]

CPU time of this process, so that a busy machine changes little. How many ran, waited and were on the CPU is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import cycle

from neo_lite.config import MODELS, MODES, EngineConfig
from neo_lite.engine import Engine
from neo_lite.explorer import fill
from neo_lite.hardware import HARDWARE, costs_of
from neo_lite.request import IterationPlan, SamplingParams
from neo_lite.simulator import VirtualDevices
from neo_lite.workload import parse

MODEL = MODELS["llama-3.1-8b"]
COSTS = costs_of(HARDWARE["h200-8sm-14t"], MODEL)
WAITING = 2000
OFFLOADING = ("asymmetric", "neo", "neo-released")  # to a GPU pool that is nearly full, the others to ample ones


class Planned:
    """An engine on the virtual clock that notes of each plan its seconds, and how many run, wait and are on the CPU."""

    def __init__(self, mode: str, gpu_kv_tokens: int, seats: int) -> None:
        config = EngineConfig(
            mode=mode, gpu_kv_tokens=gpu_kv_tokens, cpu_kv_tokens=2000 * seats, max_seqs=seats, max_batched_tokens=8192
        )
        devices = VirtualDevices(MODEL, COSTS, config)
        self.engine = Engine(config, MODEL, devices, clock=devices.clock, costs=COSTS)
        self.scheduler, self.told = self.engine.scheduler, list[tuple[float, int, int, int]]()
        self.inner, self.scheduler.plan = self.scheduler.plan, self.plan  # type: ignore[method-assign]

    def plan(self, now_s: float) -> IterationPlan:
        start_s = time.process_time()
        plan = self.inner(now_s)
        seconds, running = time.process_time() - start_s, self.scheduler.running
        on_cpu = sum(r.device == "cpu" for r in running)
        self.told.append((seconds, len(running), len(self.scheduler.waiting), on_cpu))
        return plan


def iterating(mode: str, seconds: float) -> str:
    """Iterations a second; whoever finishes is followed by another."""
    load, spent_s = Planned(mode, 9600 if mode in OFFLOADING else 48000, 24), 0.0
    arrivals = cycle(parse("synthetic:1000,100", 4000))
    while spent_s < seconds:
        while len(load.scheduler.waiting) < WAITING:
            arrival = next(arrivals)
            load.engine.add((1,) * arrival.prompt_tokens, SamplingParams(arrival.output_tokens, ignore_eos=True))
        start_s = time.process_time()
        load.engine.step()
        spent_s += time.process_time() - start_s
    _, ran, waited, _ = (statistics.mean(numbers) for numbers in zip(*load.told, strict=True))
    return f"{len(load.told) / spent_s:14,.0f}{ran:9.1f}{waited:9.0f}"


def planning(mode: str, seconds: float, on_gpu: int, on_cpu: int) -> str:
    """Milliseconds of a plan, of many loads one after another: as requests grow, some make way to the other pool, and
    with eight more or fewer on the CPU the next load begins."""
    told: list[tuple[float, int, int, int]] = []
    while sum(s for s, *_ in told) < seconds:
        load = Planned(mode, 1110 * on_gpu if on_gpu and on_cpu else 2000 * 256, 256)
        lengths = [1000 + 37 * i % 101 for i in range(256)]
        fill(load.scheduler, lengths[:on_gpu], lengths[on_gpu:], [1000] * WAITING, more=900)
        for _ in range(200):
            load.engine.step()
            if abs(load.told[-1][3] - on_cpu) > 8:
                break
            told.append(load.told[-1])
    assert {(ran, waited) for _, ran, waited, _ in told} == {(256, WAITING)}
    ms = [1e3 * s for s, *_ in told]
    median, p99 = statistics.median(ms), statistics.quantiles(ms, n=100)[98]
    return f"{median:.3f}, {p99:.3f} ({statistics.mean(c for *_, c in told):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    print(f"{'policy':20}{'iterations/s':>14}{'running':>9}{'waiting':>9}   ", end="")
    print("ms of a plan, 256 running and 2,000 waiting: median, p99 (on the CPU)")
    for mode in MODES:
        lone = (256, 0) if mode.startswith("gpu-only") else (0, 256)
        splits = ((230, 26), (26, 230)) if mode in OFFLOADING else (lone,)
        told = [planning(mode, seconds, *split) for split in splits]
        print(f"{mode:20}{iterating(mode, seconds)}   {' | '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
