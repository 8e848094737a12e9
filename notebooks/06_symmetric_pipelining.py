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
# # 06 · Symmetric pipelining: two halves take turns
#
# Notebook 05 ended with a chain. One batch is on the GPU or on the CPU, never on both, so each side waits for the
# other. Cut the batch into two equal halves, and let one be on the CPU while the other is on the GPU. That is
# FastDecode's idea; the NEO paper calls it symmetric pipelining and draws it in its figure 4.
#
# You will see
# - how one `yield` a layer turns a loop over layers into a pipeline, and that the tokens stay the same;
# - the pipeline on two cores of your own machine, and recorded on a real GPU: what overlaps, and what does not;
# - what a layer takes, in arithmetic, and when two halves are *slower* than one whole;
# - the three things that this pipeline leaves on the table.
#
# **Time** under a minute on two cores. **Memory** about 1.5 GB. **Needs** nothing but the package. Without a GPU one core
# plays the GPU and another the CPU; the recorded timeline of a real GPU stands beside it.

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
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch

from neo_lite import EngineConfig, SamplingParams, Timeline, build_engine, exercise, load_model, pipeline, plots
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.scheduler import halves
from neo_lite.streams import Host, finished

# %% [markdown]
# The model, and one line about this machine that the figures will carry. Without a GPU torch gets one core, since the
# other will be needed.

# %%
plots.use_style()
model, card = load_model("smollm2"), machine.gpu()
if not card:
    torch.set_num_threads(1)
here = card["name"] if card else f"{machine.cpu_name()}: one core in the GPU's place, one as the CPU"
print(f"{model.config.name} on {model.device} in {model.dtype}; {here}")

# %% [markdown]
# ## 1. Taking turns
#
# A batch goes through the layers one by one. In each it reaches the point where its attention is under way on the CPU,
# and there it can do nothing but wait. In Python a function that stops in the middle and can be resumed is a
# *generator*, and `yield` is where it stops. So write the loop over layers as usual, and put one `yield` into it:


# %%
def through_layers(name, count, log):
    for layer in range(count):
        log.append(f"{name}: pre {layer}, start attention")
        yield
        log.append(f"{name}: take its output, post {layer}")
    return f"{name}'s logits"


# %% [markdown]
# Whoever drives the generators decides the order. To let them take turns: advance each to its next stop, round and
# round, until all have returned. What a generator returns comes with `StopIteration`.


# %%
def take_turns(batches):
    running, results = dict(enumerate(batches)), {}
    while running:
        for i, batch in list(running.items()):
            try:
                next(batch)
            except StopIteration as end:
                results[i] = end.value
                del running[i]
    return [results[i] for i in sorted(results)]


# %% [markdown]
# Predict the first five lines, then run.

# %%
log = []
print(take_turns([through_layers("batch-0", 3, log), through_layers("batch-1", 3, log)]), *log, sep="\n")

# %% [markdown]
# Between the start of batch-0's attention and the moment its output is taken, batch-1 does its own GPU work. That is
# the whole trick. The package's driver is `pipeline.alternate`. It is told the order of a turn (a matter of notebook 07),
# and is a generator itself, which stops where a batch does; `finished` runs it to its end. The same order as ours, for any
# number of batches and layers?


# %%
def package(batches):
    return finished(pipeline.alternate(batches, range(len(batches))))


def order(driver, counts):
    log = []
    results = driver([through_layers(f"batch-{i}", count, log) for i, count in enumerate(counts)])
    return results, log


# %% [markdown]
# A hundred times, with batches that end early or have no layer at all:

# %%
rng = random.Random(0)
for _ in range(100):
    counts = [rng.randrange(6) for _ in range(rng.randrange(4))]
    assert order(take_turns, counts) == order(package, counts), counts
print("toy and package: the same order, a hundred times")

# %% [markdown]
# ## 2. The same tokens
#
# Does it still answer the same? Four prompts, in three modes. Two precautions: the pool that no request should touch is
# full of NaN, and in the third run *your* `take_turns` drives the real model's layers.

