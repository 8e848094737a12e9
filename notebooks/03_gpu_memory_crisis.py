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
# # 03 · The GPU memory crisis
#
# A GPU serves one request about as fast as it serves twenty. So you want twenty. What stops you is rarely its speed:
# it is the memory in which each request keeps its KV cache.
#
# You will see
# - a real generation drawn iteration by iteration: prefill, decode, and the KV that piles up beneath them;
# - how many requests of 1,000 tokens fit beside the weights of a real Llama on a T4, an A10G and an H100;
# - what a batch is worth, measured here and recorded on a slice of an H200, and where memory cuts it off;
# - the same work in smaller and smaller KV pools, measured;
# - why it is the attention of *decode*, of all things, that can leave the GPU.
#
# **Time** about a minute on two cores. **Memory** about 1.5 GB. **Needs** nothing but the package: without a GPU your
# processor stands in for one, and every figure says so.

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
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
import torch

from neo_lite import EngineConfig, SamplingParams, build_engine, exercise, load_model, metrics, plots, workload
from neo_lite.config import MODELS
from neo_lite.engine import Engine

# %% [markdown]
# The model, and one line about this machine that the figures will carry.

# %%
plots.use_style()
BELOW = (0, 0.04, 1, 1)  # leaves room beneath a figure for its source
model = load_model("smollm2")
card = machine.gpu()
here = card["name"] if card else f"{machine.cpu_name()}, threads: {torch.get_num_threads()}, no GPU"
print(f"{model.config.name} on {model.device} in {model.dtype}; {here}")

# %% [markdown]
# ## 1. One generation, iteration by iteration
#
# The paper's figure 1 draws how a Llama answers. *Prefill* takes the whole prompt at once and leaves K and V of each
# of its tokens in the cache. Each *decode* then takes one token, the newest, reads all the K and V before it, and adds
# its own. Let us not draw it by hand. In every iteration the scheduler hands the executor an `IterationPlan`; an
# executor that keeps what it is handed is a few lines, and the engine takes any object with a `run`.


# %%
class Recorder:
    def __init__(self, executor):
        self.executor, self.plans = executor, []

    def run(self, plan):
        self.plans.append(plan)
        return self.executor.run(plan)


# %% [markdown]
# An engine with that recorder in front of its executor:

# %%
engine = build_engine(model, gpu_kv_tokens=512, cpu_kv_tokens=512)
engine.executor = recorder = Recorder(engine.executor)


def ask(text, max_tokens):
    return engine.add(model.tokenizer.encode(text), SamplingParams(max_tokens=max_tokens))


# %% [markdown]
# Two prompts at once; a third arrives three iterations later and joins the running batch. Before you run it: in which
# iteration does the third request prefill, and do the first two wait for it?

# %%
requests = [ask("Gravity is", 8), ask("The three primary colors are red,", 5)]
for _ in range(3):
    engine.step()
requests.append(ask("Once upon a time there was a little", 6))
engine.run()

# %% [markdown]
# Nobody waits: the third prompt's prefill goes through the layers together with the decodes of the other two. This is
# iteration-level batching. Every plan is still there, and says what it decided and why:

# %%
for number, plan in enumerate(recorder.plans):
    work = ", ".join(f"r{w.request.id} tokens {w.start}-{w.seq_len - 1}" for w in plan.work)
    print(f"{number}: {work}", *plan.why, sep="\n     ")

# %% [markdown]
# How many tokens of KV does each request hold after each iteration? Those that its work attends to, itself included:
# `seq_len`.

# %%
held = np.zeros((len(requests), len(recorder.plans)))
for i, plan in enumerate(recorder.plans):
    for w in plan.work:
        held[w.request.id, i] = w.seq_len

# %% [markdown]
# Now the drawing. Above, what each request puts through the model; below, what it holds.

# %%
fig, (top, low) = plt.subplots(2, 1, figsize=(8.5, 4.6), sharex=True, height_ratios=[1.25, 1])
for i, plan in enumerate(recorder.plans):
    for w in plan.work:
        r, decode = w.request.id, w.length == 1
        top.bar(i, 0.7, 0.9, r - 0.35, color=plots.COLORS["gpu" if decode else "cpu"], alpha=0.5)
        token = model.tokenizer.decode([w.request.output[w.seq_len - len(w.request.prompt)]]).strip()
        top.text(i, r, token if decode else f"{w.length} in\n{token}", ha="center", va="center", size=8)
