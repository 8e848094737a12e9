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
# # 05 · Simple offloading: the first sketch
#
# Notebook 03 ended with a promise: decode attention can live on the host, beside its KV. Here you try it in the most
# obvious way. *All* KV goes to host memory, *all* decode attention to the processor; the GPU keeps everything else.
# The paper calls this simple offloading and draws it in its figure 3.
#
# You will see
# - what has to cross the link in each layer, and how little it is;
# - the same tokens as before, to the last one, with the GPU's KV pool full of NaN to prove who did the work;
# - figure 3 as a measured timeline, and how long each side waits for the other;
# - the other obvious way, bringing the KV back to the GPU at every step, measured beside it.
#
# **Time** about half a minute on two cores. **Memory** about 2 GB. **Needs** nothing but the package. Without a GPU
# your processor plays both parts: what it shows is the *order* of things, and the recorded timeline of a real GPU
# stands beside it.

# %% [markdown]
# The first cell sets up what is missing (nothing, where `neo_lite` is installed) and says what this machine is.

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
# What this notebook uses of the package, and of others.

# %%
import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import torch

from neo_lite import EngineConfig, SamplingParams, Timeline, attention, build_engine, exercise, load_model, plots
from neo_lite.config import MODELS
from neo_lite.kv_cache import KVCache
from neo_lite.request import Move, Request

# %% [markdown]
# The model, and one line about this machine that the figures will carry.

# %%
plots.use_style()
BELOW = (0, 0.04, 1, 1)  # leaves room beneath a figure for its source
model, llama = load_model("smollm2"), MODELS["llama-3.1-8b"]
card, threads = machine.gpu(), torch.get_num_threads()  # the CPU's attention gets as many as torch
here = card["name"] if card else f"{machine.cpu_name()}, threads: {threads}, in the GPU's place too"
print(f"{model.config.name} on {model.device} in {model.dtype}; {here}")

# %% [markdown]
# ## 1. What has to move
#
# If the attention of a decode runs on the host, each layer must send it the new token's q, k and v, and gets the
# attention's output `o` back. Nothing else: the K and V of all earlier tokens are there already. Count the bytes of
# one token in one layer:


# %%
def moved_bytes(m, bytes_per_number):
    out = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim  # q, k, v
    back = m.num_heads * m.head_dim  # o, as wide as q
    return out * bytes_per_number, back * bytes_per_number


# %% [markdown]
# Then hold your count against tensors that the model really makes:

# %%
token, position = torch.tensor([[7], [0]], device=model.device)
with torch.inference_mode():
    q, k, v = model.pre_attention(0, model.embed(token), model.rope(position))
assert moved_bytes(model.config, q.itemsize) == (q.nbytes + k.nbytes + v.nbytes, q.nbytes)
print(f"q {list(q.shape)}, k and v {list(k.shape)}: {moved_bytes(model.config, q.itemsize)} bytes out and back")

# %% [markdown]
# And what would have to move if the attention stayed on the GPU, with the KV on the host? The whole context's K and V.
# For Llama-3.1-8B in fp16 and a request of 1,000 tokens:

# %%
small = sum(moved_bytes(llama, 2))
whole = 1000 * llama.kv_bytes_per_token("float16") // llama.num_layers
print(f"each layer, each step: {small / 1024:.0f} KiB for q, k, v and o; {whole / 1e6:.1f} MB for the KV,", end=" ")
print(f"{whole / small:.0f} times as much")

# %% [markdown]
# ## 2. The same tokens
#
# Before any speed: is the answer still the same? `mode="simple"` is one word in `build_engine`. To make sure that no
# request secretly reads the other pool, fill the pool that each mode should *not* touch with NaN. One number read from
# it, and the tokens turn to nonsense.


# %%
def generate(mode, unused_pool, text="The three primary colors are"):
    timeline = Timeline()
    engine = build_engine(model, mode=mode, timeline=timeline, gpu_kv_tokens=256, cpu_kv_tokens=256)
    pool = engine.executor.cache.pools[unused_pool]
    pool.k.fill_(float("nan")), pool.v.fill_(float("nan"))
    request = engine.add(model.tokenizer.encode(text), SamplingParams(max_tokens=24))
    engine.run()
    return request.output, {(e.lane, e.args["backend"]) for e in timeline.events if "backend" in e.args}