# %%
PROMPTS = ["Gravity is", "The three primary colors are", "Water boils at", "Once upon a time there was"]


def mine(batches, order):
    yield  # a generator, as the package's
    return take_turns(batches)


def generate(mode, unused_pool):
    engine = build_engine(model, mode=mode, gpu_kv_tokens=512, cpu_kv_tokens=512)
    for tensor in engine.executor.cache.pools[unused_pool].tensors.values():
        tensor.fill_(torch.nan)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [engine.add(model.tokenizer.encode(p), sampling) for p in PROMPTS]
    engine.run()
    return [r.output for r in requests]


# %% [markdown]
# In 16 bits (on a GPU) the last digit of a sum may tip a close choice, so there it is only shown.

# %%
runs = {"gpu-only": generate("gpu-only", "cpu"), "symmetric": generate("symmetric", "gpu")}
with patch.object(pipeline, "alternate", mine):
    runs["symmetric, by take_turns"] = generate("symmetric", "gpu")
same = [run == runs["gpu-only"] for run in runs.values()]
assert all(same) or model.dtype != torch.float32
print(dict(zip(runs, same)), "\n" + model.tokenizer.decode(runs["symmetric"][1]))

# %% [markdown]
# ## 3. A second core is a stream
#
# `yield` gives the *order*. For overlap the attention must also run while Python goes on. On a GPU the package puts it
# on a CUDA stream (`streams.Cuda`): work that is enqueued runs in order, beside the caller, and an event says when it
# is done. Without a GPU `streams.Host` runs everything on the spot, and nothing overlaps.
#
# But a stream is nothing mysterious. A queue with one worker thread is one: `submit` enqueues, the future's `result`
# waits. The kernel lets go of Python's lock while it runs, so with two cores this overlaps for real:


# %%
class SecondCore(Host):
    """CPU attention in order on a thread of its own."""

    def __init__(self, timeline, decode):
        super().__init__(timeline, decode)
        self.stream = ThreadPoolExecutor(1)

    def cpu_attention(self, *args):
        now = super().cpu_attention

        @torch.inference_mode()
        def work():
            return now(*args)()

        return self.stream.submit(work).result


# %% [markdown]
# The load: eight decodes of 8,000 tokens each, so that attention is the longer part. The time goes into reading blocks
# of KV, whatever is in them; so take random numbers, in blocks drawn at random from a pool of an eighth of that size.
# No prompt has to be computed first, and the memory of a laptop will do.