for r in range(len(requests)):
    low.bar(range(held.shape[1]), held[r], 0.9, held[:r].sum(0), label=f"r{r}", color=plt.cm.cividis(0.2 + 0.3 * r))
top.set_title("orange: prefill (prompt tokens in, first token out)    blue: decode (one in, one out)", size=9)
top.set(yticks=range(3), yticklabels=["r0", "r1", "r2"], ylim=(2.6, -0.6))
top.grid(False)
low.set(xlabel="iteration", ylabel="tokens of KV held", xticks=range(held.shape[1]))
low.legend(ncols=3, loc="upper right", fontsize=8)
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "03_workflow", "measured", note="iteration plans of a real generation")

# %% [markdown]
# Look at the lower half. The work of a decode is one token, always; what it *holds* only grows, until the request ends
# and its blocks return to the pool. A server with many users lives in that lower half.
#
# ## 2. How many requests fit?
#
# One token's KV is a K and a V, for each layer and each KV head, `head_dim` numbers each. As a formula:


# %%
def kv_bytes(m, bytes_per_number=2):
    return 2 * m.num_layers * m.num_kv_heads * m.head_dim * bytes_per_number


# %% [markdown]
# Hold it against the package's, for the three Llamas of the paper:

# %%
LLAMAS = [MODELS[name] for name in ("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b")]
for m in LLAMAS:
    assert kv_bytes(m) == m.kv_bytes_per_token("float16")
    weights_gb, request_mb = m.weight_bytes("float16") / 1e9, 1000 * kv_bytes(m) / 1e6
    print(
        f"{m.name:14} weights {weights_gb:5.1f} GB, a token {kv_bytes(m) >> 10} KiB, 1,000 tokens {request_mb:.0f} MB"
    )

# %% [markdown]
# Llama-3.1 shares each KV head among several query heads (GQA), and so its tokens are four times cheaper in a model of
# the same depth.
#
# Now the cards. Their memory is public: [T4](https://www.nvidia.com/en-us/data-center/tesla-t4/) 16 GB, A10G 24 GB
# (the [A10](https://www.nvidia.com/en-us/data-center/products/a10-gpu/) of [AWS's
# G5](https://aws.amazon.com/ec2/instance-types/g5/)), [H100](https://www.nvidia.com/en-us/data-center/h100/) 80 GB.
# Before you run the next cell, guess: how many requests of 1,000 tokens fit beside Llama-2-7B on a T4?

