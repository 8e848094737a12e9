"""How fast the simulator is: iterations a second of each policy, 24 requests running and 2,000 waiting, on one core; and
the time of one plan with 256 running, where the policy can also with nine in ten of them on the CPU.

    python benchmarks/simulator_speed.py [--seconds 2]

CPU time of this process, so that a busy machine changes little.
"""

from __future__ import annotations

import argparse
import statistics
import time

from neo_lite.config import MODELS, MODES, EngineConfig
from neo_lite.engine import Engine
from neo_lite.hardware import HARDWARE, costs_of
from neo_lite.request import SamplingParams
from neo_lite.simulator import VirtualDevices
from neo_lite.workload import parse

MODEL = MODELS["llama-3.1-8b"]
COSTS = costs_of(HARDWARE["h200-8sm-14t"], MODEL)


def engine_with(mode: str, seats: int, requests: int, part: int = 3) -> Engine:
    """An engine on the virtual clock, all its seats taken (one `part` of the KV on the GPU, where the policy can) and the
    other requests waiting."""
    tokens = seats * 1200
    config = EngineConfig(
        mode=mode, gpu_kv_tokens=tokens // part if mode in OFFLOADING else tokens, cpu_kv_tokens=tokens, max_seqs=seats,
        max_batched_tokens=8192,
    )  # fmt: skip
    devices = VirtualDevices(MODEL, COSTS, config)
    engine = Engine(config, MODEL, devices, clock=devices.clock, costs=COSTS)
    for arrival in parse("synthetic:1000,100", requests):
        engine.add((1,) * arrival.prompt_tokens, SamplingParams(arrival.output_tokens, ignore_eos=True))
    while len(engine.scheduler.running) < seats - 2 and engine.iterations < 4 * seats:
        engine.step()
    return engine


OFFLOADING = ("asymmetric", "neo", "neo-released")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    print(
        f"{'policy':20}{'iterations/s':>14}{'running':>9}{'waiting':>9}   plan with 256 running: median, p99 (ms); on the CPU"
    )
    for mode in MODES:
        engine = engine_with(mode, 24, 2024)
        first, running, waiting, end_s = engine.iterations, [], [], time.process_time() + seconds
        start_s = time.process_time()
        while time.process_time() < end_s and engine.scheduler.waiting:
            engine.step()
            running.append(len(engine.scheduler.running))
            waiting.append(len(engine.scheduler.waiting))
        rate = (engine.iterations - first) / (time.process_time() - start_s)
        means = (statistics.mean(running), statistics.mean(waiting))
        told = (planned(mode, seconds, part) for part in ((3, 10) if mode in OFFLOADING else (3,)))
        print(f"{mode:20}{rate:14,.0f}{means[0]:9.1f}{means[1]:9.0f}   {' | '.join(told)}")


def planned(mode: str, seconds: float, part: int) -> str:
    times, on_cpu = planning(mode, seconds, part)
    ms = [1e3 * t for t in times]
    return f"{statistics.median(ms):.3f}, {statistics.quantiles(ms, n=100)[98]:.3f}; {on_cpu:.0f}"


def planning(mode: str, seconds: float, part: int) -> tuple[list[float], float]:
    """Seconds of each plan while about 256 requests run, and how many of them are on the CPU."""
    engine, on_cpu = engine_with(mode, 256, 2256, part), list[int]()
    times, inner, end_s = [], engine.scheduler.plan, time.process_time() + seconds

    def plan(now_s: float):
        start_s = time.process_time()
        result = inner(now_s)
        times.append(time.process_time() - start_s)
        return result

    engine.scheduler.plan = plan
    while time.process_time() < end_s and engine.scheduler.waiting:
        engine.step()
        on_cpu.append(sum(r.device == "cpu" for r in engine.scheduler.running))
    return times, statistics.mean(on_cpu)


if __name__ == "__main__":
    main()
