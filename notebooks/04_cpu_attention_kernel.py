# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · A CPU attention kernel at the speed of memory
#
# NEO asks the CPU to compute attention for requests whose KV cache does not fit on the GPU. Whatever it gains, it gains
# because the CPU gets through that KV quickly. So how quickly can a CPU do it? There is an answer before any code is
# written: as fast as its memory can be read, and no faster. This notebook measures that limit and climbs towards it.
#
# You will
# 1. count the bytes, and measure how fast this machine can read memory at all: the *roofline*;
# 2. write paged decode attention in a dozen lines of torch;
# 3. climb a ladder of four C++ kernels, from a textbook loop to one that keeps the memory busy;
# 4. see what grouped heads, threads, block size and length change;
# 5. halve the bytes with int8, and look at what a real model says to that;
# 6. write a kernel here, in the notebook, and have it compiled and measured in seconds.
#
# **Takes** 35 minutes to read and about a minute to run on 2 cores. **Memory** 1.8 GB. **Needs** a C++ compiler (g++
# or clang++; Colab has one). A GPU plays no part: everything here is the CPU's own work.

# %%
# Set-up: idle where neo_lite is installed. Elsewhere (Colab) it fetches the course and installs only what is missing.
import sys
from importlib.util import find_spec
from subprocess import check_call

if find_spec("neo_lite") is None:
    check_call("test -d neo-lite || git clone -q --depth 1 -b v0.1.0 https://github.com/neo-lite/neo-lite", shell=True)
    check_call([sys.executable, "neo-lite/tools/install_missing.py"])
    sys.path.insert(0, "neo-lite")
from neo_lite import machine

machine.print_env(machine.env_report())

# %% [markdown]
# The libraries, and from the package the benchmark behind `python -m neo_lite kernel-bench`: it measures kernels and
# memory in one run.

# %%
import ctypes
import difflib
import itertools
import json
import statistics
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

# %% [markdown]
# `load_kernel` compiles a rung of the ladder for one shape and loads it; `KERNELS_DIR` is where the sources lie.
# %%
from neo_lite import attention, exercise, kernel_bench, load_model, plots, quality
from neo_lite.config import MODELS
from neo_lite.cpu_attention import RUNGS, Kernel, KernelSpec, load_kernel
from neo_lite.kernel_build import KERNELS_DIR

# %% [markdown]
# Two shapes serve as examples: Llama-2-7B, where each of 32 query heads has K and V of its own (MHA), and
# Llama-3.1-8B, where four query heads share them (GQA).

# %%
plots.use_style()
BELOW = (0, 0.04, 1, 1)  # leaves room beneath a figure for its source
torch.manual_seed(0)
llama2, llama31 = MODELS["llama-2-7b"], MODELS["llama-3.1-8b"]
threads = machine.usable_cores()
here = f"{machine.cpu_name()}, {threads} threads"

# %% [markdown]
# ## 1. Count the bytes first
#
# To write one token, attention compares the query with the key of every token so far, and adds up their values. Each
# number of K is multiplied once for each query head that shares it, each number of V likewise. Nothing is used twice:
# the next token needs all of it again, but by then a whole model has passed through the caches.

# %%
for config in (llama2, llama31):
    kv_bytes = config.kv_bytes_per_token("float16")
    flops = 2 * 2 * config.num_layers * config.num_heads * config.head_dim  # a product and a sum, for K and for V
    print(f"{config.name}: {kv_bytes / 1024:.0f} KiB for each token of context, {flops / kv_bytes:.0f} FLOP per byte")

# %% [markdown]
# One FLOP for each byte; four with GQA. A core with wide vectors does ten or more in the time in which memory delivers
# one byte to it. So the arithmetic should be nearly free, and the time of a good kernel is `bytes / bandwidth`. A hundred
# requests of 1,000 tokens in Llama-2-7B's shape have 52 GB to be read in *every* iteration, for one new token each.
#
# ### How fast can memory be read?
#
# "Bandwidth" is not one number. It depends on how you ask. We need memory that no cache holds; a pool of KV will do, in
# blocks of 16 tokens, in random order.

# %%
pool = kernel_bench.Pool(llama2, batch=4, tokens=1000, dtype="float16")
cache_bytes = kernel_bench.last_level_cache_bytes()
print(f"{pool.layers} layers, {pool.kv.nbytes / 2**20:.0f} MiB; last-level cache {cache_bytes / 2**20:.0f} MiB")
assert pool.kv.nbytes > 4 * cache_bytes

# %% [markdown]
# `kernels/read_bandwidth.cpp` does nothing but add up what it reads. It varies two things: in how many *streams* each
# thread reads at once, and whether it asks for a line some way ahead (*prefetch*) before it needs it. Before you run
# the cell: how much can that matter?

# %%
probe = kernel_bench.probe_call(pool, threads)
speeds = {variant: max(probe(variant) for _ in range(3)) for variant in kernel_bench.PROBES}
ways = sorted({variant[1:] for variant in speeds})
print("GB/s     " + "".join(f"{('none', 'L1', 'L2', 'NTA')[level]:>8} {ahead:4}" for level, ahead in ways))
for streams in sorted({variant[0] for variant in speeds}):
    print(f"{streams} streams" + "".join(f"{speeds[(streams, *way)]:13.1f}" for way in ways))

# %% [markdown]
# A column says which cache a line is fetched into (NTA: past them, for data that is used once), and how many bytes ahead.
# The best of all is the roofline: nobody who has to read this memory, at this moment, will be faster. (On a shared machine
# the moment matters. So the races below measure the roof again, beside each kernel.)

# %%
roof_gbps = max(speeds.values())
torch_gbps = machine.measure_read_bandwidth(threads)["gb_per_s"]
print(f"streaming read {roof_gbps:.1f} GB/s; a sum in torch reads {torch_gbps} GB/s")