# %% [markdown]
# The timeline's events name the backend that served each attention, and the lane it ran on.

# %%
gpu_only, served_gpu = generate("gpu-only", unused_pool="cpu")
simple, served_simple = generate("simple", unused_pool="gpu")
assert simple == gpu_only or model.dtype != torch.float32  # in 16 bits the last digit of a sum may tip a close choice
print("gpu-only:", *sorted(served_gpu), "\nsimple:  ", *sorted(served_simple))
print(model.tokenizer.decode(simple))

# %% [markdown]
# ## 3. Figure 3, measured
#
# Now time it: eight requests of 1,000 tokens that decode together. Their prompts would take a while to prefill, and
# here only the decodes matter. So for the prefills put a stand-in in the executor's place, one that answers at once
# and computes nothing. The pool keeps its zeros, and zeros take exactly as long to read as any other numbers.


# %%
class NoPrefill:
    def run(self, plan):
        return {w.request.id: 7 for w in plan.work if w.samples}


# %% [markdown]
# The engine, and its eight requests. The GPU's pool can be one block: nothing will ever be in it.

# %%
timeline = Timeline()
pools = dict(gpu_kv_tokens=16, cpu_kv_tokens=8 * 1088, cpu_threads=threads)
engine = build_engine(model, mode="simple", timeline=timeline, **pools)
for _ in range(8):
    engine.add([7] * 1000, SamplingParams(max_tokens=64, ignore_eos=True))

# %% [markdown]
# The stand-in takes them past their prompts; then the real executor returns.

# %%
real, engine.executor = engine.executor, NoPrefill()
while engine.scheduler.waiting:
    engine.step()
engine.executor = real

# %% [markdown]
# One iteration, as a timeline of its own:


# %%
def one_iteration():
    timeline.events.clear()
    assert len(engine.step()) == 8
    return timeline.between(*timeline.span_s)


# %% [markdown]
# A few of them; keep the fastest, since other programs can only add to it. Predict before you run: in one iteration of
# simple offloading, for how much of the time do the GPU and the CPU work *at once*?


# %%
def length_s(t):
    return t.span_s[1] - t.span_s[0]


measured = min((one_iteration() for _ in range(16)), key=length_s)
print(f"{1e3 * length_s(measured):.1f} ms, {len(measured.events)} events on lanes {measured.lanes()}")

# %% [markdown]
# A lane's *busy fraction* is the share of the iteration in which it does something; the rest is its bubbles. On lanes
# whose events never overlap that is a sum:


# %%
def busy_fraction(t, lane):
    return sum(e.duration_s for e in t.events if e.lane == lane) / length_s(t)


assert abs(busy_fraction(measured, "cpu") - measured.busy_fraction("cpu")) < 1e-9

# %% [markdown]
# The package's counts overlapping events once, too. Lane by lane, and the answer to the prediction:


# %%
def report(t):
    for lane in t.lanes():
        print(f"{lane:10} busy {t.busy_fraction(lane):6.1%}, idle {1 - t.busy_fraction(lane):6.1%}")
    print(f"GPU and CPU at once: {t.overlap_s('gpu', 'cpu') / length_s(t):.1%}")


report(measured)

# %% [markdown]
# They never work at once, and they could not: layer 1's projections need layer 1's attention, and that needs layer 1's
# q, k and v. One batch is one chain.
#
# On a machine without a GPU you may object that the two sides are the same cores anyway. So here is the same iteration
# recorded on a real GPU, small enough to need help: 8 multiprocessors of an H200, about an A10G's bandwidth, with
# Llama-3.1-8B's shape.

