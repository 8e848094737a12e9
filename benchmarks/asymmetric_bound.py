"""Does an asymmetric iteration take what its schedule promises? Each term alone, then the iteration, interleaved.

    python benchmarks/asymmetric_bound.py --num-sms 8 --threads 14 --out data/recorded

The bound of one layer is max(Tl0 + Tpref0 + Tga0 + Tl1, Tca1 + Tl1, Tca0 + Tca1), and the head comes once on top.
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
from neo_lite.api import load_model
from neo_lite.bench import partition
from neo_lite.config import EngineConfig
from neo_lite.pipeline import Pipeline, Rows
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.timeline import Timeline

CASES = {  # name: prefill tokens, GPU decodes, CPU decodes in batch-0, CPU decodes in batch-1
    "decode only: 22 GPU, 20 CPU": (0, 22, 0, 20),
    "512 prefill tokens, 60 CPU": (512, 0, 0, 60),
    "1,000 prefill tokens, 22 GPU, 100 CPU": (1000, 22, 0, 100),
    "512 prefill tokens, 22 GPU, 20 + 40 CPU": (512, 22, 20, 40),
}


class Load:
    """Requests whose KV lies in random blocks of the pools, and the sub-batches of one case."""

    def __init__(self, pipeline: Pipeline, seq_len: int) -> None:
        size = pipeline.config.block_size
        self.pipeline, self.seq_len = pipeline, seq_len
        self.free = {d: torch.randperm(p.k.shape[1]).tolist() for d, p in pipeline.cache.pools.items()}
        self.blocks = -(-seq_len // size)

    def decodes(self, device: Any, count: int) -> tuple[Work, ...]:
        works = []
        for i in range(count):
            table = [self.free[device].pop() for _ in range(self.blocks)]
            request = Request(i, tuple(range(3, 3 + self.seq_len)), device=device, block_table=table)
            works.append(Work(request, self.seq_len - 1, 1))
        return tuple(works)

    def prefill(self, tokens: int) -> tuple[Work, ...]:
        """One prompt whose KV leaves for the CPU, layer by layer."""
        if not tokens:
            return ()
        table = [self.free["cpu"].pop() for _ in range(-(-tokens // self.pipeline.config.block_size))]
        return (Work(Request(999, tuple(range(3, 3 + tokens)), device="cpu", block_table=table), 0, tokens),)


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def case(pipeline: Pipeline, shape: tuple[int, int, int, int], seq_len: int, rounds: int) -> dict[str, Any]:
    prefill, on_gpu, few, rest = shape
    load, model = Load(pipeline, seq_len), pipeline.model
    b0 = SubBatch(load.prefill(prefill), load.decodes("gpu", on_gpu), load.decodes("cpu", few))
    b1 = SubBatch(cpu_decodes=load.decodes("cpu", rest))
    plan = IterationPlan("asymmetric", (b0, b1))
    terms = {**_gpu_terms(pipeline, b0, b1), **_cpu_terms(pipeline, b0, b1)}
    enqueued: list[float] = []
    inner_sample = pipeline.sample

    def iteration() -> None:
        start = time.perf_counter()

        def sample(logits: torch.Tensor, requests: Any) -> list[int]:
            enqueued.append(time.perf_counter() - start)  # Python has enqueued all layers and waits from here on
            return inner_sample(logits, requests)

        pipeline.sample = sample  # type: ignore[method-assign]
        pipeline.run(plan)

    runs: dict[str, list[float]] = {name: [] for name in [*terms, "iteration"]}
    for i in range(rounds + 2):
        for name, work in [*terms.items(), ("iteration", iteration)]:
            took = seconds(work)
            if i >= 2:
                runs[name].append(took)
    pipeline.timeline.enabled = True
    pipeline.run(plan)
    pipeline.timeline.enabled = False
    start_s = pipeline.timeline.span_s[0]
    events = [
        [
            e.lane,
            e.name,
            round(e.start_s - start_s, 6),
            round(e.end_s - start_s, 6),
            e.args.get("layer"),
            e.args.get("batch"),
        ]
        for e in pipeline.timeline.events
        if e.args.get("layer") in (None, 0, 1, 2, 3)
    ]
    pipeline.timeline.events.clear()
    t = {name: statistics.median(values) for name, values in runs.items()}
    layers = max(t["l0"] + t["pref0"] + t["ga0"] + t["l1"], t["ca1"] + t["l1"], t["ca0"] + t["ca1"])
    paper = max(t["l0"], t["ca1"]) + max(t["l1"] + t["ga0"] + t["pref0"], t["ca0"])
    spread = {name: [min(v), max(v)] for name, v in runs.items()}
    kv_bytes = sum(w.seq_len for w in b1.cpu_decodes) * model.config.kv_bytes_per_token(str(model.dtype)[6:])
    return {
        "terms_s": t,
        "spread_s": spread,
        "bound_s": layers,
        "paper_bound_s": paper,
        "rounds": rounds,
        "events": events,
        "iteration_over_bound": t["iteration"] / layers,
        "iteration_over_bound_and_head": t["iteration"] / (layers + t["head"]),
        "enqueue_s": statistics.median(enqueued[2:]),
        "cpu_kv_gb_per_s": kv_bytes / t["ca1"] / 1e9 if rest else None,
    }


def _gpu_terms(pipeline: Pipeline, b0: SubBatch, b1: SubBatch) -> dict[str, Callable[[], Any]]:
    model, c, pool = pipeline.model, pipeline.model.config, pipeline.cache.pools["gpu"]
    rows0, rows1 = (Rows(b, pipeline.config.block_size, model.device) for b in (b0, b1))

    def linear(tokens: int) -> Callable[[], None]:
        x = torch.randn(tokens, c.hidden_size, dtype=model.dtype, device="cuda")
        attn = torch.randn(tokens, c.num_heads, c.head_dim, dtype=model.dtype, device="cuda")
        rope = model.rope(torch.arange(tokens, device="cuda"))

        def work() -> None:
            for i in range(c.num_layers):
                model.pre_attention(i, x, rope)
                model.post_attention(i, attn, x)

        return work

    def attend(part: Any, backend: Any) -> Callable[[], None]:
        n = part.rows.stop - part.rows.start
        shapes = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        q, k, v = (torch.randn(n, h, c.head_dim, dtype=model.dtype, device="cuda") for h in shapes)

        def work() -> None:
            for i in range(c.num_layers if n else 0):
                backend(q, k, v, pool.k[i], pool.v[i], part.view)

        return work

    x = torch.randn(len(b0) + len(b1), c.hidden_size, dtype=model.dtype, device="cuda")
    return {
        "l0": linear(b0.num_tokens),
        "l1": linear(b1.num_tokens),
        "pref0": attend(rows0.prefills, attention.prefill),
        "ga0": attend(rows0.gpu_decodes, pipeline.gpu_decode),
        "head": lambda: model.head(x),
    }


def _cpu_terms(pipeline: Pipeline, b0: SubBatch, b1: SubBatch) -> dict[str, Callable[[], Any]]:
    model, c = pipeline.model, pipeline.model.config

    def chain(batch: SubBatch, slot: int) -> Callable[[], None]:
        part = Rows(batch, pipeline.config.block_size, model.device).cpu_decodes
        shapes = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        rows = batch.num_tokens
        q, k, v = (torch.randn(rows, h, c.head_dim, dtype=model.dtype, device="cuda") for h in shapes)

        def work() -> None:
            for i in range(c.num_layers):
                pending = pipeline.start_cpu(part, slot, i, q, k, v)
                if pending is not None:
                    pending()
            pipeline.streams.finish()

        return work

    return {"ca0": chain(b0, 0), "ca1": chain(b1, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--num-sms", type=int, default=0)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--seq-len", type=int, default=1100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("data/recorded"))
    args = parser.parse_args()
    partition(args.num_sms)
    model = load_model(args.model, "cuda", "float16")
    blocks = -(-args.seq_len // 16)
    config = EngineConfig(
        mode="simple",
        gpu_kv_tokens=24 * blocks * 16,
        cpu_kv_tokens=110 * blocks * 16,
        cpu_threads=args.threads,
        max_batched_tokens=2048,
        max_seqs=256,
    )
    pipeline = Pipeline(model, config, Timeline(enabled=False))
    for pool in pipeline.cache.pools.values():
        for tensor in (pool.k, pool.v):
            tensor[0].normal_()
            for i in range(1, tensor.shape[0]):
                tensor[i].copy_(tensor[0])
    results = {}
    for name, shape in CASES.items():
        results[name] = r = case(pipeline, shape, args.seq_len, args.rounds)
        ms = {k: round(v * 1e3, 2) for k, v in r["terms_s"].items()}
        print(
            f"{name}: {r['iteration_over_bound']:.3f} x bound, {r['iteration_over_bound_and_head']:.3f} with head; {ms}; "
            f"enqueue {r['enqueue_s'] * 1e3:.1f} ms",
            flush=True,
        )
    command = (
        f"python benchmarks/asymmetric_bound.py --model {args.model} --num-sms {args.num_sms} --threads {args.threads}"
    )
    what = "an asymmetric iteration over the bound of its schedule, every term measured alone in the same process, interleaved"
    data = {
        "what": what,
        "command": command,
        "stamp": machine.stamp(args.num_sms or None),
        "model": args.model,
        "dtype": "float16",
        "seq_len": args.seq_len,
        "threads": args.threads,
        "cases": results,
    }
    name = torch.cuda.get_device_name().split()[-1].lower() + (f"_{args.num_sms}sm" if args.num_sms else "")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}_asymmetric_bound.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