# %% [markdown]
# What does that make of our hundred requests?

# %%
least_s = 100 * 1000 * llama2.kv_bytes_per_token("float16") / (roof_gbps * 1e9)
print(f"100 requests of 1,000 tokens, Llama-2-7B: at least {least_s:.1f} s for each iteration")

# %% [markdown]
# Sobering on a small machine, and the reason why memory channels matter more than cores. A server with eight or twelve
# channels reads ten times as fast; the ratio that we are after, *kernel over roofline*, is the same question there.
#
# ## 2. A toy, to know what is right
#
# Paged decode attention with every loop in sight. Row `t` of a sequence lies in block `block_table[t // size]`, at
# place `t % size`.


# %%
def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    """One new token for each sequence: q [batch, q_heads, d], caches [block, kv_head, place, d] -> like q."""
    out, group, size = torch.zeros_like(q), q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    for b, seq_len in enumerate(seq_lens.tolist()):
        for head in range(q.shape[1]):
            rows = [(block_table[b, t // size], head // group, t % size) for t in range(seq_len)]
            scores = torch.stack([q[b, head] @ k_cache[row] for row in rows]) * q.shape[2] ** -0.5
            weights = (scores - scores.max()).exp()  # the largest becomes 1: nothing can overflow
            out[b, head] = sum(w * v_cache[row] for w, row in zip(weights, rows)) / weights.sum()
    return out


# %% [markdown]
# Three sequences of awkward lengths, with blocks dealt at random:

# %%
lens = torch.tensor([1, 17, 40], dtype=torch.int32)
table = torch.randperm(9).view(3, 3).int()
q = torch.randn(3, 8, 128)

# %% [markdown]
# Their K and V, and NaN wherever no token was written:

# %%
k_cache, v_cache = (torch.full((9, 2, 16, 128), torch.nan) for _ in range(2))
for b, t in [(0, 0), *((1, t) for t in range(17)), *((2, t) for t in range(40))]:
    for cache in (k_cache, v_cache):
        cache[table[b, t // 16], :, t % 16] = torch.randn(2, 128)

# %% [markdown]
# The definition in the package, `attention.reference`, computes in float64. Do we agree, and how fast are we?

# %%
start_s = time.perf_counter()
out = paged_attention(q, k_cache, v_cache, table, lens)
toy_s = time.perf_counter() - start_s
view = attention.View((1, 1, 1), lens, table)
torch.testing.assert_close(out, attention.reference(q, q, q, k_cache, v_cache, view), atol=1e-5, rtol=1e-5)
print(f"equal; {2 * int(lens.sum()) * 2 * 128 * 4 / toy_s / 1e6:.1f} MB/s")

# %% [markdown]
# Correct, and thousands of times too slow. The same three sequences in fp16 will be the test of every kernel that we make
# ourselves; `error` is the largest relative error of a result against float64.

# %%
q16, k16, v16 = q.half(), k_cache.half(), v_cache.half()
exact = attention.reference(q16.double(), q16, q16, k16, v16, view)


def error(out: torch.Tensor) -> float:
    return float(((out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


# %% [markdown]
# Now the ladder.
#
# ## 3. Four rungs
#
# Each rung is a file in `kernels/`, short enough to read in one sitting. We look at the real sources. This helper
# prints a function from one of them; another shows what a file has that the rung below has not.


# %%
def function(name: str, start: str) -> str:
    """The lines of a kernel from the one with `start` to the function's closing brace."""
    lines = (KERNELS_DIR / name).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if start in line)
    return "\n".join(lines[first : lines.index("}", first) + 1])


def changes(before: str, after: str) -> str:
    """The lines that only one of two kernels has, without those that are all comment."""
    texts = [(KERNELS_DIR / name).read_text().splitlines() for name in (before, after)]
    lines = difflib.unified_diff(*texts, n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@", "-//", "+//")))


# %% [markdown]
# ### Rung 1: scalar
#
# The toy once more, in C++: a loop for the scores, one for the softmax, one for the values. `D` is the head's size, `G`
# the query heads in a group; both are constants of the build, so that the compiler knows every loop's length.

# %%
print(function("scalar.cpp", "static void attend"))

# %% [markdown]
# ### Rung 2: OpenMP
#
# Sequences and heads are independent of one another. So threads can share them out, each taking the next pair when it
# is done. Nothing inside `attend` changes:

# %%
print(changes("scalar.cpp", "openmp.cpp"))

# %% [markdown]
# ### Rung 3: SIMD
#
# A core can multiply 8 or 16 floats in one instruction, but a compiler will not add up a dot product in another order
# unasked (it would round differently), nor turn fp16 into floats many at a time. So we say it: `vf` is a vector of `W`
# floats, `load` widens `W` numbers at once.

# %%
print(changes("openmp.cpp", "simd.cpp"))

# %% [markdown]
# ### Rung 4: flash
#
# By now the arithmetic is cheap, and what counts is *how memory is asked*. The top rung has four ideas:
#
# - **Share rows.** With GQA the rungs below read K and V once for each query head. This one reads a row once and uses
#   it for all heads of its group.
# - **Cut work by tokens.** A long sequence is cut into spans, which threads take as they come free. Each span leaves a
#   partial result, and a merge weighs them. That is *flash decoding*, and NEO's kernel does it too.
# - **Ask early.** A core that waits for each line reads at a fraction of the bandwidth. So rows are asked for some way
#   ahead, and several streams run at once, as in the best of the probes above.
# - **Visit in order.** All heads of a few blocks, then the next blocks: each stream meets memory in the order in which
#   it lies there.
#
# A partial result is `(o, m, l)`: a weighted sum of values that is not yet divided, the score that its weights refer
# to, and the sum of the weights. Two of them become one if both are first brought to the larger `m`:

# %%
print(function("flash.cpp", "static void merge"))

# %% [markdown]
# The rest of the file decides who computes which span. Most of its speed comes from `streams.h`, the order of the reads
# and the prefetches, which took some thirty variants to find; `scores.h` and `values.h` are what is done with K and V.
#
# ### The climb
#
# All rungs read the same pages, in turn, in several rounds; before and after each of them the streaming read is
# measured, since a shared machine is now faster, now slower. torch's own attention (SDPA) runs beside them. It knows no
# pages, so it gets what it likes best: contiguous copies.
#
# Predict: by what factor does each rung beat the one below? Which step gains most?

# %%
climbs = {"Llama-2-7B (MHA)": llama2, "Llama-3.1-8B (GQA, 4 heads a group)": llama31}
rows = {
    title: kernel_bench.bench_case(config, "float16", batch=8, tokens=1000, threads=threads, rounds=7)
    for title, config in climbs.items()
}

# %% [markdown]
# GB/s counts each byte of KV once, however often a kernel fetches it. The error is against float64.

# %%
order = ["torch sdpa", *RUNGS]
for title, found in rows.items():
    below = None
    print(title)
    for row in sorted(found, key=lambda row: order.index(row["name"])):
        gain = f"{row['gbps'] / below:5.1f} x the rung below" if below else ""
        print(f"  {row['name']:10} {row['gbps']:6.2f} GB/s {row['fraction']:5.0%} of the roofline"
              f"   error {row['max_rel_err']:.0e} {gain}")  # fmt: skip
        below = row["gbps"] if row["name"] in RUNGS else None

# %% [markdown]
# As a picture, under the roof:


# %%
def draw_climb(ax: plt.Axes, title: str, found: list[dict]) -> None:
    """A bar for each kernel, and the streaming read as a line."""
    found = sorted(found, key=lambda row: order.index(row["name"]))
    fills = [plots.COLORS["paper" if row["name"] == "torch sdpa" else "cpu"] for row in found]
    bars = ax.bar([row["name"] for row in found], [row["gbps"] for row in found], color=fills)
    ax.bar_label(bars, [f"{row['fraction']:.0%}" for row in found], padding=2)
    roof = statistics.median(row["read_gbps"] for row in found)
    ax.axhline(roof, color=plots.COLORS["gpu"], linestyle="--")
    ax.text(-0.4, roof * 1.02, f"streaming read, {roof:.0f} GB/s", color=plots.COLORS["gpu"], va="bottom")
    ax.set_title(title, fontsize=10)
    ax.grid(visible=False, axis="x")


# %% [markdown]
# Both shapes side by side; above each bar its share of the roofline.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
for ax, (title, found) in zip(axes, rows.items()):
    draw_climb(ax, title, found)
axes[0].set(ylabel="GB/s of KV read", ylim=(0, 1.2 * max(row["read_gbps"] for found in rows.values() for row in found)))
fig.tight_layout(rect=BELOW)
plots.save_figure(fig, "04_ladder", "measured", f"8 x 1,000 tokens, fp16; {here}")
plt.show()

# %% [markdown]
# - Scalar code is far from the roof: it is bound by *instructions*. Threads multiply its speed by about their number.
# - Vectors take most of those instructions away. From there on the kernel waits for memory: first for its *latency*, read
#   after read, and on the last rung for its bandwidth.
# - On MHA the last rung does the same sums as the one below. It keeps more reads in flight and wastes fewer words.
# - With GQA the lower rungs go through each row four times, and do not see that they could have kept it.
# - The dashed lines of the two panels may differ: they were measured at different moments. Shares compare, within a panel.
# - torch's own attention hands blocks of 512 rows and a single query to its BLAS. What that makes of fp16 depends on the
#   processor. On the AMD core of section 7, MKL takes its default path and spends two thirds of the time in turning fp16
#   into floats, number by number (`perf record`: `hfcopy`), with GQA once more for each query head.
#
# ## 4. What changes it
#
# Four questions: grouped heads, threads, block size, length. We need many shapes, and making a pool for each would take
# longer than measuring it. But memory is memory: the same bytes can be *seen* as blocks of another size or with fewer
# heads. This returns a kernel, its arguments for layer after layer, and the bytes that one call reads.


# %%
def seen_as(group: int, block_size: int, batch: int, tokens: int, rung: str = "flash", threads: int = threads):
    """The pool's memory as another shape with 32 query heads of 128: (kernel, arguments of every layer, bytes a call)."""
    width = -(-tokens // block_size)
    shape = (2, batch * width, 32 // group, block_size, 128)
    layers = pool.kv.numel() // torch.Size(shape).numel()
    kv = pool.kv.view(-1)[: layers * torch.Size(shape).numel()].view(layers, *shape)
    table = torch.randperm(batch * width).view(batch, width).int()
    lens, q = torch.full((batch,), tokens, dtype=torch.int32), torch.randn(batch, 32, 128).half()
    kernel = load_kernel(KernelSpec(128, group, block_size, "float16", rung=rung))
    args = [kernel.args(q, k, v, table, lens, torch.empty_like(q), num_threads=threads) for k, v in kv]
    return kernel, itertools.cycle(args), 2 * batch * tokens * (32 // group) * 128 * 2


# %% [markdown]
# And a race between several of them, by the benchmark's own `measure`: in rounds, in random order, a streaming read
# before and after each turn. In a turn each kernel reads as much, layer after layer, so that nothing of it is still in a
# cache when it comes again.


# %%
def turn(kernel: Kernel, args, call_bytes: int):
    """For `measure`: a function that takes as long as this kernel for the bytes that the pool's own call would read."""
    count = -(-pool.call_bytes // call_bytes)

    def call(_: int) -> float:
        seconds = 0.0
        for _ in range(count):
            kernel.run(next(args))
            seconds += kernel.last_s[1] - kernel.last_s[0]
        return seconds * pool.call_bytes / (count * call_bytes)

    return call


# %% [markdown]
# The result of a race: for each case its GB/s and its share of the roofline.


# %%
def race(cases: dict, threads: int = threads, rounds: int = 5) -> dict:
    """Case -> (GB/s, share of the roofline, bytes a call): medians, the share that of the best probe."""
    seen = {name: [] for name in cases}
    calls = {name: turn(*case) for name, case in cases.items()}
    for name, gbps, reads in kernel_bench.measure(pool, calls, threads, rounds):
        seen[name].append([gbps, *(gbps / read for read in reads)])
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in seen.items()}
    return {name: (gbps, min(shares), cases[name][2]) for name, (gbps, *shares) in medians.items()}


# %% [markdown]
# ### Grouped heads
#
# 32 query heads with groups of 1, 4 and 8 (Llama-2-7B, Llama-3.1-8B, Llama-3.1-70B cut to 32 heads). A larger group
# means fewer bytes for the same tokens, and more arithmetic on each byte. Which rung notices?

# %%
GROUPS = (1, 4, 8)
grouped = race({(rung, g): seen_as(g, 16, 4, 1000, rung) for rung in ("simd", "flash") for g in GROUPS})
for (rung, group), (gbps, share, call_bytes) in grouped.items():
    tokens_s = 4000 / (call_bytes / gbps / 1e9)
    print(f"{rung:6} group {group}: {gbps:5.1f} GB/s, {share:4.0%} of the roofline, {tokens_s / 1e6:5.2f} M tokens/s")

# %% [markdown]
# Tokens are tokens of context, through one layer. The picture:

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for rung, colour, marker in (("flash", "cpu", "o"), ("simd", "paper", "s")):
    style = dict(color=plots.COLORS[colour], marker=marker, label=rung)
    axes[0].plot(GROUPS, [100 * grouped[rung, g][1] for g in GROUPS], **style)
    axes[1].plot(GROUPS, [4e-3 * grouped[rung, g][0] * 1e9 / grouped[rung, g][2] for g in GROUPS], **style)
axes[0].axhline(100, color=plots.COLORS["gpu"], linestyle="--")
axes[0].set(ylabel="% of the roofline", ylim=(0, 110))
axes[1].set(ylabel="million tokens a second", ylim=0)
for ax in axes:
    ax.set(xlabel="query heads in a group", xticks=GROUPS)
axes[1].legend()
fig.tight_layout(rect=BELOW)
plots.save_figure(fig, "04_gqa", "measured", f"4 x 1,000 tokens, fp16; {here}")
plt.show()

# %% [markdown]
# Without sharing (`simd`), each query head goes through its rows anew: the time follows the *query* heads, and an eighth
# of the bytes makes it two or three times as fast, not eight. With sharing, fewer bytes are less time, until a group is
# so large that arithmetic begins to count as well. Then the share of the roofline falls, and tokens a second level off.
# On a few fast cores that happens early; where many cores share a memory, later.
#
# ### Threads
#
# Half the threads, half the speed? For a kernel bound by instructions, yes. Here the roof itself depends on the
# threads, since one core can only have so many reads in flight.

# %%
counts = sorted({1, 2, 4, 8, 16, 32, threads} & set(range(1, threads + 1)))
threaded = {}
for n in counts:
    cases = {rung: seen_as(1, 16, 4, 1000, rung, n) for rung in ("simd", "flash")}
    threaded[n] = race(cases, n)
    values = ", ".join(f"{rung} {gbps:.1f} GB/s ({share:.0%})" for rung, (gbps, share, _) in threaded[n].items())
    print(f"{n} threads: {values}")

# %% [markdown]
# In brackets: the share of what *that many* threads can read.
#
# ### Block size and length
#
# A block of 16 tokens and one head is 4 KiB, a memory page. Smaller blocks end sooner, and a prefetcher that follows a
# stream has to begin anew; larger ones waste more places in half-empty last blocks, and the streams of a thread lie
# further apart. Each block size is a build of its own.

# %%
SIZES = (8, 16, 64)
sized = race({size: seen_as(1, size, 4, 1000) for size in SIZES})
for size, (gbps, share, _) in sized.items():
    print(f"blocks of {size:3}: {gbps:5.1f} GB/s, {share:.0%} of the roofline")

# %% [markdown]
# And one lone sequence, in Llama-3.1-8B's shape, from very short to very long. What is lost on a short one is the fixed
# price of a call: waking the threads, and a last span for which the others wait.

# %%
LENGTHS = (16, 64, 256, 1024, 4096, 32768)
long = race({(rung, n): seen_as(4, 16, 1, n, rung) for rung in ("simd", "flash") for n in LENGTHS}, rounds=3)
fixed_us = kernel_bench.dispatch_us(threads)
for n in LENGTHS:
    print(f"{n:6,} tokens: flash {long['flash', n][0]:5.1f} GB/s, simd {long['simd', n][0]:5.1f} GB/s")
print(f"a call with a single token: {fixed_us['kernel']:.1f} us in the kernel, {fixed_us['python']:.1f} us from Python")

# %% [markdown]
# The three together:

# %%
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.2), sharey=True)
for rung, colour, marker in (("flash", "cpu", "o"), ("simd", "paper", "s")):
    style = dict(color=plots.COLORS[colour], marker=marker, label=rung)
    axes[0].plot(counts, [threaded[n][rung][0] for n in counts], **style)
    axes[2].plot(LENGTHS, [long[rung, n][0] for n in LENGTHS], **style)
axes[1].plot(SIZES, [sized[size][0] for size in SIZES], color=plots.COLORS["cpu"], marker="o")
roofs = [threaded[n]["flash"][0] / threaded[n]["flash"][1] for n in counts]
axes[0].plot(counts, roofs, color=plots.COLORS["gpu"], linestyle="--", marker="^", label="streaming read")
axes[0].set(xlabel="threads (MHA)", ylabel="GB/s of KV read", ylim=(0, 1.25 * max(roofs)))
axes[1].set(xlabel="tokens in a block (MHA)", xscale="log")
axes[2].set(xlabel="tokens of a lone sequence (GQA)", xscale="log")
for ax, ticks in zip(axes, (counts, SIZES, LENGTHS)):
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.minorticks_off()
axes[0].legend(fontsize=8, loc="upper left")
fig.tight_layout(rect=BELOW)
plots.save_figure(fig, "04_shapes", "measured", f"fp16; {here}")
plt.show()

# %% [markdown]
# ## 5. Half the bytes: int8
#
# If bytes are the time, store fewer. int8 instead of fp16 halves them. Each row (one token, one head) gets one scale
# in fp16, its largest number over 127. So a new token never touches what was stored before, and the scales cost 2 bytes
# in 130.


# %%
def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] -> int8 numbers [..., d] and their scales, fp16 [...]."""
    scale = (x.float().abs().amax(-1) / 127).half()
    numbers = (x.float() / scale.float()[..., None]).nan_to_num(0).round()  # a row of zeros has the scale 0
    return numbers.clamp(-127, 127).to(torch.int8), scale


# %% [markdown]
# The kernel does the same when it stores a new token (`k_new`, `v_new`). Number for number?

# %%
x = torch.randn(1, 32, 128).half() * 3
caches = [torch.zeros(1, 32, 16, 128, dtype=torch.int8) for _ in range(2)]
scales = [torch.zeros(1, 32, 16, dtype=torch.float16) for _ in range(2)]
one = torch.ones(1, dtype=torch.int32)
int8_kernel = load_kernel(KernelSpec(128, 1, 16, "float16", "int8"))
int8_kernel(x, *caches, one[None] - 1, one, k_new=x, v_new=x, k_scale=scales[0], v_scale=scales[1])
numbers, scale = quantise(x)
assert torch.equal(caches[0][0, :, 0], numbers[0]) and torch.equal(scales[1][0, :, 0], scale[0])

# %% [markdown]
# How large is the error of rounding? On the three sequences of section 2, against float64:

# %%
(k8, k_scale), (v8, v_scale) = quantise(k16), quantise(v16)
fp16_gqa, int8_gqa = (load_kernel(KernelSpec(128, 4, 16, "float16", kv_dtype)) for kv_dtype in (None, "int8"))
print(f"fp16 {error(fp16_gqa(q16, k16, v16, table, lens)):.0e}")
print(f"int8 {error(int8_gqa(q16, k8, v8, table, lens, k_scale=k_scale, v_scale=v_scale)):.0e}")

# %% [markdown]
# Now speed. The same memory seen as int8, with scales of its own:


# %%
def seen_as_int8(group: int, batch: int, tokens: int):
    """As `seen_as`, for int8 in blocks of 16."""
    width = -(-tokens // 16)
    shape = (2, batch * width, 32 // group, 16, 128)
    layers = pool.kv.nbytes // torch.Size(shape).numel()
    kv = pool.kv.view(-1).view(torch.int8)[: layers * torch.Size(shape).numel()].view(layers, *shape)
    scale = torch.full((layers, *shape[:-1]), 0.01, dtype=torch.float16)
    table = torch.randperm(batch * width).view(batch, width).int()
    lens, q = torch.full((batch,), tokens, dtype=torch.int32), torch.randn(batch, 32, 128).half()
    kernel = load_kernel(KernelSpec(128, group, 16, "float16", "int8"))
    rest = dict(num_threads=threads)
    args = [kernel.args(q, *caches, table, lens, torch.empty_like(q), k_scale=s[0], v_scale=s[1], **rest)
            for caches, s in zip(kv, scale)]  # fmt: skip
    return kernel, itertools.cycle(args), 2 * batch * tokens * (32 // group) * 130


# %% [markdown]
# How many times as fast will it be, in tokens?

# %%
cases = {("fp16", g): seen_as(g, 16, 4, 1000) for g in (1, 4)} | {("int8", g): seen_as_int8(g, 4, 1000) for g in (1, 4)}
halved = race(cases)
calls_s = {case: gbps * 1e9 / call_bytes for case, (gbps, _, call_bytes) in halved.items()}
for group, name in ((1, "MHA"), (4, "GQA")):
    gbps, share, _ = halved["int8", group]
    gain = calls_s["int8", group] / calls_s["fp16", group]
    print(f"{name}: int8 reads {gbps:.1f} GB/s ({share:.0%} of the roofline), {gain:.2f} x the tokens/s of fp16")

# %% [markdown]
# Half the bytes are not quite half the time: every number has still to be multiplied, and now twice as many arrive in the
# same time. Arithmetic comes to the front, and with GQA four heads use each number. So the top rung multiplies
# int8 as integers where the processor can: K two numbers at a time (`scores.h`), V four, without ever widening it (`values.h`).
#
# ### What does the model say?
#
# An error of a percent on random numbers tells little. Let us ask a real model: SmolLM2 reads a text, once with K and V
# as they are, once with every row rounded to int8 and back. We look at how surprised it is by each next token (its
# *perplexity*), and how often its first choice of a next token stays the same. The forward pass is that of notebook 01.


# %%
def rounded(x: torch.Tensor) -> torch.Tensor:
    numbers, scale = quantise(x)
    return numbers.float() * scale.float()[..., None]


@torch.inference_mode()
def logits_of(tokens: list[int], stored) -> torch.Tensor:
    """The logits after each token; K and V pass through `stored` before attention reads them."""
    x, rope = model.embed(torch.tensor(tokens)), model.rope(torch.arange(len(tokens)))
    for layer in range(model.config.num_layers):
        q, k, v = model.pre_attention(layer, x, rope)
        q, k, v = (t.transpose(0, 1) for t in (q, stored(k), stored(v)))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = model.post_attention(layer, out.transpose(0, 1), x)
    return model.head(x)


# %% [markdown]
# The model, and a text, a story that the package brings along:

# %%
torch.set_num_threads(1)  # enough for a small model that writes one token at a time
model = load_model("smollm2", device="cpu", dtype="float32")
tokens = model.tokenizer.encode(quality.TEXT)

# %% [markdown]
# With K and V as they are, and rounded:

# %%
logits = {name: logits_of(tokens, stored) for name, stored in (("float32", lambda x: x), ("int8", rounded))}
ours = {name: float(F.cross_entropy(x[1:-1], torch.tensor(tokens[2:])).exp()) for name, x in logits.items()}
same = (logits["int8"].argmax(-1) == logits["float32"].argmax(-1)).float().mean()
print(f"perplexity over {len(tokens)} tokens:", {name: round(value, 3) for name, value in ours.items()})
print(f"the same first choice after {same:.1%} of them")

# %% [markdown]
# That was rounding, imitated. The engine does it in earnest: with `cpu_kv_dtype="int8"` its CPU pool holds int8, and the
# C++ kernel stores and reads it. `quality.perplexity` feeds it the text token by token. Is its perplexity ours? (Not to the
# last digit: the kernel rounds the query as well where it multiplies whole numbers.)

# %%
pools = dict(mode="simple", gpu_kv_tokens=512, cpu_kv_tokens=1024, cpu_threads=1)
theirs = quality.perplexity(model, tokens, **pools, cpu_kv_dtype="int8")
print(f"engine with an int8 pool: {theirs:.3f}")
assert abs(theirs / ours["int8"] - 1) < 0.01

# %% [markdown]
# And text that it writes by itself, always taking its first choice: how much of it is the same as with float32, up to
# the first token that differs?

# %%
starts = [model.tokenizer.encode(start) for start in ("Gravity is", "Once upon a time", "The best way to cook rice is")]
common = quality.same_greedy_tokens(model, starts, 32, pools, pools | {"cpu_kv_dtype": "int8"})
print(f"{common:.0%} of 3 x 32 tokens")

# %% [markdown]
# The perplexity hardly moves, up here and down there: less than a text of this length could tell. A first choice changes
# where two tokens were almost equally likely. Greedy texts will therefore part ways sooner or later, without one being
# worse than the other. That is a choice to be made with open eyes, and so the course keeps the model's own format unless
# you ask for int8.
#
# ## 6. Your own kernel
#
# Enough watching. A kernel is one C++ file that includes `attention.h` and defines `attention(args)`. No torch header,
# so it compiles in a second or two. Ours takes another way than the ladder: an *online* softmax, which needs one pass
# and no list of weights. Whenever a larger score turns up, everything added so far is scaled down.

# %%
MINE = """
#include "attention.h"

static void attend(const AttentionArgs& a, int b, int q_head) {
  const size_t at = ((size_t)b * a.q_heads + q_head) * D;
  float q[D], o[D] = {}, m = -1e30f, l = 0;
  for (int d = 0; d < D; d++) q[d] = to_float(query(a, b, q_head)[d]) * a.scale;
  for (int t = 0; t < a.seq_lens[b]; t++) {
    const size_t row = row_of(a, b, q_head / G, t) * D;
    const KV *k = (const KV*)a.k_cache + row, *v = (const KV*)a.v_cache + row;
    float score = 0;
    for (int d = 0; d < D; d++) score += q[d] * to_float(k[d]);
    const float top = std::max(m, score), keep = std::exp(m - top), w = std::exp(score - top);
    for (int d = 0; d < D; d++) o[d] = o[d] * keep + w * to_float(v[d]);
    l = l * keep + w;
    m = top;
  }
  for (int d = 0; d < D; d++) from_float(l > 0 ? o[d] / l : 0.f, (T*)a.out + at + d);
}

static void attention(const AttentionArgs& a) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(a.num_threads)
  for (int b = 0; b < a.batch; b++)
    for (int h = 0; h < a.q_heads; h++) attend(a, b, h);
}
"""

# %% [markdown]
# It goes into the cache folder, beside the builds, and `load_kernel` takes its path. (It does not store new tokens, as
# the rungs do with `append`; for measuring that is all right.)


# %%
def build(name: str, text: str) -> Kernel:
    """Writes a kernel's text to the cache folder and compiles it for groups of 4, unless that was done before."""
    path = machine.cache_folder() / "my_kernels" / f"{name}.cpp"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    start_s = time.perf_counter()
    kernel = load_kernel(KernelSpec(128, 4, 16, "float16", rung=str(path)))
    print(f"{name}: ready after {time.perf_counter() - start_s:.1f} s")
    return kernel


# %% [markdown]
# Compile it. Is it right?

# %%
first = build("mine", MINE)
first_error = error(first(q16, k16, v16, table, lens, num_threads=threads))
print(f"error {first_error:.0e}")
assert first_error < 2e-3

# %% [markdown]
# Now an edit, as you would make it. Scalar loops are what kept rung 2 down; in vectors (`simd.h`, `vectors.h`) the two
# inner loops become:

# %%
SCALAR_K = "for (int d = 0; d < D; d++) score += q[d] * to_float(k[d]);"
VECTOR_K = "vf dot = {}; for (int d = 0; d < D; d += W) dot += load(q + d) * load(k + d); score = sum(dot);"
SCALAR_V = "for (int d = 0; d < D; d++) o[d] = o[d] * keep + w * to_float(v[d]);"
VECTOR_V = "for (int d = 0; d < D; d += W) store(o + d, load(o + d) * keep + w * load(v + d));"
assert SCALAR_K in MINE and SCALAR_V in MINE
second = build("mine_in_vectors", MINE.replace(SCALAR_K, VECTOR_K).replace(SCALAR_V, VECTOR_V))
assert error(second(q16, k16, v16, table, lens, num_threads=threads)) < 2e-3

# %% [markdown]
# And the race, against the ladder's two upper rungs, in Llama-3.1-8B's shape:

# %%
_, args, call_bytes = seen_as(4, 16, 4, 1000)
cases = {"mine": (first, args, call_bytes), "mine in vectors": (second, args, call_bytes)}
cases |= {rung: seen_as(4, 16, 4, 1000, rung) for rung in ("simd", "flash")}
for name, (gbps, share, _) in race(cases, rounds=3).items():
    print(f"{name:16} {gbps:5.2f} GB/s, {share:4.0%} of the roofline")

# %% [markdown]
# Two lines, and most of the way up to rung 3. What is missing to the top you know: each row of K and V is still read
# four times, once for each query head of its group. That is the third exercise.
#
# ## 7. Other machines
#
# These runs were recorded with `python -m neo_lite kernel-bench --json`, each with a stamp of its hardware. Run the same
# command to add your own.

# %%
DATA = next(p for p in (Path("data"), Path("../data"), Path("neo-lite/data")) if p.is_dir())
runs = [json.loads(path.read_text()) for path in sorted((DATA / "recorded").glob("*kernel_bench*.json"))]
runs.sort(key=lambda run: (run["threads"], run["stamp"]["cpu"], run["shape"], run["dtype"]))
for run in runs:
    flash = [row for row in run["kernels"] if row["name"] == "flash"]
    shares = ", ".join(f"{row['case']}: {row['gbps']:.0f} GB/s ({row['fraction']:.0%})" for row in flash)
    print(f"{run['stamp']['cpu']}, {run['threads']:2} threads, {run['shape']:12} {run['dtype']}: {shares}")

# %% [markdown]
# The fp16 runs as a picture: a panel for each machine and shape.


# %%
def draw_run(ax: plt.Axes, run: dict) -> None:
    """Shares of the roofline: the kernels of one recorded run, a bar for each case."""
    names, cases = order, list(dict.fromkeys(row["case"] for row in run["kernels"]))
    for i, (case, fill) in enumerate(zip(cases, ("#d9822b", "#f0c48f"))):
        share = {row["name"]: 100 * row["fraction"] for row in run["kernels"] if row["case"] == case}
        ax.barh(
            [y + 0.38 * i - 0.19 for y in range(len(names))],
            [share.get(n, 0) for n in names],
            0.36,
            color=fill,
            label=case,
        )
    ax.axvline(100, color=plots.COLORS["gpu"], linestyle="--")
    ax.set_yticks(range(len(names)), names)
    maker = run["stamp"]["cpu"].replace("(R)", "").split()[0]
    ax.set_title(f"{run['shape']}, {maker}, {run['threads']} threads,\nread {run['read_gbps']:.0f} GB/s", fontsize=9)
    ax.set(xlabel="% of the roofline", xlim=(0, 108))
    ax.grid(visible=False, axis="y")


# %% [markdown]
# Longer bars are better; the dashed line is the streaming read of the same run.

# %%
shown = [run for run in runs if run["dtype"] == "fp16"]
if shown:
    lines = -(-len(shown) // 4)
    across = -(-len(shown) // lines)
    fig, axes = plt.subplots(lines, across, figsize=(2.6 * across + 1, 3.2 * lines), sharey=True, squeeze=False)
    for ax, run in itertools.zip_longest(axes.flat, shown):
        draw_run(ax, run) if run else ax.set_visible(False)
    axes[0, 0].legend(
        fontsize=7, title="sequences x tokens", title_fontsize=7, loc="center right", bbox_to_anchor=(0.93, 0.47)
    )
    fig.tight_layout(rect=BELOW)
    plots.save_figure(fig, "04_recorded", "recorded", "; ".join(dict.fromkeys(run["stamp"]["cpu"] for run in shown)))
    plt.show()

# %% [markdown]
# ## Summary
#
# - Decode attention does one FLOP for each byte of KV, a few with GQA. Its time is the bytes over the bandwidth, and the
#   honest measure of a kernel is its share of a streaming read *in the same run*.
# - Threads and vectors take a kernel from "bound by instructions" to "waits for memory". Prefetches, streams and the
#   order of visits decide how much of the bandwidth it gets then.
# - GQA pays only if rows are shared. int8 pays where bytes, not arithmetic, are the limit.
# - A kernel is one file. Change it, compile it in seconds, hold it against the definition, measure it.
#
# ## Exercises
#
# **Exercise 1.** `floor_s`: the least time, in seconds, that attention takes in one iteration of `requests` decodes
# with `tokens` of context each, over all layers, on a machine that reads `gbps` GB/s.


# %% tags=["exercise"]
def floor_s(config, requests: int, tokens: int, dtype: str, gbps: float) -> float:
    return ...


# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("1: the least time of an iteration")
def solved_1():
    for config, layer_bytes in ((llama2, 2 * 32 * 128), (llama31, 2 * 8 * 128)):
        for dtype, size in (("float16", 2), ("float32", 4)):
            answer, right_s = floor_s(config, 10, 500, dtype, 20), 10 * 500 * 32 * layer_bytes * size / 20e9
            assert abs(answer - right_s) < 1e-9, f"{config.name}, {dtype}: {right_s:.3f} s. K and V of every layer."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def floor_s(config, requests: int, tokens: int, dtype: str, gbps: float) -> float:
#     return requests * tokens * config.kv_bytes_per_token(dtype) / (gbps * 1e9)
# ```
#
# The scheduler's cost model (notebook 08) knows the CPU's attention by measuring it; this is where its slope
# comes from.
#
# </details>

# %% [markdown]
# **Exercise 2.** `merge` two partial results `(o, m, l)` of one query, each over some of the tokens, into the partial
# result over all of them. `o` is `sum of exp(score - m) * v`, `l` is `sum of exp(score - m)`. Mind scores that are far
# apart. (The C++ of rung 4 does it in powers of two and for many spans.)


# %% tags=["exercise"]
def merge(first, second):
    return ...  # first and second are (o, m, l), and so is the result


# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("2: two spans become one")
def solved_2():
    def partial(scores, values):
        weights = (scores - scores.max()).exp()
        return weights @ values, scores.max(), weights.sum()

    for shift in (0.0, 50.0, -2000.0):
        scores, values = torch.randn(30, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
        scores[20:] += shift
        o, _, total = merge(partial(scores[:20], values[:20]), partial(scores[20:], values[20:]))
        exact = scores.softmax(-1) @ values
        assert torch.allclose(o / total, exact), f"Scores {shift} apart: bring both to the larger m first."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def merge(first, second):
#     (o1, m1, l1), (o2, m2, l2) = first, second
#     m = torch.maximum(m1, m2)
#     w1, w2 = (m1 - m).exp(), (m2 - m).exp()
#     return w1 * o1 + w2 * o2, m, w1 * l1 + w2 * l2
# ```
#
# Because the result is again `(o, m, l)`, any number of spans can be merged, in any order, by any number of threads.
#
# </details>

# %% [markdown]
# **Exercise 3.** Share the rows. Write `attend` for a *KV head*: each row of K and V is looked up once and used for all
# `G` query heads of the group, whose queries, outputs, `m` and `l` you keep in arrays. Start from `MINE` (query heads
# `kv_head * G` to `kv_head * G + G - 1` belong to `kv_head`).

# %% tags=["exercise"]
SHARED = """
static void attend(const AttentionArgs& a, int b, int kv_head) {
  const size_t at = ((size_t)b * a.q_heads + kv_head * G) * D;  // of the output of the group's first query head
  float q[G][D], o[G][D] = {}, m[G], l[G];
  ...
}
"""

# %% [markdown]
# The check compiles your function into a kernel of its own, in which every lookup of a row is counted. It must give the
# right numbers, and look up each row of K and V no more than once:


# %% tags=["check"]
@exercise.check("3: one lookup for the whole group")
def solved_3():
    counter = '#include "attention.h"\nextern "C" { long lookups = 0; }\n'
    counter += "#define row_of(...) (__atomic_fetch_add(&lookups, 1, __ATOMIC_RELAXED), row_of(__VA_ARGS__))\n"
    driver = MINE[MINE.index("static void attention") :].replace("q_heads", "kv_heads")
    kernel = build("shared", counter + SHARED + driver)
    lookups = ctypes.c_long.in_dll(ctypes.CDLL(str(kernel.build / "library.so")), "lookups")
    lookups.value = 0
    wrong, rows = error(kernel(q16, k16, v16, table, lens)), 2 * 2 * int(lens.sum())  # K and V of 2 KV heads
    assert wrong < 2e-3, f"It compiles, but its relative error is {wrong:.0e}."
    assert lookups.value <= rows, (
        f"{lookups.value} lookups for {rows} rows: loop over the group inside the loop over t."
    )


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# SHARED = """
# static void attend(const AttentionArgs& a, int b, int kv_head) {
#   const size_t at = ((size_t)b * a.q_heads + kv_head * G) * D;  // of the output of the group's first query head
#   float q[G][D], o[G][D] = {}, m[G], l[G];
#   for (int g = 0; g < G; g++) {
#     m[g] = -1e30f, l[g] = 0;
#     for (int d = 0; d < D; d++) q[g][d] = to_float(query(a, b, kv_head * G + g)[d]) * a.scale;
#   }
#   for (int t = 0; t < a.seq_lens[b]; t++) {
#     const size_t row = row_of(a, b, kv_head, t) * D;
#     vf k[D / W], v[D / W];
#     for (int i = 0; i < D / W; i++) k[i] = load((const KV*)a.k_cache + row + i * W);
#     for (int i = 0; i < D / W; i++) v[i] = load((const KV*)a.v_cache + row + i * W);
#     for (int g = 0; g < G; g++) {
#       vf dot = {};
#       for (int i = 0; i < D / W; i++) dot += load(q[g] + i * W) * k[i];
#       const float score = sum(dot), top = std::max(m[g], score);
#       const float keep = std::exp(m[g] - top), w = std::exp(score - top);
#       for (int i = 0; i < D / W; i++) store(o[g] + i * W, load(o[g] + i * W) * keep + w * v[i]);
#       l[g] = l[g] * keep + w, m[g] = top;
#     }
#   }
#   for (int g = 0; g < G; g++)
#     for (int d = 0; d < D; d++) from_float(l[g] > 0 ? o[g][d] / l[g] : 0.f, (T*)a.out + at + g * D + d);
# }
# """
# ```
#
# Build it with `MINE`'s `#include` and the driver over KV heads and put it into the race. It is not the top rung yet:
# no prefetch, one stream, a whole sequence for each thread, an exponential for every score by itself.
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | decode attention on the CPU | severely bound by memory bandwidth | the same, sections 1 and 3 | measured |
# | the kernel | PACPU: a C++ torch extension that calls ISPC | C++ with the compiler's vectors | `kernels/` |
# | instruction sets | AVX2, AVX-512, NEON through ISPC | the same three from one source, `simd.h` | package |
# | within a core | few instructions, contiguous accesses | and prefetches, several streams, shared rows | section 3 |
# | across cores | flash decoding: tasks along the request, a merge | spans, taken as threads come free | section 3 |
# | paged KV | as in vLLM, blocks of 16 | the same, any block size | section 4 |
# | share of the memory's bandwidth | not reported | of a streaming read in the same run | measured, recorded |
# | int8 KV | not considered | an option, section 5 | measured |
