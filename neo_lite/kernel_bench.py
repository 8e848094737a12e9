"""`python -m neo_lite kernel-bench`: how near each rung of `kernels/` comes to what this machine's memory can deliver.

The roofline is the best of many streaming reads (`kernels/read_bandwidth.cpp`), on the same pages and threads in the same
run, measured just before and just after each kernel, since a shared machine's memory is now faster, now slower. Each call
attends over another layer, and all layers are many times the last-level cache. Called by `__main__` and notebook 04.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from neo_lite import machine
from neo_lite.config import MODELS, ModelConfig, NeoLiteError
from neo_lite.cpu_attention import DTYPES, KERNELS_DIR, RUNGS, KernelSpec, build_library, load_kernel
from neo_lite.kv_cache import host_tensor
from neo_lite.machine import last_level_cache_bytes

CASES = ((16, 1000), (1, 32768))  # sequences x tokens
BLOCK_SIZE = 16
NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "int8": "int8"}
AHEAD = ((0, 0), (1, 1024), (1, 2048), (1, 4096), (2, 2048), (2, 4096), (3, 1024), (3, 4096))  # cache level, bytes
PROBES = [(streams, *how) for streams in (1, 2, 4, 8) for how in AHEAD]
SEGMENT_BYTES = 128 << 20  # read by one measurement


@dataclasses.dataclass
class Pool:
    """Layers of random KV for one case: `kv` [layer, 2, block, kv_head, BLOCK_SIZE, head_dim], blocks in random order."""

    model: ModelConfig
    batch: int
    tokens: int
    dtype: str  # of the caches; q is float16 beside int8

    def __post_init__(self) -> None:
        width = -(-self.tokens // BLOCK_SIZE)
        shape = (2, self.batch * width, self.model.num_kv_heads, BLOCK_SIZE, self.model.head_dim)
        layer_bytes = torch.Size(shape).numel() * DTYPES[self.dtype].itemsize
        self.layers = max(2, -(-max(4 * last_level_cache_bytes(), 2 * SEGMENT_BYTES) // layer_bytes))
        machine.check_memory(2 * self.layers * layer_bytes, "the benchmark's KV caches, twice")
        self.kv, int8 = host_tensor((self.layers, *shape), DTYPES[self.dtype]), self.dtype == "int8"
        self.scales = host_tensor((self.layers, *shape[:-1]), torch.float16).fill_(0.01) if int8 else None
        rng = torch.Generator().manual_seed(0)
        numbers = torch.randn(1 << 24, generator=rng) * (40 if int8 else 1)
        for part in self.kv.view(-1).split(len(numbers)):  # the same again, at other addresses: no less to read
            part.copy_(numbers[: len(part)])
        self.table = torch.randperm(shape[1], generator=rng).reshape(self.batch, width).int()
        self.lens = torch.full((self.batch,), self.tokens, dtype=torch.int32)
        self.q_dtype = "float16" if int8 else self.dtype
        q = torch.randn(self.batch, self.model.num_heads, self.model.head_dim, generator=rng)
        self.q = q.to(DTYPES[self.q_dtype])
        row_bytes = self.model.head_dim * DTYPES[self.dtype].itemsize + (2 if int8 else 0)
        self.call_bytes = 2 * self.batch * self.tokens * self.model.num_kv_heads * row_bytes  # of KV, read by one call

    def sequence(self, layer: int, b: int) -> torch.Tensor:
        """K and V of one sequence, contiguous: [2, kv_head, token, head_dim]; int8 as the float16 that it stands for."""
        blocks = self.kv[layer][:, self.table[b].long()]
        if self.scales is not None:
            blocks = blocks.half() * self.scales[layer][:, self.table[b].long(), ..., None]
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, : self.tokens].contiguous()

    def exact(self) -> torch.Tensor:
        """Layer 0's attention in float64: [batch, q_head, head_dim]."""
        out = []
        for b in range(self.batch):
            k, v = self.sequence(0, b).double()
            q = self.q[b].double().unflatten(0, (self.model.num_kv_heads, -1))
            out.append((q @ k.mT * self.model.head_dim**-0.5).softmax(-1) @ v)
        return torch.stack(out).flatten(1, 2)


Call = Callable[[int], float]  # a layer's number -> seconds


