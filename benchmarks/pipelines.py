"""The paper's figures 3, 4 and 5 as measured timelines: one decode iteration of each pipeline over the same load.

    python benchmarks/pipelines.py --num-sms 8 --threads 14 --out data/recorded

44 requests of 1,100 tokens: all on the CPU in one batch (simple offloading), in two equal halves (FastDecode's symmetric
pipeline), or half of them on the GPU (NEO's asymmetric one); and the last with a prompt of 512 tokens in batch-0.
"""

from __future__ import annotations

import statistics
from typing import Any

from asymmetric_bound import Iteration, Load, arguments, pipeline_of, seconds, write

from neo_lite.pipeline import Pipeline
from neo_lite.request import IterationPlan, SubBatch
from neo_lite.timeline import Timeline

FEW, ALL = 4, 44


def plans(load: Load) -> dict[str, IterationPlan]:
    """The same requests in each, as far as KV in another pool is the same."""
    on_cpu, on_gpu, prompt = load.decodes("cpu", ALL), load.decodes("gpu", ALL // 2), load.prefill(512)
    half = ALL // 2
    few, rest = on_cpu[:FEW], on_cpu[FEW:half]
    batches = {
        "simple": (SubBatch(cpu_decodes=on_cpu),),
        "symmetric": (SubBatch(cpu_decodes=on_cpu[:half]), SubBatch(cpu_decodes=on_cpu[half:])),
        "asymmetric": (SubBatch((), on_gpu, few), SubBatch(cpu_decodes=rest)),
        "asymmetric, with a prefill": (SubBatch(prompt, on_gpu, few), SubBatch(cpu_decodes=on_cpu[FEW:])),
    }
    return {name: IterationPlan(name.split(",")[0], b) for name, b in batches.items()}


def recorded(pipeline: Pipeline, plan: IterationPlan, rounds: int) -> dict[str, Any]:
    """Seconds of the iteration, as always and while it is recorded, and the timeline of the median of the recorded."""
    whole, times, kept = Iteration(pipeline, plan), {"iteration": [], "eager": []}, []
    for i in range(rounds + 2):
        for way in ("iteration", "eager", "recorded"):
            whole.run(way)  # what it needs is in the caches, as after another iteration
            pipeline.timeline.events = []
            took = seconds(lambda way=way: whole.run(way))
            if i >= 2 and way != "recorded":
                times[way].append(took)
            elif i >= 2:
                kept.append((took, pipeline.timeline.events))
    took, events = sorted(kept, key=lambda pair: pair[0])[len(kept) // 2]
    timeline = Timeline()
    timeline.events = events
    start, end = timeline.span_s
    rows = [
        [
            e.lane,
            e.name,
            round(e.start_s - start, 6),
            round(e.end_s - start, 6),
            e.args.get("layer"),
            e.args.get("batch"),
        ]
        for e in events
    ]
    on_cpu = timeline.busy_s("cpu")
    return {
        "batches": [[b.num_tokens, len(b.prefills), len(b.gpu_decodes), len(b.cpu_decodes)] for b in plan.batches],
        "requests": sum(len(b) for b in plan.batches), "iteration_s": statistics.median(times["iteration"]),
        "eager_s": statistics.median(times["eager"]), "recorded_s": took,
        "busy": {lane: round(timeline.busy_s(lane) / (end - start), 4) for lane in timeline.lanes()},
        "cpu_hidden_behind_gpu": round(timeline.overlap_s("gpu", "cpu") / on_cpu, 4), "events": rows,
    }  # fmt: skip


def main() -> None:
    args = arguments(__doc__.split("\n")[0]).parse_args()
    pipeline = pipeline_of(args)
    cases = {}
    for name, plan in plans(Load(pipeline, args.seq_len)).items():
        cases[name] = r = recorded(pipeline, plan, args.rounds)
        ms = {k: round(r[k] * 1e3, 2) for k in ("iteration_s", "eager_s", "recorded_s")}
        print(
            f"{name}: {r['requests']} requests, {ms} ms, busy {r['busy']}, hidden {r['cpu_hidden_behind_gpu']}",
            flush=True,
        )
    what = (
        "one decode iteration of each pipeline over the same load; events: lane, stage, start and end in seconds, layer,"
        " sub-batch; batches: tokens, prefills, GPU decodes, CPU decodes"
    )
    write(args, "pipelines.py", "pipelines", {"what": what, "cases": cases})


if __name__ == "__main__":
    main()