# %%
COUNT, TOKENS, BLOCKS = 8, 8000, 500
settings = EngineConfig("simple", gpu_kv_tokens=16, cpu_kv_tokens=BLOCKS * 16, cpu_threads=0 if card else 1)
timeline = Timeline()
executor = pipeline.Pipeline(model, settings, timeline)
pool = executor.cache.pools["cpu"]
pool.k.normal_(), pool.v.normal_()
tables = torch.randint(BLOCKS, (COUNT, TOKENS // 16)).tolist()

# %% [markdown]
# Simple offloading has all of them in one batch. The symmetric pipeline has two, and `halves`, the package's, deals
# them out.

# %%
requests = [Request(i, (7,) * TOKENS, device="cpu", block_table=tables[i]) for i in range(COUNT)]
decodes = tuple(Work(r, TOKENS - 1, 1) for r in requests)
PLANS = {
    "simple": IterationPlan("simple", (SubBatch(cpu_decodes=decodes),)),
    "symmetric": IterationPlan("symmetric", tuple(SubBatch(cpu_decodes=half) for half in halves(decodes))),
}

# %% [markdown]
# And, without a GPU, the second core:

# %%
if not card:
    executor.streams = SecondCore(timeline, executor.cpu_decode)
    sys.setswitchinterval(1e-4)  # Python's lock changes hands every 5 ms, if not told otherwise: as long as a layer

# %% [markdown]
# An iteration is the same few stages, layer after layer. Cut `count` layers out of it: from the start of batch-0's `pre`
# to the start of its `pre` so many layers later.


# %%
def length_s(t):
    return t.span_s[1] - t.span_s[0]


# %% [markdown]
# Between those two moments, events are clipped:


# %%
def cut(t, first, count):
    starts = {e.args["layer"]: e.start_s for e in t.events if (e.name, e.args.get("batch")) == ("pre", 0)}
    start_s, end_s = starts[first], starts[first + count]
    part = Timeline()
    for e in t.between(start_s, end_s).events:
        part.record(e.lane, e.name, max(e.start_s, start_s), min(e.end_s, end_s), **e.args)
    return part


# %% [markdown]
# Run a few iterations, and keep the quickest two layers in a row: a busy machine slows some of them.


# %%
def quickest(plan, rounds=5):
    parts = []
    for _ in range(rounds):
        timeline.events.clear()
        executor.run(plan)
        parts += [cut(timeline, first, 2) for first in range(1, model.config.num_layers - 2)]
    return min(parts, key=length_s)


measured = {name: quickest(plan) for name, plan in PLANS.items()}

# %% [markdown]
# For each lane its idle share, the *bubbles*; and how much of the CPU's attention is *hidden*, that is, runs while the
# GPU runs too. Before you look: with two halves in turns, are both sides busy all the time?


# %%
def report(timelines, layers):
    for name, t in timelines.items():
        hidden = t.overlap_s("gpu", "cpu") / t.busy_s("cpu")
        idle = [f"{lane.upper()} idle {1 - t.busy_fraction(lane):4.0%}" for lane in ("gpu", "cpu")]
        print(
            f"{name:10} {1e3 * length_s(t) / layers:5.2f} ms a layer, {', '.join(idle)}, attention hidden {hidden:4.0%}"
        )


# %% [markdown]
# The two pipelines on this machine:

# %%
report(measured, 2)
if hasattr(os, "getloadavg"):
    print(f"programs that wanted a core just now: {os.getloadavg()[0]:.1f}, cores: {machine.usable_cores()}")

# %% [markdown]
# On your machine that depends on what else it does. A pipeline over two cores needs both of them free: where other
# programs want them too, the halves mostly wait, and simple offloading, which never needs two at once, looks better
# than it is. (Nor can two cores that share one memory read twice as fast.) So here is the same on a machine of two real
# sides.
#
# ## 4. Figure 4, recorded
#
# 8 multiprocessors of an H200, close to an A10G in bandwidth, the shape of Llama-3.1-8B, and 44 decodes of 1,100
# tokens. `benchmarks/pipelines.py` ran each pipeline over this load, and kept the timeline of the median iteration.

# %%
DATA = next(p for p in (Path("data"), Path("../data"), Path("neo-lite/data")) if p.is_dir())
saved = json.loads((DATA / "recorded/h200_8sm_pipelines.json").read_text())
part = saved["stamp"]["gpu"]
about = f"{part['partition_sms']} SMs of an {part['name']}, {saved['threads']} host threads"

# %% [markdown]
# Its events make timelines like any other:


# %%
def recorded(mode):
    t = Timeline()
    for lane, name, start_s, end_s, layer, batch in saved["cases"][mode]["events"]:
        t.record(lane, name, start_s, end_s, layer=layer, batch=batch)
    return t


# %% [markdown]
# The same report, over the whole iteration of 32 layers:

# %%
theirs = {mode: recorded(mode) for mode in ("simple", "symmetric")}
print(
    f"recorded: {saved['model']}, {saved['cases']['simple']['requests']} decodes of {saved['seq_len']:,} tokens; {about}"
)
report(theirs, 32)

# %% [markdown]
# Zoom in on two or three layers of each. Batch-1 is hatched, and beside each lane stands its idle share.


# %%
def draw(axes, timelines, shares, where, layers):
    for ax, (name, part) in zip(axes, timelines.items()):
        part.plot(ax, legend=False)
        idle = [f"{lane} ({1 - shares[name].busy_fraction(lane):.0%} idle)" for lane in part.lanes()]
        ax.set_yticks(range(len(idle)), idle, size=8)
        ax.set_title(f"{name}: {where}", size=9, loc="left")
        ax.set(xlim=(0, 1.01e3 * max(map(length_s, timelines.values()))), xlabel="")
        ax.grid(axis="y", alpha=0)
    ax.set_xlabel(f"ms ({layers} layers)")


# %% [markdown]
# Measured here above, recorded there below, each pair on one scale:

# %%
fig, axes = plt.subplots(4, 1, figsize=(8.8, 8.6), height_ratios=[2, 2, 3, 3])
draw(axes[:2], measured, measured, f"measured, {COUNT} decodes of {TOKENS:,} tokens; {here}", 2)
zoomed, load = {name: cut(t, 10, 3) for name, t in theirs.items()}, saved["cases"]["simple"]["requests"]
draw(axes[2:], zoomed, theirs, f"recorded, {load} decodes of {saved['seq_len']:,} tokens; {about}", 3)
entries = {text: bar for ax in axes[::-1] for bar, text in reversed([*zip(*ax.get_legend_handles_labels())])}
fig.legend(
    entries.values(),
    entries.keys(),
    loc="upper center",
    ncols=6,
    fontsize=8,
    title="batch-1: hatched",
    title_fontsize=8,
)
fig.tight_layout(rect=(0, 0.02, 1, 0.94), h_pad=0.6)
_ = plots.save_figure(fig, "06_two_pipelines", "measured + recorded")

# %% [markdown]
# This is the paper's figure 4. In simple offloading a bar on the `gpu` lane stands over a gap on the `cpu` lane, and
# the other way round. In the symmetric pipeline the solid bars of batch-0 on one lane stand over the hatched ones of
# batch-1 on the other.
#
# ## 5. What a layer takes
#
# Let `linear[i]` be the GPU's time for half i in one layer, `attention[i]` the CPU's. Each lane does one thing at a
# time; a half's attention follows its own projections, and its next projections follow its attention. That is a
# simulation of six lines:


# %%
def layer_s(linear, attention, layers=400):
    gpu = cpu = 0.0
    ready, ends = [0.0] * len(linear), []
    for _ in range(layers):
        for i in range(len(linear)):
            gpu = max(gpu, ready[i]) + linear[i]
            ready[i] = cpu = max(cpu, gpu) + attention[i]
        ends.append(cpu)
    return (ends[-1] - ends[layers // 2 - 1]) / (layers - layers // 2)  # once the start is over


# %% [markdown]
# Round numbers first. Linear stages of 2 ms, for any number of requests, since what takes time is reading the weights;
# attention of 6 ms for all requests, or 3 for each half.

# %%
print(f"one batch: {layer_s([2], [6]):.1f} ms; two halves: {layer_s([2, 2], [3, 3]):.1f} ms a layer")

# %% [markdown]
# 8 ms became 6: the attention, all of it, and nothing else. The longer side decides. For two equal halves with times l
# and c
#
# $$T = \max(2l,\ 2c)$$
#
# since the GPU has two linear stages to do in each layer, the CPU two attentions, and neither waits in between as long
# as the other side has enough to do. Now shorten the attention:

# %%
for attention in (6, 3, 2, 1):
    one_batch, two = layer_s([2], [attention]), layer_s([2, 2], [attention / 2] * 2)
    assert two == max(2 * 2, attention)
    print(f"attention {attention} ms: one batch {one_batch:.1f} ms, two halves {two:.1f} ms a layer")

# %% [markdown]
# At 2 ms nothing is gained, and at 1 ms two halves are *slower*: they read all weights twice. A pipeline pays only if
# the attention takes longer than the linear stages. Does the formula hold for the recording? Take the mean times of its
# stages out of its own events:


# %%
def stage_s(t, lane, batch):
    layers = {e.args["layer"] for e in t.events if e.args.get("layer") is not None}
    skip = ("head", "embed")
    return sum(
        e.duration_s for e in t.events if e.lane == lane and e.args["batch"] == batch and e.name not in skip
    ) / len(layers)


# %% [markdown]
# Both lanes, both halves:

# %%
linear, attention = ([stage_s(theirs["symmetric"], lane, i) for i in (0, 1)] for lane in ("gpu", "cpu"))
bound, took = max(sum(linear), sum(attention)), length_s(theirs["symmetric"]) / 32
print(f"linear {[round(1e3 * s, 2) for s in linear]} ms, attention {[round(1e3 * s, 2) for s in attention]} ms a layer")
print(f"max(l0 + l1, c0 + c1) = {1e3 * bound:.2f} ms; the iteration took {1e3 * took:.2f} ms a layer, all in all")

# %% [markdown]
# Nearly: the rest is what the formula leaves out. Between the two attentions lie copies and the start of a call; embedding
# and head come once, and here count for each layer with a 32nd part; and recording itself costs time.
#
# ## 6. What is left on the table
#
# **The prefills are alone.** A prompt has no attention for the CPU, and FastDecode runs it on its own. Watch an engine
# serve six requests of different lengths, two of which come later, and look at the CPU in each iteration:

# %%
timeline = Timeline()
engine = build_engine(model, mode="symmetric", timeline=timeline, gpu_kv_tokens=2048, cpu_kv_tokens=2048)
short = SamplingParams(max_tokens=6, ignore_eos=True)
served = [engine.add([7 + i] * length, short) for i, length in enumerate((100, 60, 30, 15))]

# %% [markdown]
# One iteration of it: its kind, its length, and how long the CPU computed.


# %%
def step():
    timeline.events.clear()
    engine.step()
    kinds = {e.name for e in timeline.events}
    return "prefill" if "prefill_attn" in kinds else "decode", length_s(timeline), timeline.busy_s("cpu")


# %% [markdown]
# The two latecomers arrive in the middle:

# %%
steps = [step() for _ in range(3)]
served += [engine.add([90 + i] * 70, short) for i in range(2)]
while engine.scheduler.unfinished:
    free_kv = engine.scheduler.blocks.free("gpu") / engine.scheduler.blocks.total["gpu"]
    steps.append(step())

# %% [markdown]
# Summed up by kind:

# %%
for kind in ("prefill", "decode"):
    mine = [s for s in steps if s[0] == kind]
    print(f"{len(mine)} iterations of kind {kind}: {sum(s[1] for s in mine):.2f} s, of which the CPU computes "
          f"{sum(s[2] for s in mine):.2f} s")  # fmt: skip

# %% [markdown]
# In a prefill the CPU does nothing at all, and meanwhile no running request gets a token.
#
# **The GPU's KV memory is empty.** All KV is on the host, so the memory that was worth so much in notebook 03 holds
# nothing:

# %%
print(f"{free_kv:.0%} of the GPU's KV blocks were free while {len(served)} requests decoded")
assert free_kv == 1

# %% [markdown]
# **The CPU is the bottleneck.** Every decode's attention is there. In the recording:

# %%
t = theirs["symmetric"]
gpu, cpu = (t.busy_s(lane) for lane in ("gpu", "cpu"))
print(f"GPU {1e3 * gpu:.1f} ms of work, CPU {1e3 * cpu:.1f} ms, the iteration {1e3 * length_s(t):.1f} ms")

# %% [markdown]
# And the halves are equal only as long as somebody can make them so. `halves` deals out by length; but one long request
# cannot be cut. The same 8,000 tokens, a millisecond of attention for a thousand:

# %%
for contexts in ([1000] * 8, [7000, 500, 500]):
    dealt = halves([Work(Request(i, (7,) * n), n - 1, 1) for i, n in enumerate(contexts)])
    tokens = [sum(w.seq_len for w in half) for half in dealt]
    print(f"{contexts}: halves of {tokens} tokens,", end=" ")
    print(f"{layer_s([2, 2], [n / 1000 for n in tokens]):.1f} ms a layer")

# %% [markdown]
# ## Summary
# - A generator that stops once a layer, and a driver that resumes each in turn: that is a pipeline, in ten lines.
# - A stream is a queue that somebody works off in order; an event says when a piece is done.
# - Two equal halves take max(2l, 2c) a layer. The weights are read twice, so it pays only if attention is the longer part.
# - Prefills leave the CPU idle, the GPU's KV memory stays empty, and the CPU has all of the decode attention.
#
# All three have one cure: make the two batches *different*. The next notebook does.
#
# ## Exercises
#
# **Exercise 1.** Write `period(l0, l1, c0, c1)`: what a layer takes with *unequal* halves, as one `max` of four sums.
# Which four pairs of stages can never overlap?


# %% tags=["exercise"]
def period(l0, l1, c0, c1): ...  # your answer


# %% [markdown]
# The check compares with the simulation of section 5, on random times.


# %% tags=["check"]
@exercise.check("1: unequal halves")
def period_solved():
    assert period(2, 2, 3, 3) is not None, "Return a number."
    assert period(2, 2, 3, 3) == 6, "The CPU has 3 + 3 to do in each layer."
    assert period(2, 2, 9, 1) == 11, "A half's own chain: its projections, then its attention."
    for _ in range(50):
        l0, l1, c0, c1 = (rng.uniform(0.1, 5) for _ in range(4))
        assert abs(period(l0, l1, c0, c1) - layer_s([l0, l1], [c0, c1])) < 1e-6, (
            f"Try {l0:.1f} {l1:.1f} {c0:.1f} {c1:.1f}"
        )


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def period(l0, l1, c0, c1):
#     return max(l0 + l1, c0 + c1, l0 + c0, l1 + c1)
# ```
#
# The GPU's work, the CPU's work, and each half's own chain.
#
# </details>

# %% [markdown]
# **Exercise 2.** When does it pay? Linear stages take `linear` for any number of requests, the attention of all requests
# takes `attention`. Write `gain(linear, attention)`: how many times as fast two equal halves are as one batch.


# %% tags=["exercise"]
def gain(linear, attention): ...  # your answer


# %% [markdown]
# The check asks at both ends.


# %% tags=["check"]
@exercise.check("2: when two halves pay")
def gain_solved():
    assert gain(2, 6) is not None, "Return a number."
    assert abs(gain(2, 6) - 8 / 6) < 1e-9, "8 ms became 6."
    assert gain(2, 2) == 1, "Here nothing is won."
    assert abs(gain(2, 1) - 3 / 4) < 1e-9, "Below 1: the weights are read twice."
    assert abs(gain(1, 2) - 1.5) < 1e-9, "The most that can be won is half as much again. With which times?"


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def gain(linear, attention):
#     return (linear + attention) / max(2 * linear, attention)
# ```
#
# Never more than 1.5, where attention takes twice as long as the linear stages.
#
# </details>

# %% [markdown]
# **Exercise 3.** Write `deal(lengths)`: two lists of request lengths with about as many tokens each. Take the longest
# first, and give it to whoever has fewer tokens so far.


# %% tags=["exercise"]
def deal(lengths): ...  # your answer


# %% [markdown]
# The check compares with the package's `halves`.


# %% tags=["check"]
@exercise.check("3: equal halves")
def deal_solved():
    assert deal([3, 1]) is not None, "Return two lists."
    for _ in range(50):
        lengths = [rng.randrange(1, 50) for _ in range(rng.randrange(2, 12))]
        theirs = halves([Work(Request(i, (7,) * n), n - 1, 1) for i, n in enumerate(lengths)])
        wanted = [[w.seq_len for w in half] for half in theirs]
        assert [list(half) for half in deal(lengths)] == wanted, f"{lengths}: {wanted}"


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def deal(lengths):
#     first, second = [], []
#     for length in sorted(lengths, reverse=True):
#         (second if sum(second) < sum(first) else first).append(length)
#     return first, second
# ```
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | symmetric pipeline's timeline | figure 4, a sketch | two real iterations | measured, recorded: `06_two_pipelines` |
# | prefills | run on the GPU alone, CPU idle | an engine's iterations | measured |
# | the CPU becomes the bottleneck | stated | its busy time against the GPU's | recorded |
# | equal halves | hardly possible with real lengths | one long request | simulated, round numbers |
# | gain over simple offloading | not given | printed, at most 1.5 by the arithmetic | measured, recorded |
# | tokens | unchanged | identical, NaN in the other pool | measured |
