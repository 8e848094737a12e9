"""Does an iteration take what its schedule promises, and what does launching it cost? Terms alone, then whole, interleaved.

    python benchmarks/asymmetric_bound.py --num-sms 8 --threads 14 --out data/recorded

The bound of one layer is max(Tl0 + Tpref0 + Tga0 + Tl1, Tca1 + Tl1, Tca0 + Tca1), and the head comes once on top. Whole
iterations run as always (decodes alone in CUDA graphs), eagerly, and while a timeline is recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from neo_lite import attention, machine, streams
from neo_lite.api import load_model
from neo_lite.bench import partition
from neo_lite.config import EngineConfig
from neo_lite.graphs import EAGER
from neo_lite.pipeline import Pipeline
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.rows import Part, numbers_of, rows_of
from neo_lite.timeline import Timeline

CASES = {  # name: prefill tokens, GPU decodes, CPU decodes in batch-0, CPU decodes in batch-1
    "GPU only: 22": (0, 22, 0, 0),
    "decode only: 22 GPU, 20 CPU": (0, 22, 0, 20),
    "512 prefill tokens, 60 CPU": (512, 0, 0, 60),
    "1,000 prefill tokens, 22 GPU, 100 CPU": (1000, 22, 0, 100),
    "512 prefill tokens, 22 GPU, 20 + 40 CPU": (512, 22, 20, 40),
}

WARM_UP = EAGER + 1  # rounds: by then the decodes alone run as graphs


class Load:
    """Requests whose KV lies in random blocks of the pools."""

    def __init__(self, pipeline: Pipeline, seq_len: int) -> None:
        self.size, self.seq_len, self.ids = pipeline.config.block_size, seq_len, itertools.count()
        self.free = {d: torch.randperm(p.k.shape[1]).tolist() for d, p in pipeline.cache.pools.items()}

    def decodes(self, device: Any, count: int) -> tuple[Work, ...]:
        return tuple(Work(self._request(device, self.seq_len), self.seq_len - 1, 1) for _ in range(count))

    def prefill(self, tokens: int) -> tuple[Work, ...]:
        """One prompt whose KV leaves for the CPU, layer by layer."""
        return (Work(self._request("cpu", tokens), 0, tokens),) if tokens else ()

    def _request(self, device: Any, tokens: int) -> Request:
        table = [self.free[device].pop() for _ in range(-(-tokens // self.size))]
        return Request(next(self.ids), tuple(3 + i % 500 for i in range(tokens)), device=device, block_table=table)


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Iteration:
    """One plan, run in three ways; `enqueued[way]`: seconds until Python has enqueued all of it and waits."""

    def __init__(self, pipeline: Pipeline, plan: IterationPlan) -> None:
        self.pipeline, self.plan, self.graphs = pipeline, plan, pipeline.graphs
        self.enqueued: dict[str, list[float]] = {"iteration": [], "eager": [], "recorded": []}

    def run(self, way: str) -> None:
        pipeline, inner, start = self.pipeline, self.pipeline.sample, time.perf_counter()

        def sample(logits: torch.Tensor, requests: Any) -> list[int]:
            self.enqueued[way].append(time.perf_counter() - start)
            return inner(logits, requests)

        pipeline.sample = sample  # type: ignore[method-assign]
        pipeline.graphs = self.graphs if way == "iteration" else None
        pipeline.timeline.enabled = way == "recorded"
        pipeline.run(self.plan)
        pipeline.timeline.enabled, pipeline.graphs, pipeline.sample = False, self.graphs, inner  # type: ignore[method-assign]


def case(pipeline: Pipeline, shape: tuple[int, int, int, int], seq_len: int, rounds: int) -> dict[str, Any]:
    prefill, on_gpu, few, rest = shape
    load, model = Load(pipeline, seq_len), pipeline.model
    b0 = SubBatch(load.prefill(prefill), load.decodes("gpu", on_gpu), load.decodes("cpu", few))
    b1 = SubBatch(cpu_decodes=load.decodes("cpu", rest))
    plan = IterationPlan("asymmetric", (b0, b1))
    whole = Iteration(pipeline, plan)
    works = {**_gpu_terms(pipeline, b0, b1), **_cpu_terms(pipeline, b0, b1)}
    works |= {way: lambda way=way: whole.run(way) for way in whole.enqueued}
    works["rows"] = lambda: [numbers_of(b, pipeline.cache) for b in plan.batches if len(b)]
    runs: dict[str, list[float]] = {name: [] for name in works}
    with torch.inference_mode():
        for i in range(rounds + WARM_UP):
            for name, work in works.items():
                work()  # what it needs is in the caches, as after another iteration
                pipeline.timeline.events.clear()
                took = seconds(work)
                if i >= WARM_UP:
                    runs[name].append(took)
    t = {name: statistics.median(values) for name, values in runs.items()}
    layers = max(t["l0"] + t["pref0"] + t["ga0"] + t["l1"], t["ca1"] + t["l1"], t["ca0"] + t["ca1"])
    kv_bytes = sum(w.seq_len for w in b1.cpu_decodes) * model.config.kv_bytes_per_token(str(model.dtype)[6:])
    return {
        "terms_s": t, "spread_s": {name: [min(v), max(v)] for name, v in runs.items()}, "rounds": rounds, "bound_s": layers,
        "paper_bound_s": max(t["l0"], t["ca1"]) + max(t["l1"] + t["ga0"] + t["pref0"], t["ca0"]),
        "iteration_over_bound": t["iteration"] / layers, "iteration_over_bound_and_head": t["iteration"] / (layers + t["head"]),
        "eager_over_bound": t["eager"] / layers,
        "enqueue_s": {way: statistics.median(times[WARM_UP:]) for way, times in whole.enqueued.items()},
        "cpu_kv_gb_per_s": kv_bytes / t["ca1"] / 1e9 if rest else None,
    }  # fmt: skip


def _gpu_terms(pipeline: Pipeline, b0: SubBatch, b1: SubBatch) -> dict[str, Callable[[], Any]]:
    model, c, pool = pipeline.model, pipeline.model.config, pipeline.cache.pools["gpu"]
    rows0 = rows_of(b0, pipeline.cache)

    def linear(tokens: int) -> Callable[[], None]:
        x = torch.randn(tokens, c.hidden_size, dtype=model.dtype, device="cuda")
        attn = torch.randn(tokens, c.num_heads, c.head_dim, dtype=model.dtype, device="cuda")
        rope = model.rope(torch.arange(tokens, device="cuda"))

        def work() -> None:
            for i in range(c.num_layers if tokens else 0):
                model.pre_attention(i, x, rope)
                model.post_attention(i, attn, x)

        return work

    def attend(part: Part, backend: Any) -> Callable[[], None]:
        q, k, v = _qkv(pipeline, part.rows.stop - part.rows.start)

        def work() -> None:
            for i in range(c.num_layers if len(q) else 0):
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
    def chain(batch: SubBatch, number: int) -> Callable[[], None]:
        part = rows_of(batch, pipeline.cache).cpu_decodes
        q, k, v = _qkv(pipeline, batch.num_tokens)

        def work() -> None:
            for i in range(pipeline.model.config.num_layers):
                pending = pipeline.start_cpu(part, number, i, q, k, v)
                if pending is not None:
                    pending()
            pipeline.streams.finish()

        return work

    return {"ca0": chain(b0, 0), "ca1": chain(b1, 1)}


def _qkv(pipeline: Pipeline, tokens: int) -> list[torch.Tensor]:
    c = pipeline.model.config
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    qkv = torch.randn(tokens, sum(heads), c.head_dim, dtype=pipeline.model.dtype, device="cuda")
    return list(qkv.split(heads, dim=1))


def pipeline_of(args: argparse.Namespace) -> Pipeline:
    """A model with random weights around pools of random KV: 24 requests on the GPU, 110 on the CPU."""
    partition(args.num_sms)
    model = load_model(args.model, "cuda", "float16")
    tokens = -(-args.seq_len // 16) * 16
    config = EngineConfig(
        mode="simple", gpu_kv_tokens=24 * tokens, cpu_kv_tokens=110 * tokens, cpu_threads=args.threads,
        max_batched_tokens=2048, max_seqs=256,
    )  # fmt: skip
    pipeline = Pipeline(model, config, Timeline(enabled=False))
    for pool in pipeline.cache.pools.values():
        for tensor in (pool.k, pool.v):
            tensor[0].normal_()
            for i in range(1, tensor.shape[0]):
                tensor[i].copy_(tensor[0])
    return pipeline


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--num-sms", type=int, default=0, help="0: the whole card")
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--seq-len", type=int, default=1100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("data/recorded"))
    return parser


def write(args: argparse.Namespace, script: str, name: str, data: dict[str, Any]) -> None:
    """One JSON beside its command and stamp; the name follows the card and its partition."""
    command = f"python benchmarks/{script} --model {args.model} --num-sms {args.num_sms} --threads {args.threads}"
    command += "".join(f" --{name} {getattr(args, name)}" for name in ("rounds", "cases") if name in args)
    command += " --plain-nodes" if getattr(args, "plain_nodes", False) else ""
    head = {
        "source": "recorded", "what": data.pop("what"), "command": command, "stamp": machine.stamp(args.num_sms or None),
        "model": args.model, "dtype": "float16", "seq_len": args.seq_len, "threads": args.threads,
    }  # fmt: skip
    card = torch.cuda.get_device_name().split()[-1].lower() + (f"_{args.num_sms}sm" if args.num_sms else "")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{card}_{name}.json").write_text(json.dumps({**head, **data}, separators=(",", ":")) + "\n")


def main() -> None:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of them")
    parser.add_argument("--plain-nodes", action="store_true", help="a host node that starts when its data are there")
    args = parser.parse_args()
    if args.plain_nodes:
        streams.has_stream_words = lambda: False  # type: ignore[assignment]
    pipeline = pipeline_of(args)
    results = {}
    for name, shape in list(CASES.items())[: args.cases]:
        results[name] = r = case(pipeline, shape, args.seq_len, args.rounds)
        ms = {k: round(v * 1e3, 2) for k, v in r["terms_s"].items()}
        enqueue = {k: round(v * 1e3, 1) for k, v in r["enqueue_s"].items()}
        print(
            f"{name}: {r['iteration_over_bound']:.3f} x bound, {r['iteration_over_bound_and_head']:.3f} with head,"
            f" {r['eager_over_bound']:.3f} eagerly; {ms}; enqueued in {enqueue}; CPU {r['cpu_kv_gb_per_s'] or 0:.1f} GB/s",
            flush=True,
        )
    what = "an iteration over the bound of its schedule, every term measured alone in the same process, interleaved"
    what += "; plain host nodes" if args.plain_nodes else ""
    name = "iteration_bound" + ("_plain_nodes" if args.plain_nodes else "")
    write(args, "asymmetric_bound.py", name, {"what": what, "cases": results})


if __name__ == "__main__":
    main()
