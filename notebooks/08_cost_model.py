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
# # 08 · The cost model: what will this iteration take?
#
# A scheduler that weighs two plans must know what each would take *before* it runs them. It cannot try both. So it
# needs a model of the machine: a few curves, each for one stage of one layer, and a rule that adds them up. This
# notebook makes that model twice, from a datasheet and from a stopwatch, and finds out how far each can be trusted.
#
# You will see
# - why a linear stage is flat at first and then rises, and where the corner is;
# - that decode attention grows with the KV tokens on both devices, and prefill attention with their square;
# - a profile of the bundled model on your machine, and its error at points that it has never seen;
# - what two sub-batches cost together: the paper's estimate, ours, and what a real GPU took;
# - what is left of an iteration when all layers are paid for.
#
# **Time** about a minute on two cores. **Memory** about 1.5 GB. **Needs** nothing but the package. Without a GPU the
# profile that you measure is your processor's in both roles; recorded stage times of a real GPU stand beside it.

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
import random
import statistics
import tempfile
from math import inf
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

from neo_lite import NeoLiteError, Timeline, build_engine, exercise, hardware, load_model, plots, profiler
from neo_lite.config import MODELS
from neo_lite.cost_model import Curve, Profile, Stages
from neo_lite.request import Request, SubBatch, Work

# %% [markdown]
# Two models: the bundled one, to be measured here, and Llama-3.1-8B's shape, whose stages were recorded on 8
# multiprocessors of an H200 and its host. That slice is about as fast as an A10G, the paper's small card.

# %%
plots.use_style()
BELOW = (0, 0.04, 1, 1)  # leaves room beneath a figure for its source
GPU, CPU, GREY = plots.COLORS["gpu"], plots.COLORS["cpu"], plots.COLORS["paper"]
DATA = next(p for p in (Path("data"), Path("../data"), Path("neo-lite/data")) if p.is_dir())
llama, part = MODELS["llama-3.1-8b"], hardware.find("h200-8sm-14t")
recorded = Profile.load(DATA / "profiles/h200-8sm-14t_llama-3.1-8b_float16.json")
SLICE = "8 SMs of an H200, 14 host threads"

# %% [markdown]
# ## 1. Bytes over bandwidth, operations over rate
#
# A layer's *linear stage* is everything that is not attention: the projections to q, k and v, the output projection,
# the feed-forward block. The paper calls its time `Tl`. It must read the layer's weights once, however many tokens
# there are, and it does two operations with each weight for each token. A machine is two numbers, bytes a second and
# operations a second:

# %%
for name in ("gpu_bytes_per_s", "gpu_flops_per_s"):
    print(f"{name:16} {getattr(part, name):.3g}  {part.sources[name]}")

# %% [markdown]
# So the stage has two times, and needs at least the longer one:


# %%
def two_times_s(m, tokens, h):
    reading = 2 * m.layer_parameters / h.gpu_bytes_per_s  # fp16: two bytes for each weight
    computing = 2 * m.layer_parameters * tokens / h.gpu_flops_per_s
    return reading, computing


# %% [markdown]
# For Llama-3.1-8B on this slice. Guess before you run: from how many tokens on does the arithmetic take longer?

# %%
for tokens in (1, 16, 64, 256, 1024):
    reading, computing = two_times_s(llama, tokens, part)
    limit = "bytes" if reading > computing else "operations"
    print(f"{tokens:5} tokens: {1e3 * reading:.2f} ms to read, {1e3 * computing:6.2f} ms to compute: bound by {limit}")
print(f"equal at {part.gpu_flops_per_s / part.gpu_bytes_per_s:.0f} tokens")

# %% [markdown]
# That corner is the *ridge*. To its left another token is almost free; to its right each token costs the same. The
# whole of NEO lives on this: a GPU whose batch is stuck far left of the ridge, for want of KV memory, does most of
# its reading for nothing.
#
# The textbook's roofline takes the longer of the two times, as if they overlapped perfectly. A real GPU cannot hide
# one behind the other where both are about as long. A *p-norm* says that with one more number: `(a^p + b^p)^(1/p)`.
# With p = infinity it is the maximum, with p = 1 the sum.


# %%
def linear_s(m, tokens, h, p):
    reading, computing = two_times_s(m, tokens, h)
    return max(reading, computing) if p == inf else (reading**p + computing**p) ** (1 / p)