# %%
DATA = next(p for p in (Path("data"), Path("../data"), Path("neo-lite/data")) if p.is_dir())
saved = json.loads((DATA / "recorded/h200_8sm_pipelines.json").read_text())
part, case = saved["stamp"]["gpu"], saved["cases"]["simple"]
about = f"{part['partition_sms']} SMs of an {part['name']}, {saved['threads']} host threads"
load = f"{case['requests']} requests of {saved['seq_len']:,} tokens"
print(f"recorded: {saved['model']}, {load}; {about}; {1e3 * case['iteration_s']:.1f} ms an iteration")

# %% [markdown]
# Its events make a `Timeline` like any other:

# %%
recorded = Timeline()
for lane, name, start_s, end_s, layer, batch in case["events"]:
    recorded.record(lane, name, start_s, end_s, layer=layer, batch=batch)
report(recorded)

# %% [markdown]
# The whole iteration is the same picture as often as there are layers. Cut three of them out, from the start of one `pre`
# to the start of the `pre` three layers later.


# %%
def cut(t, first, count):
    starts = {e.args["layer"]: e.start_s for e in t.events if (e.name, e.args.get("batch")) == ("pre", 0)}
    start_s, end_s = starts[first], starts[first + count]
    part = Timeline()
    for e in t.between(start_s, end_s).events:
        part.record(e.lane, e.name, max(e.start_s, start_s), min(e.end_s, end_s), **e.args)
    return part


# %% [markdown]
# Drawn with each lane's idle share of the *whole* iteration beside its name:


# %%
def draw(t, ax, title):
    part = cut(t, 10, 3)
    part.plot(ax, legend=False)
    idle = [f"{lane} ({1 - t.busy_fraction(lane):.0%} idle)" for lane in part.lanes()]
    ax.set_yticks(range(len(idle)), idle, size=8)
    ax.set_title(title, size=9, loc="left")
    ax.set_xlabel("ms (three layers)")
    ax.set_xlim(left=0)
    ax.grid(axis="y", alpha=0)


# %% [markdown]
# Top to bottom as the work flows: `pre` (norm, q, k, v) on the GPU, the transfer of q, k, v, attention on the CPU,
# `o` back, `post` (output projection and the whole feed-forward block) on the GPU again.

# %%
fig, axes = plt.subplots(2, 1, figsize=(8.8, 5), height_ratios=[2, 3])
draw(measured, axes[0], f"measured, 8 decodes of 1,000 tokens; {here}")
draw(recorded, axes[1], f"recorded, {load}; {about}")
axes[0].set_xlabel("")
entries = {text: bar for ax in axes[::-1] for bar, text in zip(*ax.get_legend_handles_labels())}
fig.legend(entries.values(), entries.keys(), loc="upper center", ncols=6, fontsize=8)
fig.tight_layout(rect=(0, 0.03, 1, 0.95))
_ = plots.save_figure(fig, "05_timeline", "measured + recorded")

# %% [markdown]
# This is the paper's figure 3. While the GPU runs its linear stages the CPU waits; while the CPU attends, the GPU
# waits. The copies between them are thin lines.
#
# ## 4. Or bring the KV back?
#
# Before you mend that, look at the other obvious design, which many systems chose: keep the KV on the host, and copy
# it to the GPU whenever it is needed. No processor has to compute anything. Measure both, layer by layer. Two pools of
# a few layers (enough that no cache holds them), for eight requests of 1,000 tokens, in 63 blocks each:

# %%
COUNT, TOKENS, WIDTH, LAYERS = 8, 1000, 63, 8
config = EngineConfig(gpu_kv_tokens=COUNT * WIDTH * 16, cpu_kv_tokens=COUNT * WIDTH * 16)
cache = KVCache(replace(model.config, num_layers=LAYERS), config, model.dtype, model.device)
cpu_pool, gpu_pool = cache.pools["cpu"], cache.pools["gpu"]
cpu_pool.k.normal_(), cpu_pool.v.normal_()
scattered, in_order = torch.randperm(COUNT * WIDTH).view(COUNT, WIDTH), torch.arange(COUNT * WIDTH).view(COUNT, WIDTH)

# %% [markdown]
# Each request lies scattered over the CPU pool, as paged KV does. This `Move` brings it to the GPU's:


# %%
def prepare(i):
    source, target = (tuple(blocks[i].tolist()) for blocks in (scattered, in_order))
    return cache.prepare(Move(Request(i, (7,)), "gpu", source, target))


moves = [prepare(i) for i in range(COUNT)]

# %% [markdown]
# What an attention backend wants to know of its sequences is a `View`: how many new tokens, how long, in which blocks.


# %%
def view(blocks, device):
    lens = torch.full((COUNT,), TOKENS, dtype=torch.int32, device=device)
    return attention.View((1,) * COUNT, lens, blocks.int().to(device))


host_view, gpu_view = view(scattered, "cpu"), view(in_order, model.device)

# %% [markdown]
# Two ways to the same output. Here is the first, attention where the KV is: the kernel reads it in place.

# %%
q = torch.randn(COUNT, model.config.num_heads, model.config.head_dim, dtype=model.dtype)
k = v = torch.empty(COUNT, model.config.num_kv_heads, model.config.head_dim, dtype=model.dtype)


def on_the_cpu(layer):
    return attention.cpu_kernel_decode(q, k, v, cpu_pool.k[layer], cpu_pool.v[layer], host_view, threads)


# %% [markdown]
# The second moves the KV to where the GPU computes, then computes:

# %%
gpu_attention = attention.gpu_decode_backend(model.device)
on_gpu = [t.to(model.device) for t in (q, k, v)]


def swap_in(layer):
    for move in moves:
        move.layer(layer)


def swap_in_and_gpu(layer):
    swap_in(layer)
    return gpu_attention(*on_gpu, gpu_pool.k[layer], gpu_pool.v[layer], gpu_view)


# %% [markdown]
# First of all, do they agree?

# %%
torch.testing.assert_close(on_the_cpu(0), swap_in_and_gpu(0).cpu(), atol=2e-3, rtol=2e-3)

# %% [markdown]
# They do. Now the clock: all layers in turn, as a model would, the fastest of a few rounds.


# %%
def seconds_a_layer(work, repeats=6):
    times_s = []
    for _ in range(repeats):
        start_s = perf_counter()
        for layer in range(LAYERS):
            work(layer)
        if card:
            torch.cuda.synchronize()
        times_s.append((perf_counter() - start_s) / LAYERS)
    return min(times_s)


# %% [markdown]
# The copy is timed alone as well, to see what part of the second way it is.


# %%
def table(times_s, kv_bytes):
    for name, seconds in times_s.items():
        print(f"{name:21} {1e3 * seconds:6.2f} ms a layer, {kv_bytes / seconds / 1e9:5.1f} GB of KV a second")


WAYS = ("attention on the CPU", "copy of the KV alone", "copy, GPU attention")
ours_s = dict(zip(WAYS, map(seconds_a_layer, (on_the_cpu, swap_in, swap_in_and_gpu))))
table(ours_s, COUNT * TOKENS * model.config.kv_bytes_per_token(str(model.dtype)[6:]) // model.config.num_layers)

# %% [markdown]
# Without a GPU the "link" is a copy within your own memory, by your own cores; and the GPU's attention is torch's,
# which on a processor is no match for a kernel written for it. So judge by a real link. This was recorded on the machine
# of the timeline above, with more requests:

# %%
saved = json.loads((DATA / "recorded/h200_8sm_simple_offloading.json").read_text())
print(f"{saved['requests']} requests of {saved['context_tokens']:,} tokens, one layer of Llama-3.1-8B")
theirs, kv_bytes, link_gb_per_s = (saved[name] for name in ("per_layer_s", "kv_bytes_per_layer", "link_gb_per_s"))
theirs_s = dict(zip(WAYS, (theirs["cpu_attention"], theirs["link_copy"], theirs["swap_in_and_gpu_attention"])))
table(theirs_s, kv_bytes)
print(f"{kv_bytes / 1e6:.0f} MB over a link of {link_gb_per_s:.0f} GB/s: {kv_bytes / link_gb_per_s / 1e6:.2f} ms")

# %% [markdown]
# Compare the last line with the first: a copy that used the link to the full would still take longer than the whole
# attention on the CPU. And many small blocks never use it to the full.
#
# The figure puts both machines side by side. Either way a request costs its bytes over a bandwidth; the question is
# only which bandwidth, the host memory's or the link's.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.2, 2.9), sharey=True)
titles = (f"measured: {model.config.name}\n{here}", f"recorded: Llama-3.1-8B's shape\n{about}")
colors = [plots.COLORS[c] for c in ("cpu", "link", "gpu")]
for ax, times_s, title in zip(axes, (ours_s, theirs_s), titles):
    bars = ax.barh(WAYS, [1e3 * s for s in times_s.values()], 0.6, color=colors)
    ax.bar_label(bars, fmt=" %.2f", size=9)
    ax.set_xlabel("ms for one layer's decode attention")
    ax.set_title(title, size=9)
    ax.margins(x=0.15)
axes[0].invert_yaxis()
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "05_swap_or_compute", "measured + recorded")