def kernel_call(pool: Pool, rung: str, threads: int, out: torch.Tensor) -> Call:
    model = pool.model
    kv_dtype = "int8" if pool.dtype == "int8" else None
    kernel = load_kernel(KernelSpec(model.head_dim, model.group_size, BLOCK_SIZE, pool.q_dtype, kv_dtype, rung))
    scales = [{} if pool.scales is None else dict(k_scale=s[0], v_scale=s[1]) for s in
              (pool.kv if pool.scales is None else pool.scales)]  # fmt: skip
    args = [
        kernel.args(pool.q, kv[0], kv[1], pool.table, pool.lens, out, num_threads=threads, **scale)
        for kv, scale in zip(pool.kv, scales)
    ]

    def call(layer: int) -> float:
        kernel.run(args[layer])
        return kernel.last_s[1] - kernel.last_s[0]

    return call


def sdpa_call(pool: Pool, threads: int, out: torch.Tensor) -> Call:
    """torch's own, on contiguous copies, a call for each sequence: it knows no pages."""
    layers = [[pool.sequence(layer, b) for b in range(pool.batch)] for layer in range(pool.layers)]
    q, gqa = pool.q.unsqueeze(2), pool.model.group_size > 1

    def call(layer: int) -> float:
        torch.set_num_threads(threads)
        start_s = time.perf_counter()
        for b, (k, v) in enumerate(layers[layer]):
            out[b] = F.scaled_dot_product_attention(q[b : b + 1], k[None], v[None], enable_gqa=gqa)[0, :, 0]
        return time.perf_counter() - start_s

    return call


def probe_call(pool: Pool, threads: int) -> Callable[[tuple[int, int, int]], float]:
    """A streaming read of the pool's next segment, in GB/s: in turn, as the kernels go through its layers, so that a large
    cache holds no more of it for the one than for the others."""
    library = ctypes.CDLL(str(build_library(KERNELS_DIR / "read_bandwidth.cpp") / "library.so"))
    read, total = library.read_bandwidth, ctypes.c_uint64()
    segments = itertools.cycle(
        range(pool.kv.data_ptr(), pool.kv.data_ptr() + pool.kv.nbytes - SEGMENT_BYTES + 1, SEGMENT_BYTES)
    )
    read.restype = ctypes.c_double
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t, ctypes.c_void_p]

    def probe(variant: tuple[int, int, int]) -> float:
        streams, level, ahead = variant
        seconds = read(next(segments), SEGMENT_BYTES, threads, streams, level, ahead, ctypes.byref(total))
        return SEGMENT_BYTES / seconds / 1e9

    return probe


def best_probes(probe: Callable[[tuple[int, int, int]], float]) -> list[tuple[int, int, int]]:
    seen: dict[tuple[int, int, int], list[float]] = {variant: [] for variant in PROBES}
    for _ in range(3):
        for variant in PROBES:
            seen[variant].append(probe(variant))
    return sorted(PROBES, key=lambda variant: -statistics.median(seen[variant]))[:3]