# %%
CARDS_GB = {"T4": 16, "A10G": 24, "H100": 80, "2 x H100": 160}
for m in LLAMAS:
    left = {c: gb * 1e9 - m.weight_bytes("float16") for c, gb in CARDS_GB.items()}
    fits = {c: int(num_bytes // (1000 * kv_bytes(m))) for c, num_bytes in left.items()}
    print(f"{m.name:14}", *(f"{c}: {n if n > 0 else 'none':>4}   " for c, n in fits.items()))

# %% [markdown]
# "None" where not even the weights fit: Llama-3.1-8B in fp16 is a hair larger than a T4.
#
# And these counts are generous. They give *all* of the rest to KV; but a batch's activations, the CUDA context and the
# workspaces want memory too. The paper states what its engines had left: 864 tokens for Llama-2-7B on the T4, 26,400
# for Llama-3.1-8B on the A10G.

# %%
PAPER_KV_TOKENS = {"T4": 864, "A10G": 26_400}  # the GPU-only baselines of the paper's figures 6c and 10a
SETUPS = [("T4", "llama-2-7b"), ("A10G", "llama-3.1-8b"), ("H100", "llama-3.1-8b"), ("2 x H100", "llama-3.1-70b")]

# %% [markdown]
# The figure shows both: in blue what is left beside the weights (on the T4 you can still count the requests), and
# hatched the part of it that the paper's engine could not use for KV. One bar:


# %%
def draw_card(ax, x, card_gb, m, paper_tokens):
    weights, request = (100 * b / card_gb / 1e9 for b in (m.weight_bytes("float16"), 1000 * kv_bytes(m)))  # in %
    count = int((100 - weights) // request)
    ax.bar(x, weights, 0.5, color="#8a8a8a")
    ax.text(x, weights / 2, f"weights\n{weights * card_gb / 100:.1f} GB", ha="center", va="center", color="w", size=9)
    stripes, height = (count, request) if count < 20 else (1, count * request)
    bottoms = weights + height * np.arange(stripes)
    ax.bar([x] * stripes, height, 0.5, bottoms, color=plots.COLORS["gpu"], edgecolor="w", lw=0.8)
    ax.text(x, 102, f"{count} requests", ha="center", size=9)
    if paper_tokens:
        used = weights + request * paper_tokens / 1000
        ax.bar(x, 100 - used, 0.5, used, color="none", edgecolor="w", hatch="///", lw=0)
        ax.plot([x - 0.25, x + 0.3], [used, used], color="#222222", lw=1.5)
        ax.text(x + 0.31, used, f"paper: {paper_tokens:,}\ntokens", size=8, va="center")


# %% [markdown]
# And four of them:

# %%
fig, ax = plt.subplots(figsize=(8.2, 3.9))
for x, (name, shape) in enumerate(SETUPS):
    draw_card(ax, x, CARDS_GB[name], MODELS[shape], PAPER_KV_TOKENS.get(name))
ax.set_xticks(range(4), [f"{name}, {CARDS_GB[name]} GB\n{shape}" for name, shape in SETUPS], size=9)
ax.set(ylabel="% of the card's memory", ylim=(0, 112), xlim=(-0.5, 3.5))
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "03_memory", "paper", note="and the cards' data sheets; fp16, requests of 1,000 tokens")

# %% [markdown]
# Read the first bar again. A T4, a card with 65 TFLOP/s, and the paper's engine has room for 864 tokens: not *one*
# request of 1,000. (Its T4 workload, short summaries of 372 + 45 tokens, fits twice.)
#
# ## 3. What a batch is worth
#
# Is that bad? Only if a larger batch would really be faster. Measure it. One engine, and requests join it until 1, 2,
# 4 … 32 of them decode together. Their contexts are short, about 64 tokens, so that you see the linear layers at work.
# First the two halves of the measurement: fill up to a batch, and time it. The fastest of a few iterations counts, since
# other programs on your machine can only add to it.


# %%
def fill(engine, batch):
    while engine.scheduler.unfinished < batch:
        prompt = np.random.default_rng(engine.scheduler.unfinished).integers(3, 40_000, 64).tolist()
        engine.add(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    while engine.scheduler.waiting:
        engine.step()


# %% [markdown]
# (Random tokens do as well as words here; none of these requests ends before the measurement does.)


# %%
def fastest_step_s(engine, batch, repeats=10):
    times_s = []
    for _ in range(1 + repeats):
        start_s = perf_counter()
        assert len(engine.step()) == batch
        times_s.append(perf_counter() - start_s)
    return min(times_s[1:])


# %% [markdown]
# Before you run it: does an iteration with 32 requests take 32 times as long as one with a single request?

# %%
engine, measured = build_engine(model, gpu_kv_tokens=4096, cpu_kv_tokens=16), {}
for batch in (1, 2, 4, 8, 16, 32):
    fill(engine, batch)
    measured[batch] = fastest_step_s(engine, batch)
    print(f"batch {batch:2}: {measured[batch] * 1e3:6.1f} ms an iteration, {batch / measured[batch]:6.1f} tokens/s")

# %% [markdown]
# The first request pays for reading all the weights; the next ones ride along. On a processor the ride is soon over:
# its few cores run out of arithmetic early. A GPU has a hundred times more arithmetic for each byte that it reads, and
# its ride goes on. So beside your measurement stands a recorded one: Llama-3.1-8B's shape, requests of about 1,000
# tokens, on 8 of the 132 multiprocessors of an H200. That slice reads its memory about as fast as an A10G.

# %%
DATA = next(p for p in (Path("data"), Path("../data"), Path("neo-lite/data")) if p.is_dir())
recorded = json.loads((DATA / "recorded/h200_8sm_batch_size.json").read_text())
part = recorded["stamp"]["gpu"]
slice_name = f"{part['partition_sms']} SMs of an {part['name']}"
print(f"{recorded['model']}, {recorded['context_tokens']:,} tokens each, {slice_name}")

# %% [markdown]
# Row by row: the whole iteration, and of it the linear layers and the attention.

# %%
print("   batch  iteration     linear  attention  tokens/s")
for row in recorded["rows"]:
    parts_ms = "".join(f"{1e3 * row[k]:8.1f} ms" for k in ("iteration_s", "linear_s", "attention_s"))
    print(f"{row['batch']:8}{parts_ms}{row['tokens_per_s']:10.0f}")

# %% [markdown]
# Both on one page. The dotted lines are what you would get if a batch were free: *n* times the tokens of a batch of
# one. The vertical lines are where the paper's cards run out of KV: 2 requests of its T4's summaries, 26 of 1,000
# tokens on its A10G. (On your side they only show the place: your model is smaller than theirs.)


# %%
def draw_batches(ax, times, title):
    x, y = list(times), [n / t for n, t in times.items()]
    ax.loglog(x, [y[0] * n / x[0] for n in x], ":", color="#333333", label="if a batch were free", base=2)
    ax.loglog(x, y, "o-", color=plots.COLORS["gpu"], label="tokens per second", base=2)
    for limit, height, va, name in ((2, 0.98, "top", "T4"), (26, 0.02, "bottom", "A10G")):
        ax.axvline(limit, color=plots.COLORS["cpu"], lw=1.2)
        ax.text(limit * 1.06, height, f"{name}:\nKV ends", size=8, va=va, transform=ax.get_xaxis_transform())
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("requests that decode together")
    ax.set_title(title, size=9)


# %% [markdown]
# Before you look: where on the right does the curve leave its dotted line, before or after the A10G's end?

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.4, 4.1))
draw_batches(axes[0], measured, f"measured: {model.config.name}\n{here}")
times = {row["batch"]: row["iteration_s"] for row in recorded["rows"]}
draw_batches(axes[1], times, f"recorded: Llama-3.1-8B's shape\n{slice_name}")
axes[0].set_ylabel("output tokens per second")
fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2)
fig.tight_layout(rect=(0, 0.08, 1, 1))
_ = plots.save_figure(fig, "03_batch_size", "measured + recorded + paper")

