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
# # 07 · Asymmetric pipelining: two batches that differ on purpose
#
# Two equal halves left three things on the table (notebook 06): prefills run alone, the GPU's KV memory is empty, and
# the CPU has all of the decode attention. NEO's answer is one: make the two sub-batches *different*.
# - **batch-0** is long on the GPU: all prefills, all decodes whose KV is on the GPU, and a few of the CPU's decodes.
# - **batch-1** is long on the CPU: the rest of the CPU's decodes, with next to nothing to do on the GPU.
#
# The long stage of each hides behind the long stage of the other. That is the paper's figure 5.
#
# You will see
# - the rule that fills the batches, and the same tokens as ever, with requests that change sides midway;
# - figures 3, 4 and 5 side by side on the same load, measured on your machine and recorded on a real GPU;
# - what a layer takes without barriers, against the paper's estimate, every term measured alone;
# - how a prompt's KV leaves layer by layer, a race that buffers can have, and what launching costs.
#
# **Time** about a minute on two cores. **Memory** about 2 GB. **Needs** nothing but the package. Without a GPU one core
# plays the GPU and another the CPU; recordings of a real GPU stand beside it.

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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from neo_lite import EngineConfig, SamplingParams, Timeline, build_engine, exercise, load_model, pipeline, plots
from neo_lite.config import MODELS
from neo_lite.cost_model import Profile, Stages
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.scheduler import halves
from neo_lite.streams import Host, finished

# %% [markdown]
# The model, and one line about this machine that the figures will carry.

# %%
plots.use_style()
model, card, llama = load_model("smollm2"), machine.gpu(), MODELS["llama-3.1-8b"]
if not card:
    torch.set_num_threads(1)
here = card["name"] if card else f"{machine.cpu_name()}: one core in the GPU's place, one as the CPU"
print(f"{model.config.name} on {model.device} in {model.dtype}; {here}")

# %% [markdown]
# ## 1. A fixed rule
#
# Who goes where? The GPU's KV memory is the faster one, so fill it first. A new request's KV goes to the GPU as long as
# its blocks fit there (and one more for each request that grows there), and from the first one that does not fit,
# to the CPU:


# %%
def homes(prompts, gpu_blocks, block_size=16):
    places, free = [], gpu_blocks
    for tokens in prompts:
        needed = -(-tokens // block_size)
        on_gpu = needed <= free and "cpu" not in places
        places.append("gpu" if on_gpu else "cpu")
        free -= needed + 1 if on_gpu else 0
    return places


# %% [markdown]
# The rest follows. GPU decodes and prefills are batch-0. CPU decodes are batch-1, as many as batch-0's linear stage can
# hide, `Tca1 <= Tl0`; what is beyond goes to batch-0, where `Tca0 <= Tl1 + Tga0` must hold, or waits one iteration. (`Tga0`:
# all attention of batch-0 on the GPU, that of its prefills, `Tpref0`, included.)
#
# The package has this rule as mode `asymmetric`. It needs to know stage times. Give it a machine of round numbers: a
# linear stage takes at least 1 ms, and a CPU decode far less.

# %%
COSTS = Profile(
    num_layers=model.config.num_layers, linear=[(1, 1e-3), (64, 8e-3)], prefill_attn=[(1, 1e-4)],
    gpu_attn=[(1, 1e-4), (64, 1e-3)], cpu_attn=[(1, 5e-5), (64, 4e-4)], head=[(1, 1e-4)],
)  # fmt: skip


def engine_of(mode, gpu_kv_tokens, **changes):
    pools = dict(gpu_kv_tokens=gpu_kv_tokens, cpu_kv_tokens=4096)
    return build_engine(model, mode=mode, costs=COSTS, timeline=Timeline(), **pools, **changes)


def plan_of(prompts, gpu_kv_tokens):
    engine = engine_of("asymmetric", gpu_kv_tokens)
    for tokens in prompts:
        engine.add([7] * tokens, SamplingParams(max_tokens=4))
    return engine.scheduler.plan(0.0)


# %% [markdown]
# Does the toy put every request where the package puts it? On a hundred random queues:

# %%
rng = random.Random(0)
for _ in range(100):
    prompts, blocks = [rng.randrange(1, 100) for _ in range(rng.randrange(1, 9))], rng.randrange(8, 30)
    placed = [w.request.device for w in plan_of(prompts, blocks * 16).batches[0].prefills]
    assert placed == homes(prompts, blocks), (prompts, blocks)
print(f"the same places a hundred times; the last: {placed}")

# %% [markdown]
# ## 2. The same tokens, also on the move
#
# Eight prompts, answered three times. First on a GPU pool with room for all. Then asymmetric in a small GPU pool, where
# some live on the CPU from the start. As answers grow, the GPU's pool overflows and requests are *swapped out*; as
# others end, it empties and requests are *swapped in*. Both pools start full of NaN, so nobody can read what was not
# written.

# %%
PROMPTS = ["Gravity is", "The three primary colors are", "Water boils at", "Once upon a time there was", "In 1969",
           "A list of prime numbers: 2, 3, 5, 7", "The capital of France is", "Two plus two is"]  # fmt: skip

# %% [markdown]
# One run. The answers have different lengths, so that the pool fills and empties.


# %%
def generate(mode, gpu_kv_tokens):
    engine = engine_of(mode, gpu_kv_tokens, block_size=4)
    for pool in engine.executor.cache.pools.values():
        pool.k.fill_(torch.nan), pool.v.fill_(torch.nan)
    lengths = [8 + 3 * i for i in range(len(PROMPTS))]
    encoded = [model.tokenizer.encode(p) for p in PROMPTS]
    requests = [engine.add(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in zip(encoded, lengths)]
    engine.run()
    return [r.output for r in requests], requests, engine.timeline


# %% [markdown]
# The tokens, and who moved:

# %%
expected, _, _ = generate("gpu-only", 512)
outputs, requests, served = generate("asymmetric", 84)
assert outputs == expected or model.dtype != torch.float32
moves = {lane: {i for e in served.events if (e.lane, e.name) == (lane, "swap") for i in e.args["requests"]}
         for lane in ("d2h", "h2d")}  # fmt: skip
print(f"the same tokens: {outputs == expected}; swapped out {sorted(moves['d2h'])}, swapped in {sorted(moves['h2d'])}")
print(f"there and back: {sorted(moves['d2h'] & moves['h2d'])}\n{model.tokenizer.decode(outputs[1])}")

# %% [markdown]
# Which backend served a request tells where its KV was. Over the run:

# %%
for name in ("gpu_attn", "cpu_attn"):
    events = [e for e in served.events if e.name == name and e.args["layer"] == 0]
    print(f"{name}: {sum(len(e.args['requests']) for e in events)} decodes in {len(events)} sub-batches,", end=" ")
    print(f"by {events[0].args['backend']}")

# %% [markdown]
# ## 3. Three pipelines on one load
#
# Now time. As in notebook 06, a thread with a queue is a stream, so that on two cores the CPU's attention overlaps for
# real. (On a GPU the package does it with CUDA streams.)


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
# The load is notebook 06's, eight decodes of 8,000 tokens, with KV of random numbers; and now there is a pool on the
# GPU too. Without a GPU the same kernel serves both sides, each on its own core.

# %%
COUNT, TOKENS, BLOCKS, PROMPT = 8, 8000, 500, 32
pools = dict(gpu_kv_tokens=BLOCKS * 16, cpu_kv_tokens=BLOCKS * 16)
timeline = Timeline()
executor = pipeline.Pipeline(model, EngineConfig("simple", **pools, cpu_threads=0 if card else 1), timeline)

# %% [markdown]
# Random numbers in both pools; and, without a GPU, the second core:

# %%
for pool in executor.cache.pools.values():
    pool.k.normal_(), pool.v.normal_()
if not card:
    executor.streams, executor.gpu_decode = SecondCore(timeline, executor.cpu_decode), executor.cpu_decode
    sys.setswitchinterval(1e-4)

# %% [markdown]
# Requests in both places. A decode is the work on a request's last token; a prefill is the work on all of them.


# %%
def request(number, device, tokens=TOKENS):
    return Request(number, (7,) * tokens, device=device, block_table=torch.randint(BLOCKS, (tokens // 16,)).tolist())


on_cpu = tuple(Work(request(i, "cpu"), TOKENS - 1, 1) for i in range(COUNT))
on_gpu = tuple(Work(request(i, "gpu"), TOKENS - 1, 1) for i in range(COUNT // 2))
prompt = (Work(request(COUNT, "cpu", PROMPT), 0, PROMPT),)

# %% [markdown]
# Simple offloading: all on the CPU, in one batch. Symmetric: two equal halves. Asymmetric: half of the requests have
# their KV on the GPU, the others are batch-1. And once more with a prompt in batch-0 and *all eight* CPU decodes in
# batch-1: twelve decodes and a prefill.

# %%
CONTENT = {
    "simple": [SubBatch(cpu_decodes=on_cpu)],
    "symmetric": [SubBatch(cpu_decodes=half) for half in halves(on_cpu)],
    "asymmetric": [SubBatch((), on_gpu), SubBatch(cpu_decodes=on_cpu[: COUNT // 2])],
    "asymmetric, with a prefill": [SubBatch(prompt, on_gpu), SubBatch(cpu_decodes=on_cpu)],
}


# %% [markdown]
# As in notebook 06: layers cut out of an iteration, from one `pre` of batch-0 to a later one; and of a few iterations the
# quickest two in a row, since a busy machine slows some of them.


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
# The four, one after the other:


# %%
def quickest(name, rounds=3):
    parts = []
    for _ in range(rounds):
        timeline.events.clear()
        executor.run(IterationPlan(name.split(",")[0], tuple(CONTENT[name])))
        parts += [cut(timeline, first, 2) for first in range(1, model.config.num_layers - 2)]
    return min(parts, key=length_s)


measured = {name: quickest(name) for name in CONTENT}

# %% [markdown]
# The table that this notebook is about. *Bubbles* are a lane's idle share of the iteration; *hidden* is the share of the
# CPU's attention that runs while the GPU runs too. Predict: which pipeline has the smallest bubbles on the GPU?


# %%
def table(timelines, layers):
    print(f"{'':27} ms a layer   bubbles GPU   CPU   hidden   both busy")
    for name, t in timelines.items():
        both, idle = t.overlap_s("gpu", "cpu"), [1 - t.busy_fraction(lane) for lane in ("gpu", "cpu")]
        print(f"{name:27} {1e3 * length_s(t) / layers:10.2f} {idle[0]:13.0%} {idle[1]:5.0%}", end=" ")
        print(f"{both / t.busy_s('cpu'):8.0%} {both / length_s(t):11.0%}")


# %% [markdown]
# The four on this machine:

# %%
table(measured, 2)
if hasattr(os, "getloadavg"):
    print(f"programs that wanted a core just now: {os.getloadavg()[0]:.1f}, cores: {machine.usable_cores()}")

# %% [markdown]
# On your machine that depends on what else it does: a pipeline over two cores needs both of them free. And two cores
# share one memory: the more one reads, the less the other gets. Where a core plays the GPU, attention over the "GPU's" KV
# is no faster than the CPU's. So the asymmetric pipeline fills the GPU's lane, which had the linear stages to do already,
# and need not be quicker here than the symmetric one. (The last line takes longer since it does more.)
#
# ## 4. Figures 3, 4 and 5, recorded
#
# The same four on 8 multiprocessors of an H200, with the shape of Llama-3.1-8B: `benchmarks/pipelines.py`.

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
# What is in each sub-batch, and the same table:

# %%
theirs = {mode: recorded(mode) for mode in saved["cases"]}
print(f"recorded: {saved['model']}, contexts of {saved['seq_len']:,} tokens; {about}")
for mode, values in saved["cases"].items():
    told = [f"{p} prefills, {g} GPU and {c} CPU decodes" for _, p, g, c in values["batches"]]
    print(f"{mode:27} {' | '.join(told)}")
table(theirs, 32)

# %% [markdown]
# Recording a timeline costs a few milliseconds (section 8). What the iterations take as always, and the tokens that they
# make a second, one for each request:

# %%
took_s, sizes = ({mode: values[key] for mode, values in saved["cases"].items()} for key in ("iteration_s", "requests"))
for mode, seconds in took_s.items():
    print(f"{mode:27} {sizes[mode]} tokens in {1e3 * seconds:5.1f} ms: {sizes[mode] / seconds:.0f} tokens/s")

# %% [markdown]
# The first three serve the same 44 requests. In the fourth, batch-0 has a prompt of 512 tokens as well, and there are
# twice as many CPU decodes. What would the symmetric pipeline take for its prompt? An iteration of its own, with the
# CPU idle. The stages of such a prefill were measured alone on the same machine:

# %%
cases = json.loads((DATA / "recorded/h200_8sm_iteration_bound.json").read_text())["cases"]
alone = cases["512 prefill tokens, 60 CPU"]["terms_s"]

# %% [markdown]
# Two iterations against one:

# %%
apart_s = took_s["symmetric"] + alone["l0"] + alone["pref0"] + cases["GPU only: 22"]["terms_s"]["head"]
mixed = took_s["asymmetric, with a prefill"]
print(f"44 decodes, then a prefill alone: 45 tokens in {1e3 * apart_s:.0f} ms, {45 / apart_s:.0f} tokens/s")
print(f"a prefill that hides 44 CPU decodes, 22 GPU decodes: 67 in {1e3 * mixed:.0f} ms, {67 / mixed:.0f} tokens/s")

# %% [markdown]
# Is that fair? The fourth timeline is from another day than the stages alone, and from an earlier state of the code:

# %%
prompts = [e for e in theirs["asymmetric, with a prefill"].events if e.name in ("pre", "post") and e.args["batch"] == 0]
print(
    f"linear stages of batch-0: {1e3 * sum(e.duration_s for e in prompts):.0f} ms there, {1e3 * alone['l0']:.0f} alone"
)

# %% [markdown]
# So it is unfair to NEO: its iteration has the slower linear stages. Even so it makes more tokens a second.
#
# As pictures: some layers of each, batch-1 hatched. The first three are on one scale, the last has its own.


# %%
FIGURES = dict(zip(CONTENT, ("figure 3", "figure 4", "figure 5, decodes alone", "figure 5; its own time scale")))


def lanes(ax, part, whole, title, end_s):
    part.plot(ax, legend=False)
    idle = [f"{lane} ({1 - whole.busy_fraction(lane):.0%} idle)" for lane in part.lanes()]
    ax.set_yticks(range(len(idle)), idle, size=8)
    ax.set_title(title, size=9, loc="left")
    ax.set(xlim=(0, 1.01e3 * end_s), xlabel="")
    ax.grid(axis="y", alpha=0)


# %% [markdown]
# Four of those beneath each other:


# %%
def draw(parts, wholes, layers, name, source, where, height):
    fig, axes = plt.subplots(4, 1, figsize=(8.8, height))
    scale = max(length_s(parts[mode]) for mode in [*CONTENT][:3])
    for ax, (mode, part) in zip(axes, parts.items()):
        lanes(
            ax, part, wholes[mode], f"{mode} (the paper's {FIGURES[mode]})", scale if ax != axes[3] else length_s(part)
        )
    axes[2].set_xlabel(f"ms ({layers} layers)"), axes[3].set_xlabel(f"ms ({layers} layers)")
    entries = {text: bar for ax in axes[::-1] for bar, text in reversed([*zip(*ax.get_legend_handles_labels())])}
    about = dict(ncols=8, fontsize=8, title="batch-1: hatched", title_fontsize=8)
    fig.legend(entries.values(), entries.keys(), loc="upper center", **about)
    fig.tight_layout(rect=(0, 0.02, 1, 0.94), h_pad=0.5)
    plots.save_figure(fig, name, source, where)


# %% [markdown]
# First the real GPU:

# %%
draw({mode: cut(t, 10, 3) for mode, t in theirs.items()}, theirs, 3, "07_three_pipelines", "recorded", about, 9.2)

# %% [markdown]
# Then this machine:

# %%
draw(measured, measured, 2, "07_here", "measured", here, 7.2)

# %% [markdown]
# In figure 3's rows, bars stand over gaps. In figure 4's, solid stands over hatched, and in the recording the CPU's lane is
# the long one. In figure 5's, the CPU's hatched bar stands beneath solid ones, batch-0's work on the GPU, and the GPU's lane has
# hardly a gap left; with a prefill in batch-0 there is room beneath it for many more CPU decodes.
#
# ## 5. What a layer takes, without barriers
#
# The paper estimates a layer as two stages with a barrier after each:
#
# $$T = \max(T_{l0},\ T_{ca1}) + \max(T_{l1} + T_{ga0} + T_{pref0},\ T_{ca0})$$
#
# A stream waits only where data demand it. On the GPU, in order: batch-0's linear stage, its attention, batch-1's
# linear stage. On the CPU: batch-1's attention, batch-0's. Nothing stops batch-1's attention from running on while the
# GPU does batch-0's attention. As a simulation, each line one dependency:


# %%
def layer_time(l0=0.0, pref0=0.0, ga0=0.0, ca0=0.0, l1=0.0, ca1=0.0, layers=400):
    gpu = cpu = attended0 = attended1 = 0.0
    ends = []
    for _ in range(layers):
        gpu = max(gpu, attended0) + l0  # batch-0 needs its own CPU attention
        cpu = attended0 = max(cpu, gpu) + ca0 if ca0 else gpu
        gpu += pref0 + ga0
        gpu = max(gpu, attended1) + l1
        cpu = attended1 = max(cpu, gpu) + ca1 if ca1 else gpu
        ends.append(gpu)
    return (ends[-1] - ends[layers // 2 - 1]) / (layers - layers // 2)


# %% [markdown]
# (Here batch-1's attention of one layer runs beneath batch-0's next one.) Its result in closed form is a maximum over
# what cannot happen at once: all GPU work; all CPU work; each batch's own chain.
#
# $$T = \max(T_{l0} + T_{pref0} + T_{ga0} + T_{l1},\ \ T_{ca1} + T_{l1},\ \ T_{ca0} + T_{ca1})$$
#
# plus `Tca0 + Tl0`, which the rule keeps below the first. The cost model's `Stages.layer` is this formula. Draw stage
# times at random, such that `Tca0 <= Tl1 + Tga0 + Tpref0` holds, and compare all three:

# %%
worst = 1.0
for _ in range(300):
    times = {name: rng.uniform(0.1, 4) for name in ("l0", "pref0", "ga0", "l1", "ca1")}
    times["ca0"] = rng.uniform(0, times["l1"] + times["ga0"] + times["pref0"])
    stages, took = Stages(**times), layer_time(**times)
    assert abs(took - stages.layer) < 1e-9 and took <= stages.paper_layer + 1e-9, times
    worst = max(worst, stages.paper_layer / took)
print(f"the simulation takes exactly the maximum; the paper's estimate is up to {worst:.2f} times as much, never less")

# %% [markdown]
# So much for arithmetic. On the recorded machine every term was measured **alone**, interleaved with whole iterations,
# (`benchmarks/asymmetric_bound.py`). Sums over all layers, in ms:

# %%
two = {name: c for name, c in cases.items() if c["terms_s"]["l1"] > 1e-3}
print(f"{'':41}    Tl0  Tpref0   Tga0    Tl1   Tca0   Tca1 |  bound  paper  iteration")
for name, c in two.items():
    terms = {n: 1e3 * c["terms_s"][n] for n in ("l0", "pref0", "ga0", "l1", "ca0", "ca1")}
    times = [*terms.values(), *(1e3 * s for s in (c["bound_s"], c["paper_bound_s"], c["terms_s"]["iteration"]))]
    print(f"{name:41}{''.join(f'{t:7.1f}' for t in times[:6])} |{times[6]:7.1f}{times[7]:7.1f}{times[8]:9.1f}")

# %% [markdown]
# The bound is arithmetic over those terms. Check it, then draw. (An iteration has the head on top of its layers: the
# last projection, to the vocabulary, once for all requests.)

# %%
for c in two.values():
    t = c["terms_s"]
    ours = max(t["l0"] + t["pref0"] + t["ga0"] + t["l1"], t["ca1"] + t["l1"], t["ca0"] + t["ca1"])
    assert abs(ours - c["bound_s"]) < 1e-9

# %% [markdown]
# The figure: three bars for each mix.

# %%
fig, ax = plt.subplots(figsize=(8.4, 0.9 + 0.85 * len(two)))
BARS = (("the paper's two stages, with head", "paper_bound_s", plots.COLORS["idle"]),
        ("without barriers, with head", "bound_s", plots.COLORS["cpu"]), ("iteration", "", plots.COLORS["gpu"]))  # fmt: skip
for i, (label, key, color) in enumerate(BARS):
    values = [1e3 * (c[key] + c["terms_s"]["head"] if key else c["terms_s"]["iteration"]) for c in two.values()]
    bars = ax.barh([y + 0.26 * (i - 1) for y in range(len(two))], values, 0.24, color=color, label=label)
    ax.bar_label(bars, fmt=" %.0f", size=8)
ax.set_yticks(range(len(two)), [name.replace(": ", ":\n") for name in two], size=8)
ax.invert_yaxis()
ax.set_xlabel("ms an iteration")
ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, fontsize=8)
fig.tight_layout(rect=(0, 0.04, 1, 1))
_ = plots.save_figure(fig, "07_bound", "recorded", about)

# %% [markdown]
# How much longer than its bound an iteration is:

# %%
for name, c in two.items():
    whole = c["bound_s"] + c["terms_s"]["head"]
    print(
        f"{name:41} {c['iteration_over_bound']:.3f} x the bound, {c['terms_s']['iteration'] / whole:.3f} with the head in it"
    )

# %% [markdown]
# One detail of the order. If batch-0 has no CPU decodes, batch-1 goes *first* in each turn, so that the CPU starts before
# anything of batch-0, and batch-0 goes through a whole layer while it is at it. That is `order` in `pipeline.alternate`:


# %%
def toy(name):
    for layer in range(2):
        print(f"{name}.{layer}", end=" ")
        yield


for turn in ([0, 1], [1, 0]):
    finished(pipeline.alternate([toy("batch-0"), toy("batch-1")], turn))
    print("|", turn)

# %% [markdown]
# ## 6. KV leaves layer by layer
#
# A prompt whose KV belongs on the CPU is still prefilled on the GPU. Its keys and values are born layer by layer; so
# they can leave layer by layer, on a copy stream, beneath the next layer's work. Nothing waits until the end. In the
# recording those are the events named `store` on the lane `d2h`:

# %%
t = theirs["asymmetric, with a prefill"]
leaving = [e for e in t.events if (e.lane, e.name) == ("d2h", "store")]
alone = Timeline()
alone.events = leaving + [e for e in t.events if e.lane == "gpu"]
store_s, hidden_s = alone.busy_s("d2h"), alone.overlap_s("gpu", "d2h")

# %% [markdown]
# In bytes, and as a share of the iteration:

# %%
tokens = next(b[0] - b[2] - b[3] for b in saved["cases"]["asymmetric, with a prefill"]["batches"] if b[1])
print(
    f"{len(leaving)} copies for {tokens} tokens, {1e3 * store_s:.1f} ms in all, {hidden_s / store_s:.0%} beneath GPU work"
)
print(f"{tokens * llama.kv_bytes_per_token('float16') / 1e6:.0f} MB; at the iteration's end they would have cost "
      f"{store_s / length_s(t):.1%} on top")  # fmt: skip

# %% [markdown]
# Requests that change sides do the same in the other direction: layer 0 must have arrived before layer 0 computes, and
# layer 1 has until then.
#
# ## 7. A race
#
# q, k and v go to the CPU through *staging buffers*: pinned memory that every layer uses again. A copy into a buffer
# that somebody still reads is a race. Nothing crashes. Numbers of another batch are as plausible as the right ones, and
# most of the time the reader is early enough. So build it with care, and test it without mercy.
#
# Here is staging on your machine, with three dials. `late_s`: the CPU is slow to begin. `sets`: 2 gives each sub-batch
# its own buffers, 1 lets both share. `waits`: whether the output is waited for. And the test's trick: a buffer is
# *poisoned* with NaN as soon as it has served, so that whoever reads it too early or too late gets NaN, and NaN spreads.


# %%
class Staged(SecondCore):
    def dials(self, late_s=0.0, sets=2, waits=True):
        self.late_s, self.waits = late_s, waits
        c = model.config
        shapes = [(64, heads, c.head_dim) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads, c.num_heads)]
        self.buffers = [[torch.full(shape, torch.nan) for shape in shapes] for _ in range(sets)]
        return self

    def cpu_attention(self, batch, pool, layer, part, *qkv):
        mine = [b[: len(part.works)] for b in self.buffers[batch % len(self.buffers)]]
        for buffer, x in zip(mine, qkv):
            buffer.copy_(x)

        @torch.inference_mode()
        def work():
            time.sleep(self.late_s)
            mine[3].copy_(Host.cpu_attention(self, batch, pool, layer, part, *(b.clone() for b in mine[:3]))())
            for buffer in mine[:3]:
                buffer.fill_(torch.nan)

        done = self.stream.submit(work)
        return lambda: (done.result() if self.waits else None, mine[3].clone())[1]


# %% [markdown]
# (`mine` holds q, k, v and the output.) A short run under each setting of the dials, against the
# tokens that should come. On a GPU this toy does not apply, and the package's own test does the same to its own buffers.


# %%
def staged(**dials):
    engine = build_engine(model, mode="symmetric", gpu_kv_tokens=16, cpu_kv_tokens=512, cpu_threads=1)
    engine.executor.streams = Staged(engine.timeline, engine.executor.cpu_decode).dials(**dials)
    ends = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [engine.add(model.tokenizer.encode(p), ends) for p in PROMPTS[:4]]
    engine.run()
    return [r.output for r in requests]


# %% [markdown]
# Four settings:

# %%
for name, dials in {"two sets": {}, "two sets, a late CPU": dict(late_s=2e-3), "one set for both": dict(late_s=2e-3, sets=1),
                    "nobody waits": dict(late_s=2e-3, waits=False)}.items():  # fmt: skip
    if not card:
        right = sum(a == b[:4] for a, b in zip(staged(**dials), expected))
        print(f"{name:21} {right} of 4 requests right")
        assert right == 4 or "one" in name or "nobody" in name

# %% [markdown]
# Two sets are right however late the CPU is, and no lock is needed. Within a sub-batch the data keep the order: layer
# 4's q exists only once layer 3's output has been used, and that came after layer 3's q was read. Between sub-batches
# there is no such order, so each has buffers of its own. And the output is used after an *event* says that it is there.
# The package's test poisons its buffers between iterations of a small, deep model, and wants the same tokens each time.
#
# ## 8. What launching costs
#
# Python enqueues; it never waits. But enqueueing thousands of kernels takes time too, and where an iteration is shorter
# than that, the GPU waits for Python. A *CUDA graph* is the list of what was enqueued, captured once and launched at
# once. Since every address in it is fixed, decode-only iterations are captured, for each combination of sizes anew
# (`graphs.py`), and those with prefills or swaps run eagerly. An iteration is cut into three graphs, so that the GPU starts
# as soon as the numbers of the first sub-batch are there: while it is at the first layer, Python works out the other's.
#
# The CPU has a launch cost as well. A host node runs when all before it is done, and until the driver has woken up for it
# 40 to 80 us pass; in 32 layers, that is more than a millisecond. So the nodes here start ahead of their data, and look at
# a word in pinned memory, which the GPU sets behind its copy of q, k and v; the GPU waits for a second word before it
# copies the output back (`host_nodes.py`, and `neo_calls` in `kernels/attention.h`). An iteration of graphs has one such
# node beside it for all of its layers.
#
# The recordings tell what graphs save, and what recording a timeline costs:

# %%
for mode, values in saved["cases"].items():
    eager, kept = (1e3 * values[name] for name in ("eager_s", "recorded_s"))
    print(
        f"{mode:27} {1e3 * values['iteration_s']:6.1f} ms as always, {eager:6.1f} eagerly, {kept:6.1f} while recorded"
    )

# %% [markdown]
# And how long Python takes to enqueue an iteration, before it waits:

# %%
for name, c in cases.items():
    enqueued = {way: f"{1e3 * s:.1f}" for way, s in c["enqueue_s"].items()}
    print(f"{name:41} enqueued in {enqueued['iteration']} ms as always, {enqueued['eager']} ms eagerly")

# %% [markdown]
# ## 9. Who decides?
#
# A fixed rule filled the batches: the GPU until it is full, then the CPU, always two batches. Look at the table of
# section 4 again. A second batch reads all weights once more. If it brings many requests whose attention is hidden,
# that is a bargain; if it brings two, or if there is no prefill to hide them behind, it is not. Whether it pays depends
# on stage times that are known only *before* the iteration if somebody can predict them, and on a load that changes
# from one iteration to the next. Notebook 08 predicts: the cost model. Notebook 09 decides: the scheduler.
#
# ## Summary
# - Two batches that differ: batch-0 long on the GPU, batch-1 long on the CPU. Prefills hide CPU attention.
# - The GPU's KV memory is used first, so the CPU has only what the GPU cannot hold.
# - Tokens are the same wherever KV lives, also for requests that change sides.
# - Without barriers a layer takes max(all GPU work, batch-1's chain, all CPU work), at best; the paper's two stages are never
#   less than that.
# - A prompt's KV leaves layer by layer, beneath the next layers.
# - Buffers that are used again are where races live. One set for each sub-batch, an event for each output, poison to prove it.
#
# ## Exercises
#
# **Exercise 1.** Write `hidden(l0, pref0, ga0, each)`: how many CPU decodes, each of `each` ms a layer, batch-1 may have
# so that a layer takes no longer than its GPU work. Batch-0 has none, so two of the bound's terms remain. (`Tl1` stands
# on both sides.)


# %% tags=["exercise"]
def hidden(l0, pref0, ga0, each): ...  # your answer


# %% [markdown]
# The check compares with the cost model's `Stages`, and with what the rule `Tca1 <= Tl0` would allow.


# %% tags=["check"]
@exercise.check("1: how much hides without barriers")
def hidden_solved():
    answer = hidden(4, 1, 2, 0.5)
    assert answer is not None, "Return a number."
    assert answer != 8, "That is the rule with barriers, Tca1 <= Tl0."
    for l0, pref0, ga0, each in ((4, 1, 2, 0.5), (3, 0, 1, 0.4), (5, 2, 0, 1.5)):
        n, work = hidden(l0, pref0, ga0, each), l0 + pref0 + ga0 + 1
        took = [Stages(l0=l0, pref0=pref0, ga0=ga0, l1=1, ca1=k * each).layer for k in (n, n + 1)]
        assert took[0] <= work + 1e-9 < took[1], f"{n} for l0 {l0}, pref0 {pref0}, ga0 {ga0}, {each} each?"


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def hidden(l0, pref0, ga0, each):
#     return int((l0 + pref0 + ga0) / each + 1e-9)
# ```
#
# `ca1 + l1 <= l0 + pref0 + ga0 + l1`. The rule with barriers, `Tca1 <= Tl0`, leaves `pref0 + ga0` unused.
#
# </details>

# %% [markdown]
# **Exercise 2.** Does a prompt's KV leave in time? In one layer of the model `m` in fp16, `tokens` tokens' K and V must
# cross a link of `gb_s` GB/s while the layer's linear stage takes `linear_s`. Write `leaves_in(tokens, gb_s, m)`: the
# seconds that the copy takes. (`kv_bytes_per_token` counts all layers.)


# %% tags=["exercise"]
def leaves_in(tokens, gb_s, m): ...  # your answer


# %% [markdown]
# The check takes the paper's model and an A10G's link.


# %% tags=["check"]
@exercise.check("2: KV that leaves in time")
def leaves_solved():
    answer = leaves_in(1000, 25, llama)
    assert answer is not None, "Return seconds."
    assert abs(answer / 1.6384e-4 - 1) < 1e-6, "1,000 tokens of 4,096 bytes a layer, over 25 GB/s."
    assert abs(leaves_in(500, 10, MODELS["llama-2-7b"]) / 8.192e-4 - 1) < 1e-6, "Without GQA it is four times as much."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def leaves_in(tokens, gb_s, m):
#     return tokens * m.kv_bytes_per_token("float16") / m.num_layers / gb_s / 1e9
# ```
#
# 0.16 ms, while the linear stage of 1,000 tokens takes 7 ms or more on such a card: it never shows.
#
# </details>

# %% [markdown]
# **Exercise 3.** Find the race. `log` lists what happened to one staging buffer, in the order of the clock: pairs
# `("write", layer)` and `("read", layer)`. Write `first_race(log)`: the first layer whose read found another layer's
# data (or none), or None if all is well.


# %% tags=["exercise"]
def first_race(log): ...  # your answer


# %% [markdown]
# The check tries four orders of events.


# %% tags=["check"]
@exercise.check("3: find the race")
def race_solved():
    assert first_race([("write", 0), ("read", 0), ("write", 1), ("read", 1)]) is None, "Here all is well."
    assert first_race([("write", 0), ("write", 1), ("read", 0), ("read", 1)]) == 0, "Layer 0 reads layer 1's data."
    assert first_race([("read", 0), ("write", 0)]) == 0, "Read before anything was written."
    assert first_race([("write", 0), ("read", 0), ("read", 1), ("write", 1)]) == 1, "Layer 1 was too early."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def first_race(log):
#     holds = None
#     for what, layer in log:
#         if what == "write":
#             holds = layer
#         elif holds != layer:
#             return layer
# ```
#
# Poison makes the same visible without a log: between a read and the next write the buffer holds NaN.
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | three pipelines | figures 3, 4, 5: sketches | iterations, one load | recorded: `07_three_pipelines`; measured: `07_here` |
# | a layer's time | two stages, a barrier after each | one maximum, no barriers; both drawn | recorded: `07_bound` |
# | prefill's KV to the CPU | layer by layer | the same; share beneath GPU work printed | recorded |
# | CPU attention and launches | one thread, one after the other | the CPU is a stream; decodes in CUDA graphs | recorded |
# | who fills the batches | the scheduler | here a fixed rule; the scheduler in notebook 09 | measured |
# | tokens | unchanged | identical, requests moving both ways | measured |
