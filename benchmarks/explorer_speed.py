"""How long the explorer takes to answer, in ms: a slider moved (64 requests), a run scrubbed, a run simulated.

    python benchmarks/explorer_speed.py

Python's side alone: from the new value to the new HTML. The aim is 50 ms; no test holds a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from neo_lite import explorer, machine


def report(what: str, change: Callable[[int], object], repeats: int) -> None:
    times_ms = []
    for i in range(repeats):
        start_s = time.perf_counter()
        change(i)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    ninth = sorted(times_ms)[int(0.9 * repeats)]
    print(f"{what:34} median {statistics.median(times_ms):7.1f}  p90 {ninth:7.1f}  of {repeats}")


def main() -> None:
    print(f"{machine.cpu_name()}, {machine.usable_cores()} cores; ms")
    e = explorer.Explorer(waiting=18, on_gpu=22, on_cpu=24)
    inputs = e.controls
    report("a slider, 64 requests", lambda i: setattr(inputs["cpu_gb_per_s"], "value", 20.0 + i), 100)
    names = ("a10g-g5.4xlarge", "h200-8sm-14t")
    report("another machine", lambda i: setattr(inputs["machine"], "value", names[i % 2]), 20)
    report("five policies simulated", lambda i: e.simulate.click(), 3)
    print(f"  {len(e.result.requests)} requests, {len(e.result.iterations)} iterations under {inputs['policy'].value}")
    report("the run scrubbed", lambda i: setattr(e.at, "value", (i * 37 + 1) % e.at.max), 100)


if __name__ == "__main__":
    main()