# %% [markdown]
# Do the sum for the paper's A10G too, with public numbers: 26 requests of 1,000 tokens of Llama-3.1-8B, PCIe 4.0 with
# 16 lanes (32 GB/s at the very most), the paper's 200 GB/s of host memory.

# %%
kv = 26 * 1000 * llama.kv_bytes_per_token("float16")
for name, gb_s in (("over the link", 32), ("from host memory", 200)):
    print(f"{kv / 1e9:.1f} GB of KV {name:17} at {gb_s:3} GB/s: {1e3 * kv / gb_s / 1e9:5.0f} ms an iteration")

# %% [markdown]
# The KV must be read once in every step, whoever reads it. The link is the narrowest way to do it. (Swapping still has
# its place, once for a request that moves house; never at every step.)
#
# ## 5. What is left on the table
#
# So computing on the CPU is right, and the chain is what is wrong. How much could be won if neither side had to wait?
# Then an iteration would take as long as its busier side.

# %%
for name, t in (("measured", measured), ("recorded", recorded)):
    gpu_s, cpu_s = t.busy_s("gpu"), t.busy_s("cpu")
    best_s = max(gpu_s, cpu_s)
    print(f"{name}: now {1e3 * length_s(t):5.1f} ms, GPU {1e3 * gpu_s:5.1f} ms, CPU {1e3 * cpu_s:5.1f} ms", end="; ")
    print(f"with perfect overlap {1e3 * best_s:5.1f} ms: {length_s(t) / best_s:.2f} x the speed")

# %% [markdown]
# (On a machine without a GPU the first line is a thought experiment: the same cores cannot work twice. The recorded
# iteration is a little longer than section 3 says, since recording a timeline takes time as well.)
#
# Overlap needs two batches, so that one can be on the GPU while the other is on the CPU.
# - **Symmetric pipelining** (FastDecode) cuts the batch into two equal halves and lets them take turns. The weights are
#   then read twice, prefills still leave the CPU idle, and all the GPU's KV memory stays empty. That is notebook 06.
# - **Asymmetric pipelining** (NEO) makes the two batches different on purpose. Batch-0 has the prefills and the
#   requests whose KV stays on the GPU: long on the GPU, next to nothing on the CPU. Batch-1 has the CPU's requests:
#   short on the GPU, long on the CPU. The long stage of each hides behind the long stage of the other: notebook 07.
#
# ## Summary
# - A decode's attention needs a few KiB of q, k, v and o in each layer; its KV is hundreds of times more.
# - Moved to the CPU, it gives the same tokens.
# - In simple offloading one batch is one chain: GPU and CPU wait for each other, always.
# - Swapping the KV in at every step replaces the host memory's bandwidth by the link's, which is smaller.
# - With perfect overlap an iteration would take as long as its busier side. The next two notebooks go for that.
#
# ## Exercises
#
# **Exercise 1.** How many bytes cross the link, out and back together, in one decode iteration of `batch` requests of
# the model `m` in fp16, over all layers? (The context does not matter. Why?)