def measure(pool: Pool, calls: dict[str, Call], threads: int, rounds: int) -> Iterator[tuple[str, float, list[float]]]:
    """(kernel, GB/s of KV, GB/s of the best probes around it), interleaved, in random order, round by round."""
    probe = probe_call(pool, threads)
    variants, layer = best_probes(probe), 0
    for turn in range(rounds):
        order = [name for name in calls if turn < 3 or name not in ("scalar", "openmp")]  # these take seconds
        before = [probe(variant) for variant in variants]
        for name in random.sample(order, len(order)):
            seconds, count = 0.0, 1 if name in ("scalar", "openmp") else max(1, SEGMENT_BYTES // pool.call_bytes)
            for _ in range(count):
                layer = (layer + 1) % pool.layers
                seconds += calls[name](layer)
            after = [probe(variant) for variant in variants]
            yield name, count * pool.call_bytes / seconds / 1e9, [(a + b) / 2 for a, b in zip(before, after)]
            before = after


def bench_case(
    model: ModelConfig, dtype: str, batch: int, tokens: int, threads: int, rounds: int
) -> list[dict[str, Any]]:
    pool = Pool(model, batch, tokens, dtype)
    out, exact = torch.empty_like(pool.q), pool.exact()
    calls = {rung: kernel_call(pool, rung, threads, out) for rung in reversed(RUNGS)}
    calls["torch sdpa"] = sdpa_call(pool, threads, out)
    rows: dict[str, dict[str, Any]] = {name: dict(name=name, case=f"{batch} x {tokens:,}") for name in calls}
    for name, call in calls.items():
        call(0)
        rows[name]["max_rel_err"] = float(((out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    seen: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in calls}
    for name, gbps, reads in measure(pool, calls, threads, rounds):
        seen[name].append((gbps, reads))
    for name, pairs in seen.items():
        gbps = statistics.median(gbps for gbps, _ in pairs)
        read_gbps = max(map(statistics.median, zip(*(reads for _, reads in pairs))))  # one variant's: the best one's
        fraction = min(map(statistics.median, zip(*([gbps / read for read in reads] for gbps, reads in pairs))))
        tokens_per_s = gbps * 1e9 / (pool.call_bytes / (batch * tokens))
        rows[name] |= dict(gbps=gbps, read_gbps=read_gbps, fraction=fraction, tokens_per_s=tokens_per_s)
        rows[name]["rounds"] = len(pairs)
    return list(rows.values())


def dispatch_us(threads: int) -> dict[str, float]:
    """Microseconds of a call with one sequence of one token: by the kernel's own clock, and as Python sees it."""
    spec = KernelSpec(128, 1, BLOCK_SIZE, "float16")
    kernel = load_kernel(spec)
    kv, q = torch.zeros(1, 1, BLOCK_SIZE, 128, dtype=torch.float16), torch.zeros(1, 1, 128, dtype=torch.float16)
    table, lens, out = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.empty_like(q)
    inside, outside = [], []
    for _ in range(2000):
        start_s = time.perf_counter()
        kernel(q, kv, kv, table, lens, out, num_threads=threads)
        outside.append(time.perf_counter() - start_s)
        inside.append(kernel.last_s[1] - kernel.last_s[0])
    return {"kernel": statistics.median(inside) * 1e6, "python": statistics.median(outside) * 1e6}


def main(args: argparse.Namespace) -> int:
    """Prints the table or the JSON; 1 where a kernel reads faster than the roofline, which then is wrong."""
    model, threads = MODELS[args.shape], args.threads or machine.usable_cores()
    if threads < 1 or args.rounds < 1:
        raise NeoLiteError(f"--threads {args.threads} and --rounds {args.rounds}: threads from 0 and rounds from 1")
    cost = quality(threads) if args.quality else None
    rows = [row for case in CASES for row in bench_case(model, NAMES[args.dtype], *case, threads, args.rounds)]
    read_gbps = statistics.median(row["read_gbps"] for row in rows)
    result = dict(shape=args.shape, dtype=args.dtype, threads=threads, read_gbps=read_gbps, kernels=rows,
                  dispatch_us=dispatch_us(threads), stamp=machine.stamp())  # fmt: skip
    if cost:
        result["quality"] = cost
    print(json.dumps(result, indent=1) if args.json else table(result))
    wrong = [f"{row['name']} ({row['case']})" for row in rows if row["fraction"] > 1.02]
    if wrong:
        print(f"faster than the streaming read, so that one is wrong: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def quality(threads: int) -> dict[str, float]:
    """What an int8 CPU pool costs the bundled model: on a fixed text, and on the beginnings of its sentences."""
    from neo_lite.api import load_model
    from neo_lite.quality import TEXT, perplexity, same_greedy_tokens

    model = load_model("smollm2", "cpu", "float32")
    encode = model.tokenizer.encode
    auto, int8 = (dict(mode="simple", cpu_kv_dtype=kind, cpu_threads=threads) for kind in ("auto", "int8"))
    prompts = [encode(sentence) for sentence in TEXT.split(". ")]
    tokens = encode(TEXT)
    return {
        "perplexity_float32": perplexity(model, tokens, **auto), "perplexity_int8": perplexity(model, tokens, **int8),
        "greedy_agreement": same_greedy_tokens(model, prompts, 32, auto, int8),
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['shape']}, {result['dtype']} KV in blocks of {BLOCK_SIZE}, {result['threads']} threads;"
        f" streaming read {result['read_gbps']:.1f} GB/s",
        f"{'tokens':>12}  {'kernel':<10} {'GB/s':>6}  {'share':>5}  {'Mtok/s':>6}  error",
    ]
    for row in sorted(result["kernels"], key=lambda row: (row["case"], row["gbps"])):
        lines.append(
            f"{row['case']:>12}  {row['name']:<10} {row['gbps']:6.1f}  {row['fraction']:5.2f}"
            f"  {row['tokens_per_s'] / 1e6:6.2f}  {row['max_rel_err']:.1e}"
        )
    kernel, python = result["dispatch_us"]["kernel"], result["dispatch_us"]["python"]
    lines.append(f"a call with one token: {kernel:.1f} us in the kernel, {python:.1f} us from Python")
    if q := result.get("quality"):
        lines.append(
            f"int8 on smollm2: perplexity {q['perplexity_int8']:.3f} instead of {q['perplexity_float32']:.3f},"
            f" {q['greedy_agreement']:.0%} of greedy tokens before the first difference"
        )
    return "\n".join(lines)