# %% [markdown]
# The package's `hardware.roofline` makes a whole cost model like this from a `HardwareSpec`, whose `sharpness` is p. Do we agree
# at every one of its points?

# %%
roof = hardware.roofline(part, llama)
assert all(abs(linear_s(llama, n, part, part.sharpness) / s - 1) < 1e-9 for n, s in roof.linear.points)
fitted_to = part.sources["sharpness"].partition(",")[0]
print(f"{len(roof.linear.points)} points, equal; p = {part.sharpness}, fitted to: {fitted_to}")

# %% [markdown]
# Now the stopwatch: the linear stage as recorded on that slice, against both roofs.


# %%
def errors(p):
    return [linear_s(llama, n, part, p) / s - 1 for n, s in recorded.linear.points]


for p in (inf, part.sharpness):
    worst = max(errors(p), key=abs)
    print(f"p = {p}: median error {statistics.median(map(abs, errors(p))):.1%}, worst {worst:+.0%}")

# %% [markdown]
# Both curves, and their error, on the same axis of tokens.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.7))
tokens, seconds = zip(*recorded.linear.points)
fine, names = np.geomspace(1, tokens[-1], 200), {inf: "∞ (the textbook)", part.sharpness: part.sharpness}
left.loglog(tokens, [1e3 * s for s in seconds], "o", color=GPU, ms=4, label="recorded")
for p, style in ((inf, "--"), (part.sharpness, "-")):
    roof_ms = [1e3 * linear_s(llama, n, part, p) for n in fine]
    left.loglog(fine, roof_ms, style, color=GREY, label=f"roofline, p = {names[p]}")
    right.semilogx(tokens, [100 * e for e in errors(p)], style, color=GREY, marker="o", ms=3, label=f"p = {names[p]}")
for ax in (left, right):
    ax.axvline(part.gpu_flops_per_s / part.gpu_bytes_per_s, color=CPU, lw=1)
    ax.set_xlabel("tokens in the linear stage (orange: the ridge)")
    ax.legend()
left.set(ylabel="ms, one layer")
right.set(ylabel="roofline against recorded, %")
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "08_linear", "recorded + simulated", SLICE)

# %% [markdown]
# Far from the ridge both are within a few percent. Near it, where a decode batch and a short prompt meet, the textbook
# promises far too much, and that is where the scheduler decides. A smaller p mends most of it, and at the ridge itself
# a little more than that: there the p-norm is now too long. Mind that this is a fit, not a prediction: one rate is the
# curve's left end, the other its right end, and p was chosen for what lies between, all three on an earlier recording
# of this slice. What three numbers can do here is draw the whole curve; for a machine that nobody has measured they are
# the best there is.
#
# ## 2. Attention
#
# Decode attention reads every K and V of its requests once and does next to nothing with each (notebook 04). So it has
# no ridge: bytes over bandwidth, on either device. The CPU adds what a copy of q, k, v, a call and a copy back take
# with nothing in them.


# %%
def decode_attention_s(m, kv_tokens, bytes_per_s, fixed_s):
    return kv_tokens * 2 * m.num_kv_heads * m.head_dim * 2 / bytes_per_s + fixed_s


DEVICES = {"GPU": (part.gpu_attn_bytes_per_s, part.kernel_s), "CPU": (part.cpu_bytes_per_s, part.cpu_dispatch_s)}
for (name, rates), ours in zip(DEVICES.items(), (roof.gpu_attn, roof.cpu_attn)):
    assert all(abs(decode_attention_s(llama, n, *rates) / s - 1) < 1e-9 for n, s in ours.points)
    print(f"{name}: {1e3 * decode_attention_s(llama, 26_400, *rates):.2f} ms a layer for 26,400 tokens of KV")

# %% [markdown]
# Four times slower, not a hundred times: that is the gap between the two memories. And it is about as long as the linear
# stage of a hundred tokens, behind which it is to be hidden.
#
# A prefill is different. Its tokens attend to one another, token `i` to `i` others, so the operations grow with the
# square. The CPU never does that. How many operations a second did the recorded kernel get done?

# %%
width = llama.num_heads * llama.head_dim
for n, s in recorded.prefill_attn.points[-4:]:
    share = 2 * width * n * n / s / part.gpu_flops_per_s  # 4 operations for each of n * n / 2 pairs and each number
    print(f"{n:5.0f} tokens: {1e3 * s:6.2f} ms, {share:4.0%} of the linear stage's rate")