# %% [markdown]
# Look once more at the two middle columns of the recorded table. The linear layers hardly notice the first dozens of
# requests. Attention does: it grows with every request, since no two of them share any KV. Keep that for section 5.
#
# ## 4. The same work in less memory
#
# Now keep the work and shrink the pool. The work: twelve requests of about 48 + 16 tokens each.

# %%
arrivals = workload.synthetic(12, prompt_tokens=48, output_tokens=16, seed=3)
print(f"{sum(a.prompt_tokens + a.output_tokens for a in arrivals)} tokens in all")

# %% [markdown]
# Served by an engine, all offered at once:


# %%
def serve(engine, arrivals):
    prompts = [workload.random_prompt(a, engine.model.vocab_size, seed=i) for i, a in enumerate(arrivals)]
    params = [SamplingParams(max_tokens=a.output_tokens, ignore_eos=True) for a in arrivals]
    asked = [engine.add(*pair) for pair in zip(prompts, params)]
    engine.run()
    return asked


# %% [markdown]
# First a pool that holds them all, then a half of it, a quarter, an eighth. What does not fit waits for its turn. This
# is the longest cell of the notebook, 15 seconds or more.

# %%
measured_pools = {}
for tokens in (1024, 512, 256, 128):
    engine = build_engine(model, gpu_kv_tokens=tokens, cpu_kv_tokens=1024)
    speed = metrics.summary(serve(engine, arrivals))["output_tokens_per_s"]
    measured_pools[f"{tokens:,}"] = speed, engine.iterations
    print(f"{tokens:5} tokens of KV: {engine.iterations:3} iterations, {speed:5.1f} tokens/s")

# %% [markdown]
# Less memory, smaller batches, more passes over the same weights. And that is not all. A request grows while it
# decodes. When its pool has no block left, the newest request makes way: its KV is *parked* in the other pool and
# comes back later (two swaps); if that is full too, it is dropped and prefilled again, prompt and answer so far.
#
# How often? The scheduler is a program without a model in it, so you can ask it about the paper's A10G. This executor
# answers every plan at once:


# %%
class PlansOnly:
    def run(self, plan):
        return {w.request.id: 7 for w in plan.work if w.samples}


# %% [markdown]
# The load: 200 requests of about 1,000 + 200 tokens, Llama-3.1-8B. We want the average batch, and who had to make way.

# %%
many = workload.synthetic(200, prompt_tokens=1000, output_tokens=200)


def plan_for(gpu_kv_tokens, cpu_kv_tokens):
    config = EngineConfig(gpu_kv_tokens=gpu_kv_tokens, cpu_kv_tokens=cpu_kv_tokens)
    engine = Engine(config, MODELS["llama-3.1-8b"], PlansOnly())
    asked = serve(engine, many)
    outputs = sum(len(r.output) for r in asked)
    return outputs / engine.iterations, sum(r.num_swaps for r in asked), sum(r.num_recomputes for r in asked)


# %% [markdown]
# Four pools: all that fits beside the weights, the paper's, a half and a quarter of it; each once with a large pool to
# park in, and once with none (a single block).

# %%
A10G_POOLS = (60_000, 26_400, 13_200, 6_600)
batches, swaps, recomputes = [], [], []
for tokens in A10G_POOLS:
    batch, moved, _ = plan_for(tokens, cpu_kv_tokens=100_000)
    _, _, dropped = plan_for(tokens, cpu_kv_tokens=16)
    print(
        f"{tokens:6,} tokens: batch {batch:4.1f} on average; {moved:3} swaps, or without parking {dropped} recomputes"
    )
    batches.append(batch), swaps.append(moved), recomputes.append(dropped)

# %% [markdown]
# Both in one figure: the speed that you measured, and the batch that each pool allows on the paper's card.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.6))
speeds, counts = zip(*measured_pools.values())
labels = [f"{n} iterations" for n in counts]
left.bar_label(left.bar(measured_pools.keys(), speeds, 0.6, color=plots.COLORS["gpu"]), labels, size=8)
left.margins(y=0.1)
left.set_title(f"measured: {model.config.name}, 12 requests of 48 + 16 tokens", size=9)
left.set(ylabel="output tokens per second", xlabel="tokens of KV in the GPU pool")
right.bar([f"{n:,}" for n in A10G_POOLS], batches, 0.6, color="#8a8a8a")
for x, (batch, moved, dropped) in enumerate(zip(batches, swaps, recomputes)):
    right.text(x, batch + 0.5, f"{moved} swaps or\n{dropped} recomputes", ha="center", va="bottom", size=8)
right.margins(y=0.15)
right.set_title("plans for Llama-3.1-8B, 200 requests of 1,000 + 200", size=9)
right.set(ylabel="answers in an iteration, on average", xlabel="tokens of KV in the GPU pool")
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "03_kv_memory", "measured + simulated", note=here)

# %% [markdown]
# The GPU pool is full while gigabytes of host memory lie idle: that is the crisis in one sentence. The host of a
# g5.4xlarge, the paper's A10G machine, has 64 GB: the KV of almost 490 requests of 1,000 tokens of Llama-3.1-8B. But
# KV in host memory is only useful if somebody can *work* on it there.
#
# ## 5. What can leave the GPU?
#
# Ask of each part of the model: how many operations does it do for each byte that it must fetch? This *arithmetic
# intensity* decides what limits it. A linear layer fetches its weights once for the whole batch, and does 2 operations
# with each weight for each token:


# %%
def linear_intensity(m, tokens):
    return 2 * m.layer_parameters * tokens / (2 * m.layer_parameters)  # operations / bytes, fp16


# %% [markdown]
# The attention of a decode fetches each request's own K and V, which no other request shares, and does a multiplication
# and an addition with each of their numbers for each query head:


# %%
def attention_intensity(m, context):
    operations = 2 * 2 * m.num_heads * m.head_dim * context  # q·K, then p·V
    return operations / (2 * m.num_kv_heads * m.head_dim * context * 2)


# %% [markdown]
# The weights cancel out of the one and leave the batch. The context cancels out of the other, and leaves only how many
# query heads share a KV head:

# %%
for m in LLAMAS[:2]:
    linear = ", ".join(f"{linear_intensity(m, n):.0f} at {n}" for n in (1, 26, 512))
    print(
        f"{m.name:13} linear: {linear} tokens;  decode attention: {attention_intensity(m, 1000):.0f}, whatever the batch"
    )
    assert attention_intensity(m, 1000) == attention_intensity(m, 9999) == m.group_size

# %% [markdown]
# Now the machines. The paper's pair: an A10G with 600 GB/s and 125 TFLOP/s, a server's processor with 200 GB/s and
# 1.2 TFLOP/s. In arithmetic the GPU is a hundred times stronger. In bandwidth, three times. And for yours, measure
# both: a long read gives the bandwidth, a matrix product the arithmetic.


# %%
def matmul_tflop_s(size=1536):
    a, times_s = torch.randn(size, size), []
    for _ in range(4):
        start_s = perf_counter()
        a @ a
        times_s.append(perf_counter() - start_s)
    return 2 * size**3 / min(times_s) / 1e12


# %% [markdown]
# Three machines, and the intensity at which each is in balance:

# %%
own = (machine.measure_read_bandwidth(torch.get_num_threads())["gb_per_s"], matmul_tflop_s())
machines = {"A10G (paper)": (600, 125), "server CPU (paper)": (200, 1.2), "this CPU (measured)": own}
for name, (gb_s, tflop_s) in machines.items():
    print(
        f"{name:20} {gb_s:6.1f} GB/s {tflop_s:7.2f} TFLOP/s: balanced at {1e3 * tflop_s / gb_s:4.0f} operations a byte"
    )

# %% [markdown]
# The roofline draws it: to the left of its knee a machine waits for memory, to the right for arithmetic. Follow the
# two vertical bands. At the linear layers of a decent batch the gap between the roofs is a hundredfold. At decode
# attention it is the gap of the bandwidths.

# %%
fig, ax = plt.subplots(figsize=(7.4, 4.2))
x = np.logspace(-0.5, 3.5, 200)
for (name, (gb_s, tflop_s)), color in zip(machines.items(), (plots.COLORS["gpu"], plots.COLORS["cpu"], "#8a8a8a")):
    ax.loglog(x, np.minimum(tflop_s * 1e3, gb_s * x), color=color, lw=2, label=name)
for low, high, label in (
    (1, 4, "decode attention\n1 (MHA) to 4 (GQA)"),
    (256, 1024, "linear layers,\n256-1,024 tokens"),
):
    ax.axvspan(low, high, color="#000000", alpha=0.07, lw=0)
    ax.text((low * high) ** 0.5, 2.4e5, label, ha="center", va="center", size=8.5)
for at, ratio in ((2, 600 / 200), (512, 125 / 1.2)):
    a10g, server = (min(t * 1e3, g * at) for g, t in ((600, 125), (200, 1.2)))
    ax.annotate("", (at, a10g), (at, server), arrowprops={"arrowstyle": "<->", "color": "#222222"})
    ax.text(at * 1.12, (a10g * server) ** 0.5, f"{ratio:.0f} x", va="center", size=10)
ax.set(xlabel="operations for each byte of memory read", ylabel="attainable GFLOP/s", ylim=(5, 6e5), xlim=(0.4, 3000))
ax.legend(loc="lower right")
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(fig, "03_roofline", "paper + measured", note=f"grey: {here}")

# %% [markdown]
# So the part that fills the GPU's memory is the part that needs the GPU least. Its KV can live in the host's memory,
# and its attention can be computed there, where the KV is, at a third of the speed instead of a hundredth. That
# sentence is NEO's whole reason. Notebook 05 tries it in the simplest way, and finds out what else is needed.
#
# ## Summary
# - A decode's work is one token; its KV grows, and stays until the request ends.
# - Beside the weights a T4 holds a handful of requests of 1,000 tokens, an A10G some dozens; the paper's engines had
#   864 and 26,400 tokens.
# - A batch shares one pass over the weights, so throughput grows with it for as long as memory lasts.
# - In less KV memory the same work takes more iterations, and parking or recomputing on top.
# - Decode attention does 1 to 4 operations a byte. It is bound by bandwidth, where host and GPU are close.
#
# ## Exercises
#
# **Exercise 1.** Write the function: how many requests of `tokens` tokens does a card of `card_gb` GB hold beside the
# fp16 weights of `m`, if all the rest is KV, in blocks of 16 tokens? (0 if the weights do not fit.)