# %% tags=["exercise"]
def link_bytes(m, batch): ...  # your answer


# %% [markdown]
# The check compares with `moved_bytes` and a Llama.


# %% tags=["check"]
@exercise.check("1: bytes over the link")
def link_solved():
    answer = link_bytes(MODELS["llama-2-7b"], 1)
    assert answer is not None, "Return a number."
    assert answer != 4 * 32 * 128 * 2, "That is one layer."
    assert answer == 32 * 4 * 32 * 128 * 2, "q, k, v and o are each 32 heads of 128 in Llama-2-7B, in 32 layers."
    assert link_bytes(llama, 26) == 26 * llama.num_layers * small, "With GQA k and v are narrower than q and o."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def link_bytes(m, batch):
#     return batch * m.num_layers * sum(moved_bytes(m, 2))
# ```
#
# Only the newest token of each request moves; its context is already where it is needed.
#
# </details>

# %% [markdown]
# **Exercise 2.** Write `bubbles(events, start_s, end_s)`: the seconds between `start_s` and `end_s` in which a lane is
# idle whose events are these `(start, end)` pairs. They are sorted by start, but unlike above they *may overlap*.


# %% tags=["exercise"]
def bubbles(events, start_s, end_s): ...  # your answer


# %% [markdown]
# The check tries a few by hand, then the GPU lane of the timeline you measured.


# %% tags=["check"]
@exercise.check("2: bubbles")
def bubbles_solved():
    assert bubbles([], 0, 5) == 5, "No events: idle all the time."
    assert bubbles([(1, 2), (3, 4)], 0, 5) == 3, "Before, between and after."
    assert bubbles([(0, 3), (1, 2), (2, 5)], 0, 6) == 1, "Overlapping events count once: keep the latest end so far."
    pairs = sorted((e.start_s, e.end_s) for e in measured.events if e.lane == "gpu")
    ours, theirs = bubbles(pairs, *measured.span_s), length_s(measured) - measured.busy_s("gpu")
    assert abs(ours - theirs) < 1e-6, "Compare with length_s(measured) - measured.busy_s('gpu')."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def bubbles(events, start_s, end_s):
#     idle, reached = 0, start_s
#     for start, end in events:
#         idle += max(0, start - reached)
#         reached = max(reached, end)
#     return idle + max(0, end_s - reached)
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Balance. A layer's linear stages take `linear_s` on the GPU for one batch. How many tokens of context,
# over all requests together, may the *other* batch have on the CPU, so that its attention is just hidden? The host
# reads `gb_s` GB/s; the model is `m` in fp16; mind that `kv_bytes_per_token` counts all layers.


# %% tags=["exercise"]
def hidden_tokens(linear_s, gb_s, m): ...  # your answer


# %% [markdown]
# The check works in round numbers: one layer of Llama-3.1-8B holds 4,096 bytes for each token.


# %% tags=["check"]
@exercise.check("3: tokens that hide behind the linear stages")
def hidden_solved():
    answer = hidden_tokens(0.001, 200, llama)
    assert answer is not None, "Return a number."
    assert abs(answer / 48_828 - 1) < 0.01, "Bytes read in linear_s, over one layer's bytes of a token."
    assert abs(hidden_tokens(0.002, 100, llama) / 48_828 - 1) < 0.01, "Twice the time at half the bandwidth."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def hidden_tokens(linear_s, gb_s, m):
#     bytes_per_token = m.kv_bytes_per_token("float16") / m.num_layers
#     return linear_s * gb_s * 1e9 / bytes_per_token
# ```
#
# So a millisecond of linear work hides the attention of almost 50 requests of 1,000 tokens.
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | simple offloading's timeline | figure 3, a sketch | two real iterations | measured, recorded: `05_timeline` |
# | CPU idle in linear stages | "always idle" | its bubbles, printed | measured, recorded |
# | swapping KV at every step | bound by PCIe | one layer, both ways | measured, recorded: `05_swap_or_compute` |
# | tokens with offloading | unchanged ("no loss of accuracy") | identical, NaN in the other pool | measured |