# %% [markdown]
# A third of the rate: these products are small, tiles of a head's 128 numbers, the softmax between two of them is no matrix
# product at all, and of the tiles on the diagonal half is masked.
#
# A long prompt in one piece costs more than its tokens. In chunks, a later chunk costs what the whole prompt up to its
# end costs, less what its earlier part did. So the chunks add up to the whole:

# %%
chunks = [Work(Request(0, (7,) * 2048), start, 512) for start in range(0, 2048, 512)]
each_s = [recorded.t_prefill_attn([chunk]) for chunk in chunks]
print("ms for each chunk of 512:", ", ".join(f"{1e3 * s:.2f}" for s in each_s))
assert abs(sum(each_s) - recorded.t_prefill_attn([Work(Request(0, (7,) * 2048), 0, 2048)])) < 1e-12

# %% [markdown]
# That holds for the operations. Each chunk also reads the KV of all earlier ones again, which a large chunk hardly
# notices and a small one does.
#
# The figure shows one layer of Llama-3.1-8B as recorded, everything on one scale of milliseconds.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.7), sharey=True)
for curve, color, name in ((recorded.cpu_attn, CPU, "CPU"), (recorded.gpu_attn, GPU, "GPU")):
    left.loglog(*(np.array(curve.points) * (1, 1e3)).T, "o-", ms=4, color=color, label=f"decode attention, {name}")
left.set(xlabel="KV tokens that are read, all requests together", ylabel="ms, one layer")
last, last_s = recorded.prefill_attn.points[-1]
for curve, color, name in ((recorded.prefill_attn, GPU, "prefill attention"), (recorded.linear, GREY, "linear stage")):
    right.loglog(*(np.array(curve.points) * (1, 1e3)).T, "o-", ms=4, color=color, label=name)
prompt = np.geomspace(100, 10_000, 50)
right.loglog(prompt, 1e3 * last_s * (prompt / last) ** 2, "--", color=GPU, lw=1, label="n²")
right.set(xlabel="tokens of one prompt", ylim=(0.005, 100))
for ax in (left, right):
    ax.legend(fontsize=8, loc="upper left")
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "08_attention", "recorded", SLICE)

# %% [markdown]
# On the left two lines, level where a kernel, a call and its copies take longer than the reading, and straight beyond.
# On the right a stage that starts as nearly nothing, rises in two steps, beyond 64 and beyond 128 tokens, and turns into
# a parabola; the cost model goes on along it where its points end:

# %%
for n in (256, 2048, 10_000):
    attention_s = recorded.t_prefill_attn([Work(Request(0, (7,) * n), 0, n)])
    share = attention_s / (attention_s + recorded.t_linear(n))
    print(
        f"a prompt of {n:6,} tokens: its attention is {share:.0%} of a layer" + (", by the square" if n > last else "")
    )

# %% [markdown]
# How these points came about is in the profile's file, with the error at points that were held out (section 4).

# %%
for what, how in recorded.stamp["how"].items():
    print(f"{what}: {how}")
print("held out:", ", ".join(f"{name} {error:.1%}" for name, error in recorded.stamp["held_out"].items()))

# %% [markdown]
# ## 3. From points to a curve
#
# A real machine has steps, caches and kernels that change their mind; no formula draws it exactly. So NEO measures each
# stage at a few points, once, and interpolates between them. That is all that a `Curve` is: a straight line between
# two neighbours, flat below the first point (one token costs what reading all weights costs), and beyond the last
# point on along the last piece. Nothing costs nothing.


# %%
def interpolated_s(points, x):
    if x <= 0:
        return 0.0
    if x <= points[0][0]:
        return points[0][1]
    i = next((i for i, (at, _) in enumerate(points) if x <= at), len(points) - 1)  # beyond the last: the last
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# %% [markdown]
# Against the package's, at and between points, below the first and beyond the last:

# %%
points = [(8, 1.0), (64, 1.5), (512, 8.0)]
for x in (0, 1, 8, 20, 64, 300, 512, 700, 10_000):
    assert abs(interpolated_s(points, x) - Curve(points)(x)) < 1e-9
print("equal;", Curve(points)(300), "s at 300")

# %% [markdown]
# How many points does it take? Take every second, third, fourth one of the recorded linear stage, and ask the others.