# %% tags=["exercise"]
def requests_that_fit(card_gb, m, tokens): ...  # your answer


# %% [markdown]
# The check tries it on four cards and models.


# %% tags=["check"]
@exercise.check("1: requests that fit")
def fits_solved():
    llama2, llama3 = MODELS["llama-2-7b"], MODELS["llama-3.1-8b"]
    assert requests_that_fit(24, llama3, 1008) == 60, "1,008 tokens are 63 whole blocks. Start without rounding."
    assert requests_that_fit(24, llama3, 1000) == 60, "1,000 tokens take 63 blocks too: round blocks up."
    assert requests_that_fit(16, llama2, 17) == 150, "17 tokens take two blocks of 16."
    assert requests_that_fit(16, llama3, 1000) == 0, "The weights alone are larger than the card."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def requests_that_fit(card_gb, m, tokens):
#     left = card_gb * 1e9 - m.weight_bytes("float16")
#     blocks = -(-tokens // 16)
#     return max(0, int(left // (blocks * 16 * m.kv_bytes_per_token("float16"))))
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** An iteration of decodes takes about `t = a + b·n` seconds for a batch of `n`: `a` to read the weights,
# `b` for each request. From two measurements, `(n, t)` and `(m, u)`, find `a`, `b` and the throughput that no batch,
# however large, can exceed.


# %% tags=["exercise"]
def limit_tokens_per_s(n, t, m, u): ...  # your answer


# %% [markdown]
# Try it on `measured` too: `limit_tokens_per_s(1, measured[1], 32, measured[32])`.


# %% tags=["check"]
@exercise.check("2: the most that batching can give")
def limit_solved():
    answer = limit_tokens_per_s(1, 0.031, 11, 0.041)
    assert answer is not None, "Return a number."
    assert abs(answer - 1000) < 1e-6, "b = (u - t) / (m - n); for a large batch t is b·n, and n / t goes to ..."
    assert abs(limit_tokens_per_s(2, 0.022, 6, 0.030) - 500) < 1e-6, "The first batch need not be 1."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def limit_tokens_per_s(n, t, m, u):
#     b = (u - t) / (m - n)
#     return 1 / b
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** How long does *one* iteration's decode attention over the paper's 26,400 tokens of Llama-3.1-8B's KV
# (all layers, fp16) take at least, on the A10G (600 GB/s) and on the paper's server CPU (200 GB/s)? Both in seconds.

# %% tags=["exercise"]
a10g_s = ...  # your answer
server_s = ...

# %% [markdown]
# Both are bounded by bandwidth, so bytes over bandwidth is all you need.


# %% tags=["check"]
@exercise.check("3: attention over 26,400 tokens")
def bandwidth_solved():
    num_bytes = 26_400 * MODELS["llama-3.1-8b"].kv_bytes_per_token("float16")
    assert abs(a10g_s / (num_bytes / 600e9) - 1) < 0.02, "128 KiB for each of 26,400 tokens, over 600 GB/s."
    assert abs(server_s / a10g_s - 3) < 0.06, "The same bytes over 200 GB/s."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# num_bytes = 26_400 * 2 * 32 * 8 * 128 * 2
# a10g_s, server_s = num_bytes / 600e9, num_bytes / 200e9
# ```
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | workflow of inference | figure 1, a drawing | plans of a real generation | measured: `03_workflow` |
# | KV on a T4, Llama-2-7B | 864 tokens | at most the stripes | paper, figure 6c; `03_memory` |
# | KV on an A10G, Llama-3.1-8B | 26,400 tokens | at most the stripes | paper, figure 10a; `03_memory` |
# | throughput over batch size | near-linear, up to hundreds | both curves | measured, recorded: `03_batch_size` |
# | A10G | 600 GB/s, 125 TFLOP/s | as stated | paper: `03_roofline` |
# | a server's CPU | 200 GB/s, 1.2 TFLOP/s | this machine's own | paper, measured: `03_roofline` |