# %%
known = recorded.linear.points
for step in (2, 3, 4, 6):
    curve = Curve([*known[::step], known[-1]] if (len(known) - 1) % step else known[::step])
    missed = [abs(curve(x) / s - 1) for x, s in known if (x, s) not in curve.points]
    print(f"{len(curve.points):2} of {len(known)} points: median error {statistics.median(missed):.1%}", end=", ")
    print(f"worst {max(missed):.1%} at the {len(missed)} others")

# %% [markdown]
# A few, if they are where the curve bends. Each point costs time to measure, and somebody waits for it.
#
# ## 4. A profile of this machine
#
# Now yours. `profiler.measure` times each stage of the bundled model alone, over several layers in turn so that no
# cache holds the weights. It needs an engine's pipeline, since it times what the pipeline will call. Small pools and
# 256 tokens at most keep it short; `python -m neo_lite profile` measures a whole range and writes a file. `thorough` takes
# every point and several rounds. (An engine that needs a profile and has none takes every fourth, in a second or two.)

# %%
model, card = load_model("smollm2"), machine.gpu()
engine = build_engine(model, gpu_kv_tokens=4096, cpu_kv_tokens=4096, max_batched_tokens=256, max_seqs=64, cpu_threads=1)
start_s = perf_counter()
mine = profiler.measure(engine.executor, thorough=True)
where = card["name"] if card else f"{machine.cpu_name()}, in the GPU's place too"
print(f"{mine.model} in {mine.dtype}: {perf_counter() - start_s:.0f} s; {where}")

# %% [markdown]
# Predict before you look at them. Your processor, or your GPU, has a ridge as well. Is it further to the left or to the
# right than that of the slice? Look for the number of tokens that takes twice the time of one.

# %%
STAGES = ("linear", "prefill_attn", "gpu_attn", "cpu_attn", "head")
for name in STAGES:
    points = getattr(mine, name).points
    print(f"{name:12} " + ", ".join(f"{x:.0f}: {1e3 * s:.2f}" for x, s in points[:: max(1, len(points) // 6)]), "ms")
for name, curve in (("here", mine.linear), ("on the slice", recorded.linear)):
    doubled = next(n for n in range(1, 100_000) if curve(n) >= 2 * curve(1))
    print(f"{name}, the linear stage takes twice the time of one token at {doubled} tokens")

# %% [markdown]
# ### At points that it has not seen
#
# A profile that is exact at its own points proves nothing. So hold some out: draw the curve through every second point
# only, and ask it for the others. How far off it is, in the median:


# %%
def held_out_error(points):
    curve = Curve(points[::2])
    return statistics.median(abs(curve(x) / s - 1) for x, s in points[1::2])


curves = {name: getattr(mine, name).points for name in STAGES}
ours = {name: held_out_error(points) for name, points in curves.items()}
assert all(abs(ours[name] - profiler.held_out(curves)[name]) < 1e-9 for name in STAGES)

# %% [markdown]
# A thorough `measure` does that itself and keeps the result in the profile's stamp, on the times as they were measured. Ours is
# on the finished curves, in which a cost that fell from one point to the next (it cannot, so it was noise) has been
# evened out.

# %%
for name in STAGES:
    timed = mine.stamp["held_out"][name]
    print(f"{name:12} median error held out: {ours[name]:6.1%} on the curves, {timed:6.1%} as timed")
print(f"all stages together, as timed: {mine.stamp['held_out']['all']:.1%}")

# %% [markdown]
# On a quiet machine a few percent where a curve is smooth, and more where it jumps from one point to the next, as the
# head's often does; on a machine that others use at the same time, as much as they disturb. The figure shows the first
# four stages: the dots made the line, the crosses were held out.


# %%
def draw_held_out(ax, name, color):
    points = np.array(curves[name]) * (1, 1e3)
    xs = np.geomspace(*points[[0, -1], 0], 200)
    curve = Curve(curves[name][::2])
    ax.loglog(xs, [1e3 * curve(x) for x in xs], color=color, lw=1)
    ax.loglog(*points[::2].T, "o", color=color, ms=4, label="known")
    ax.loglog(*points[1::2].T, "x", color="black", ms=6, label="held out")
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_title(f"{name}: median error {ours[name]:.1%}", size=9)


# %% [markdown]
# Tokens or KV tokens along, milliseconds up.

# %%
fig, axes = plt.subplots(1, 4, figsize=(11, 3))
for ax, name, color in zip(axes, STAGES, (GREY, GPU, GPU, CPU)):
    draw_held_out(ax, name, color)
    ax.set_xlabel("KV tokens" if name in ("gpu_attn", "cpu_attn") else "tokens")
axes[0].set_ylabel("ms, one layer")
axes[0].legend(fontsize=8)
fig.tight_layout(rect=(0, 0.06, 1, 1))
_ = plots.save_figure(fig, "08_held_out", "measured", f"smollm2 in {mine.dtype}; {where}")

# %% [markdown]
# ## 5. Two sub-batches at once
#
# Stages are known; now add them up. With one sub-batch that is a sum: linear, attention, linear, attention. With two,
# the GPU works for one while the CPU works for the other, and the answer depends on who waits for whom.
#
# The paper puts a barrier after each half: `max(Tl0, Tca1) + max(Tl1 + Tga0, Tca0)`. In this project the CPU is just
# another stream: each waits only for the data that it needs. The rules are
# - the GPU takes batch-0's linear stage, then its attention, then batch-1's linear stage, and so on;
# - the CPU serves one sub-batch after the other, each as soon as the GPU has its q, k and v;
# - a linear stage waits for its own sub-batch's attention from the layer before.
#
# Follow those rules with two clocks, one for each device:


# %%
def two_clocks(stages, num_layers):
    """A timeline of both sub-batches, layer by layer."""
    s, timeline, gpu, cpu, back = stages, Timeline(), 0.0, 0.0, [0.0, 0.0]  # back: when the CPU's output is there
    for layer in range(num_layers):
        for batch, (linear, attention, on_cpu) in enumerate(((s.l0, s.pref0 + s.ga0, s.ca0), (s.l1, 0.0, s.ca1))):
            start = max(gpu, back[batch])
            gpu = start + linear
            timeline.record("gpu", f"linear, batch-{batch}", start, gpu, layer=layer)
            start = max(gpu, cpu)
            cpu = back[batch] = start + on_cpu
            timeline.record("cpu", f"attention, batch-{batch}", start, cpu, layer=layer)
            timeline.record("gpu", "attention, batch-0", gpu, gpu + attention, layer=layer)
            gpu += attention
    return timeline


# %% [markdown]
# The package does not play it through. It has a formula, `Stages.layer`: the largest of what the GPU has to do, what
# the CPU has to do, and each sub-batch's own chain. Are the two the same? Try 200 random sets of times; once the
# pipeline is full, each layer must take exactly that long.


# %%
def seconds_a_layer(stages, first=40, last=80):
    ends = [max(e.end_s for e in two_clocks(stages, n).events if e.lane == "gpu") for n in (first, last)]
    return (ends[1] - ends[0]) / (last - first)


rng = random.Random(0)
for _ in range(200):
    stages = Stages(*(rng.random() for _ in range(6)))
    assert abs(seconds_a_layer(stages) - stages.layer) < 1e-9 and stages.layer < stages.paper_layer + 1e-9
print("equal, and never more than the paper's estimate")

# %% [markdown]
# Now a concrete iteration: nothing but decodes, 22 on the GPU and 18 on the CPU, of 1,100 tokens each. Their stage
# times come from the recorded profile.


# %%
def decodes(count, device, length=1100):
    requests = [Request(i, (7,) * length, device=device) for i in range(count)]
    return tuple(Work(r, length - 1, 1) for r in requests)


batches = (SubBatch(gpu_decodes=decodes(22, "gpu")), SubBatch(cpu_decodes=decodes(18, "cpu")))
stages = recorded.stages(batches)
print(", ".join(f"{name} {1e3 * getattr(stages, name):.2f} ms" for name in ("l0", "ga0", "l1", "ca1")))
print(f"a layer: {1e3 * stages.layer:.2f} ms as streams, {1e3 * stages.paper_layer:.2f} ms with barriers")

# %% [markdown]
# The same work in the paper's way, for the picture: two halves, each as long as its longer side.


# %%
def with_barriers(s, num_layers):
    timeline, now = Timeline(), 0.0
    for layer in range(num_layers):
        timeline.record("gpu", "linear, batch-0", now, now + s.l0, layer=layer)
        timeline.record("cpu", "attention, batch-1", now, now + s.ca1, layer=layer)
        now += max(s.l0, s.ca1)
        timeline.record("gpu", "attention, batch-0", now, now + s.pref0 + s.ga0, layer=layer)
        timeline.record("gpu", "linear, batch-1", now + s.pref0 + s.ga0, now + s.pref0 + s.ga0 + s.l1, layer=layer)
        timeline.record("cpu", "attention, batch-0", now, now + s.ca0, layer=layer)
        now += max(s.l1 + s.pref0 + s.ga0, s.ca0)
    return timeline


# %% [markdown]
# Bars need colours: a dark and a light one for the two sub-batches.


# %%
def draw(ax, timeline, title):
    colors = {"linear, batch-0": "#2f5d8a", "linear, batch-1": "#9ecae9", "attention, batch-0": "#54a24b",
              "attention, batch-1": "#e8a87c"}  # fmt: skip
    for event in timeline.events:
        if event.duration_s > 0:
            bar = (1e3 * event.start_s, 1e3 * event.duration_s)
            row = ("gpu", "cpu").index(event.lane)
            ax.broken_barh([bar], (row - 0.4, 0.8), color=colors[event.name], label=event.name)
    ax.set_yticks((0, 1), ("GPU", "CPU"))
    ax.invert_yaxis()
    ax.set_title(title, size=9)


# %% [markdown]
# Four layers, once with barriers and once as streams. Look for white between the bars.

# %%
fig, axes = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True)
for ax, timeline, name, layer_s in (
    (axes[0], with_barriers(stages, 4), "a barrier after each half (the paper's estimate)", stages.paper_layer),
    (axes[1], two_clocks(stages, 4), "the CPU as another stream", stages.layer),
):
    draw(ax, timeline, f"{name}: {1e3 * layer_s:.2f} ms a layer")
axes[1].set_xlabel("ms")
entries = dict(zip(*reversed(axes[1].get_legend_handles_labels())))
fig.legend(entries.values(), entries.keys(), loc="lower left", ncols=4, fontsize=8)
fig.tight_layout(rect=(0, 0.08, 1, 1))
_ = plots.save_figure(fig, "08_two_clocks", "simulated", SLICE)

# %% [markdown]
# With the barrier the GPU waits for the CPU in each layer, though it has other work at hand. As streams it waits less:
# only as long as batch-1's own chain, its linear stage and then its attention, outlasts all of the GPU's work.
#
# Who is right? A few kinds of iterations were run on the slice for real, with each of their stages timed alone in the
# same process. (The last one is from an earlier version, whose CPU kernel was less than half as fast. Its sums are none
# the worse.)

# %%
cases = json.loads((DATA / "recorded/h200_8sm_iteration_bound.json").read_text())["cases"]
earlier = json.loads((DATA / "recorded/h200_8sm_asymmetric_bound.json").read_text())["cases"]
cases |= {name: found for name, found in earlier.items() if found["terms_s"]["ca0"] > 0.001}  # CPU decodes in both
bars = {}
for case, found in cases.items():
    terms = found["terms_s"]
    whole = Stages(**{name: terms[name] for name in ("l0", "pref0", "ga0", "ca0", "l1", "ca1")})  # of all layers
    sums = [s + terms["head"] for s in (whole.gpu, whole.layer, whole.paper_layer)]
    bars[case] = [1e3 * s for s in (*sums, terms["iteration"])]
    _, streams, paper = (s / terms["iteration"] for s in sums)
    print(f"{case:41} streams {streams:.2f}, paper {paper:.2f} of what it took")

# %% [markdown]
# As bars. The first is what the GPU alone has to do; no estimate can be below it.

# %%
fig, ax = plt.subplots(figsize=(9, 4))
names = ("GPU's own work", "as streams", "paper's two stages", "the iteration, recorded")
for i, (name, color) in enumerate(zip(names, ("#9ecae9", CPU, GREY, GPU))):
    rows = [y + 0.2 * i for y in range(len(bars))]
    ax.barh(rows, [values[i] for values in bars.values()], 0.18, color=color, label=name)
ax.set_yticks([y + 0.3 for y in range(len(bars))], [case.replace(": ", ":\n").replace(", ", ",\n", 1) for case in bars])
ax.tick_params(axis="y", labelsize=8)
ax.invert_yaxis()
ax.set_xlabel("ms, 32 layers and the head")
ax.legend(fontsize=8, loc="upper right")
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "08_bounds", "recorded + simulated", f"the sums of recorded stages; {SLICE}")

# %% [markdown]
# Where batch-1's own chain is as long as the GPU's work (decodes alone), the paper's estimate is an eighth too long, and
# ours is met. Where the GPU is the longer side, both say the same, and the iteration takes a few percent more. The last
# case is one that no scheduler should plan: its batch-0 has more CPU attention than batch-1's linear stage and its own
# GPU attention hide, against the second inequality, and of the three on which both estimates agree it exceeds them most.
#
# ## 6. What the layers leave
#
# "The transformer layers take more than 95 % of an iteration", says the paper, and counts nothing else. What else is
# there: the head, once for all requests that sample, and the overhead of building rows, launching and sampling. (CUDA
# graphs replay an iteration of decodes in one launch; one with prefills is launched kernel by kernel.)


# %%
def shares(costs, batches):
    stages, sampling = costs.stages(batches), sum(len(b) for b in batches)
    parts = [costs.num_layers * stages.layer, costs.t_head(sampling), costs.overhead(stages)]
    return [100 * part / sum(parts) for part in parts]


# %% [markdown]
# Decodes of the 8B model on its slice, the same with a prompt and the CPU's decodes, and four short decodes of the
# bundled model as you have just measured it:

# %%
prompt = (Work(Request(99, (7,) * 1000), 0, 1000),)
cases = {
    "8B, 22 decodes": shares(recorded, batches[:1]),
    "8B, two batches, one prompt": shares(recorded, (SubBatch(prompt, decodes(22, "gpu")), batches[1])),
    "smollm2 here, 4 decodes": shares(mine, (SubBatch(gpu_decodes=decodes(4, "gpu", 100)),)),
}
for name, (layers, head, overhead) in cases.items():
    print(f"{name:28} layers {layers:5.1f} %, head {head:4.1f} %, overhead {overhead:4.1f} %")

# %% [markdown]
# The smaller the model, the more the rest weighs. The overhead is a matter of milliseconds, which a short iteration feels
# most. And the head grows with the vocabulary: 49,152 words of 576 numbers are a fifth of everything that the small model
# reads for a token. (Its share of the time may be smaller: one large matrix is read faster than many small ones.)

# %%
for m in (llama, MODELS["smollm2"]):
    head = m.vocab_size * m.hidden_size
    share = head / (m.num_layers * m.layer_parameters + head)
    print(f"{m.name}: the head has {share:.0%} of the weights that a token reads")

# %% [markdown]
# So a cost model that stops at the layers is a few percent off for the paper's models and wrong for the one on your
# machine. Ours counts all three.
#
# ## 7. A profile is of one machine and one model
#
# It is a file, with a stamp of what it was measured on:

# %%
with tempfile.TemporaryDirectory() as folder:
    mine.save(Path(folder) / "mine.json")
    again = Profile.load(Path(folder) / "mine.json")
assert again.linear.points == mine.linear.points
print(again.source)

# %% [markdown]
# Used for another model, or on another machine, its numbers would be nonsense that looks like numbers. So it refuses,
# and says why:

# %%
eight_b = ("llama-3.1-8b", "float16")
for profile, asked in ((mine, eight_b), (recorded, (*eight_b, machine.stamp(), 14))):
    try:
        profile.check(*asked)
    except NeoLiteError as error:
        print(error)

# %% [markdown]
# ## Summary
# - A stage takes its bytes over the bandwidth or its operations over the rate, whichever is longer; near the ridge it
#   takes more than either.
# - Decode attention is a straight line on both devices; prefill attention is a parabola.
# - A few measured points and straight lines between them make a profile. Its error at held-out points says how far to
#   trust it.
# - Two sub-batches take, at best, the longest of: the GPU's work, the CPU's work, one sub-batch's own chain. The paper's two
#   stages are never less than that.
# - Head and overhead are a few percent of an 8B model's iteration, and a fifth or more of a small model's decode.
#
# The next notebook gives these numbers to the scheduler.
#
# ## Exercises
#
# **Exercise 1.** What does a second batch cost? Moving `n1` of `n0 + n1` tokens into a sub-batch of its own means that
# the weights are read twice. Write the extra seconds of one layer's linear stages, for any profile `costs`.


# %% tags=["exercise"]
def price_of_two_batches_s(costs, n0, n1): ...  # your answer


# %% [markdown]
# The check also asks where it hurts most.


# %% tags=["check"]
@exercise.check("1: the price of a second batch")
def price_solved():
    few, many = price_of_two_batches_s(recorded, 10, 10), price_of_two_batches_s(recorded, 1000, 1000)
    assert few is not None, "Return a number of seconds."
    assert few > 0.8 * recorded.t_linear(1), "10 and 10 tokens: almost the whole reading of the weights, once more."
    assert few > many, "Beyond the ridge each token costs the same, in whichever batch it is."
    answer = price_of_two_batches_s(recorded, 25, 75)
    assert abs(answer - (recorded.t_linear(25) + recorded.t_linear(75) - recorded.t_linear(100))) < 1e-12


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def price_of_two_batches_s(costs, n0, n1):
#     return costs.t_linear(n0) + costs.t_linear(n1) - costs.t_linear(n0 + n1)
# ```
#
# Left of the ridge it is the time of one reading. That is why NEO must weigh: with few decodes and no prompts, the
# second batch costs more than the CPU saves.
#
# </details>

# %% [markdown]
# **Exercise 2.** The first inequality, `Tca1 <= Tl0`. How many CPU decodes of `length` tokens each does batch-1 hold at
# most, if batch-0 has `tokens` tokens in its linear stage? Use `costs.t_linear(tokens)` and
# `costs.t_cpu_attn(requests, kv_tokens)`.


# %% tags=["exercise"]
def hidden_decodes(costs, tokens, length): ...  # your answer


# %% [markdown]
# The check tries a decode batch, a chunk and a prompt.


# %% tags=["check"]
@exercise.check("2: decodes that hide")
def hidden_solved():
    for tokens, length in ((22, 1100), (512, 1100), (1022, 300)):
        answer, limit_s = hidden_decodes(recorded, tokens, length), recorded.t_linear(tokens)
        assert answer is not None, "Return a whole number."
        assert recorded.t_cpu_attn(answer, answer * length) <= limit_s, f"{answer} do not hide behind {tokens} tokens."
        assert recorded.t_cpu_attn(answer + 1, (answer + 1) * length) > limit_s, f"One more than {answer} would hide."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def hidden_decodes(costs, tokens, length):
#     requests = 0
#     while costs.t_cpu_attn(requests + 1, (requests + 1) * length) <= costs.t_linear(tokens):
#         requests += 1
#     return requests
# ```
#
# Step 4 of the scheduler does the same with requests of different lengths; `Profile.capacity` inverts the curve once
# instead of trying one by one.
#
# </details>

# %% [markdown]
# **Exercise 3.** Where should the points be? Of the recorded linear stage's points, choose at most eight, the first and
# the last among them, so that the curve through them is within 3 % of all the others. `chosen` is a list of tokens. (Every
# fourth one is not good enough.)

# %% tags=["exercise"]
chosen = [...]  # your answer, such as [1, 128, 512, ...]

# %% [markdown]
# The points to choose from: `[int(x) for x, _ in recorded.linear.points]`.


# %% tags=["check"]
@exercise.check("3: eight points")
def points_solved():
    known = dict(recorded.linear.points)
    assert ... not in chosen and set(chosen) <= set(known), "A list of tokens from recorded.linear.points."
    assert len(chosen) <= 8 and {min(known), max(known)} <= set(chosen), "At most eight, with both ends."
    curve = Curve([(x, known[x]) for x in sorted(chosen)])
    worst, at = max((abs(curve(x) / s - 1), x) for x, s in known.items())
    assert worst < 0.03, f"{worst:.1%} off at {at:.0f} tokens: where does the curve bend?"


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# chosen = []
# known = recorded.linear.points
# chosen = [known[0][0], known[-1][0]]
# while True:
#     curve = Curve([(x, s) for x, s in known if x in chosen])
#     worst, at = max((abs(curve(x) / s - 1), x) for x, s in known)
#     if worst < 0.03:
#         break
#     chosen.append(at)
# ```
#
# Add a point where the error is largest, until it is small enough. The first goes to the ridge, where the curve bends, and
# takes most of the error away. A straight line needs its ends only; the others go to the steps that a measured stage has,
# where another kernel takes over.
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | stage times | profiled offline, interpolated | the same; a roofline for other machines | `08_held_out`, `08_linear` |
# | error of the interpolation | not reported | about 1 % on the slice, a few percent here | recorded; measured: `08_held_out` |
# | time of a layer | two stages, each the longer side | the longest of three chains | recorded: `08_bounds` |
# | layers' share of an iteration | more than 95 % | 92 to 96 % (8B, slice), about 60 % (SmolLM2 here) | recorded, measured |
# | decode attention, CPU and GPU | as their bandwidths | four times apart | recorded: `08_attention` |
