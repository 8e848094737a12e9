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
# # 12 · Tensor parallel: one model over several cards
#
# Llama-3.1-70B in 16 bits is 141 GB. No card of 80 GB holds it, and the paper's largest experiment runs it on two. Each
# card gets a part of *every* layer, so both work on every token. And each brings its own share of the CPU's memory and
# threads, with its own part of the KV cache: offloading goes on as before, and no KV crosses from one card to the other.
#
# You will see
# - how a matrix product is cut in two ways, and why an MLP needs a single sum;
# - which head is on which rank, also when three KV heads meet two ranks;
# - what crosses the link between cards, and that it does not depend on the context;
# - why twice the cards can have room for five times the KV;
# - two real ranks that say the same tokens as one, in each mode, and what their sums cost on this machine.
#
# **Time** about a minute and a half on two cores. **Memory** about 2 GB. **Needs** nothing but the package: two
# processes of this machine's CPU play two cards. What two real cards do is shown where it has been recorded.

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
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from neo_lite import exercise, load_model, plots
from neo_lite.config import MODELS, EngineConfig
from neo_lite.cost_model import Profile
from neo_lite.hardware import DATA_DIR, find, gpu_kv_tokens
from neo_lite.parallel import Shard, heads
from neo_lite.simulator import simulate
from neo_lite.workload import parse

plots.use_style()
BELOW = (0, 0.05, 1, 1)  # leaves room beneath a figure for its source

# %% [markdown]
# ## 1. Two ways to cut a matrix
#
# A layer of a Llama is four matrix products. Take the last two, the MLP, of a tiny model: `gate_up` makes the input
# wider, `down` makes it narrow again.

# %%
model = load_model("random:tiny", "cpu")
config, layer = model.config, model.layers[0]
gate, up = layer.gate_up.chunk(2)
x = torch.randn(3, config.hidden_size)
print(f"x {list(x.shape)}, gate and up {list(gate.shape)}, down {list(layer.down.shape)}, each [out, in]")


# %% [markdown]
# The whole MLP, for reference:


# %%
def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


whole = mlp(x, gate, up, layer.down)

# %% [markdown]
# **By columns.** Give each rank some of the *outputs* of `gate` and `up`. It needs all of `x`, and computes its numbers
# alone: nothing has to be exchanged, for SwiGLU works on each number by itself.
#
# **By rows.** `down` then takes each of those numbers as an *input*. A rank that has half of the inputs can compute half
# of each sum. So each rank ends with a whole output, but only a part of its sum; adding the parts up gives the answer.


# %%
def my_part(rank, ranks):
    width = config.intermediate_size // ranks
    mine = slice(rank * width, (rank + 1) * width)
    return mlp(x, gate[mine], up[mine], layer.down[:, mine])


# %% [markdown]
# The shape of a part says nothing of its being one; only the sum is right.

# %%
parts = [my_part(rank, 2) for rank in range(2)]
assert parts[0].shape == whole.shape and not torch.allclose(parts[0], whole, atol=1e-3)
torch.testing.assert_close(parts[0] + parts[1], whole)

# %% [markdown]
# By columns, then by rows: one sum for two products. Attention is cut in the same way. `qkv` goes by columns, that is, by
# heads; each rank attends with its own heads over its own KV; `o` goes by rows. **Two sums a layer**, and between them
# every rank is on its own.
#
# In the package a `Shard` knows which part of each tensor is a rank's own. Play both ranks, one after the other:

# %%
shards = [Shard(config, SimpleNamespace(rank=rank, size=2)) for rank in range(2)]
for rank, shard in enumerate(shards):
    down = shard.part("model.layers.0.mlp.down_proj.weight", layer.down)
    width = config.intermediate_size // 2
    assert down.equal(layer.down[:, rank * width : (rank + 1) * width])
    print(f"rank {rank}: down {list(down.shape)} of {list(layer.down.shape)}")

# %% [markdown]
# A shard also has a `config` of its own: the same model, only narrower. With it the pools, the kernels and the pipeline
# are made as always. There is no second model class.

# %%
for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size", "hidden_size", "num_layers"):
    print(f"{name:18} {getattr(config, name):4} in all, {[getattr(s.config, name) for s in shards]} on the two ranks")

# %% [markdown]
# `hidden_size` is not cut: every rank has every token's hidden state, whole. The vocabulary is cut by rows, so a token's
# embedding is on one rank; the others add zeros. And each rank makes the logits of its own rows, which rank 0 gathers.
#
# ## 2. Which head is where
#
# A query head needs the KV head of its group. So a rank gets whole groups, as evenly as it goes. Write it down for the
# plain case, in which there are at least as many groups as ranks:


# %%
def my_heads(groups, width, rank, ranks):
    start = rank * (groups // ranks) + min(rank, groups % ranks)
    kv = range(start, start + groups // ranks + (rank < groups % ranks))
    return kv, range(kv.start * width, kv.stop * width)


# %% [markdown]
# SmolLM2 has 9 query heads in 3 groups. Predict: how many of each does either of two ranks get?

# %%
smollm2 = MODELS["smollm2"]
for rank in range(2):
    kv, q = my_heads(smollm2.num_kv_heads, smollm2.group_size, rank, 2)
    assert (kv, q) == heads(smollm2, rank, 2)
    print(f"rank {rank}: {len(kv)} KV heads, {len(q)} query heads")

# %% [markdown]
# Two groups and one. It is not even, and it need not be: the sums have the same shape on either rank.
#
# With more ranks than groups a group is on several ranks. Each of them keeps a copy of its KV, and they share out its
# query heads. Both cases in a picture, a row for each rank:


# %%
def draw(ax, shape, ranks):
    for rank in range(ranks):
        kv, q = heads(shape, rank, ranks)
        ax.broken_barh(
            [(h * shape.group_size + 0.06, shape.group_size - 0.12) for h in kv], (rank + 0.55, 0.3), color=KV
        )
        ax.broken_barh([(h + 0.06, 0.88) for h in q], (rank + 0.15, 0.3), color=QUERY)
    ax.set_yticks([r + 0.5 for r in range(ranks)], [f"rank {r}" for r in range(ranks)], size=8)
    ax.set_title(f"{shape.name}: {shape.num_heads} heads, {shape.num_kv_heads} groups", size=9)
    ax.set(xlim=(0, shape.num_heads), ylim=(ranks, 0), xticks=[])
    ax.grid(False)


# %% [markdown]
# SmolLM2 over two ranks, Llama-3.1-8B over four, and the tiny model, which has two groups, over four as well.

# %%
QUERY, KV = plots.COLORS["gpu"], plots.COLORS["cpu"]
fig, axes = plt.subplots(1, 3, figsize=(9.2, 2.4))
for ax, (name, ranks) in zip(axes, (("smollm2", 2), ("llama-3.1-8b", 4), ("tiny", 4))):
    draw(ax, MODELS[name], ranks)
bars = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (KV, QUERY)]
fig.legend(bars, ["KV heads", "query heads"], loc="lower left", ncols=2, fontsize=8)
fig.tight_layout(rect=(0, 0.08, 1, 1))
_ = plots.save_figure(fig, "12_heads", "code", "as neo_lite.parallel.heads shares them out")

# %% [markdown]
# On the right the orange bars repeat: that KV is kept twice. It costs memory and spares the link.
#
# ## 3. What crosses the link
#
# Two sums a layer, each of a hidden state for every token of the iteration. A *ring* all-reduce sends it around in
# pieces: first each rank collects the sum of its own piece, then the finished pieces go around. Each rank sends
# `2 (n - 1) / n` of the whole.


# %%
def link_bytes(shape, tokens, ranks, number=2):
    """What each rank sends in the sums of one iteration, in numbers of 2 bytes."""
    one = tokens * shape.hidden_size * number
    return 2 * shape.num_layers * 2 * (ranks - 1) / ranks * one


# %% [markdown]
# For an iteration of 256 decodes, and for one that prefills 2,048 tokens:

# %%
for name in ("llama-3.1-8b", "llama-3.1-70b"):
    for tokens in (256, 2048):
        sent = link_bytes(MODELS[name], tokens, 2)
        print(f"{name:13} over 2 ranks, {tokens:5,} tokens: {sent / 1e6:8,.0f} MB an iteration from each rank")

# %% [markdown]
# (The embedding adds one sum, the head a gather of logits.) Compare: the *context* of those 256 decodes is not in the
# formula. Their KV stays where it is. That is why tensor parallel and offloading go together so well: rank 0's heads are
# attended on rank 0's GPU or in rank 0's part of the host memory, and rank 1 never hears of them.
#
# Where does the link matter, then? Every all-reduce waits for the slowest rank, and has a price even when it is small. For
# a handful of tokens that price is all there is, 64 times an iteration of an 8B model.
#
# ## 4. Room for KV
#
# Twice the cards do not have room for twice the KV. They have room for more, since the weights are there only once.
# Count as notebook 03 did: of each card nine tenths, less what an iteration needs to work in, less the rank's weights.


# %%
def room(shape, card, ranks, batched=2048):
    rows = 2 * shape.intermediate_size + 4 * shape.hidden_size  # numbers alive at the widest point of a layer
    work_bytes = batched * rows * 2 + 2**28
    free = 0.9 * card.gpu_memory_bytes - work_bytes - shape.weight_bytes("float16") / ranks
    return int(ranks * free / shape.kv_bytes_per_token("float16"))


# %% [markdown]
# The package counts alike. An A10G has 24 GB and an H100 80 GB, about.

# %%
CARDS = {"llama-3.1-8b": ("A10G", find("a10g-g5.4xlarge")), "llama-3.1-70b": ("H100", find("h100"))}
for name, (title, card) in CARDS.items():
    for ranks in (1, 2, 4) if name == "llama-3.1-8b" else (2, 4, 8):
        tokens = room(MODELS[name], card, ranks)
        assert tokens == gpu_kv_tokens(replace(card, num_gpus=ranks), MODELS[name], "float16", 2048)
        print(f"{name:13} on {ranks} x {title}: {tokens:9,} tokens, {tokens // 1000:5,} requests of 1,000")

# %% [markdown]
# Read the lines twice. With a second A10G the 8B model has five times the room. And the 70B model on two H100s, the
# paper's setting, has next to none: the weights fill the cards. With so few requests at a time the GPUs mostly wait for
# weights. That is the crisis of notebook 03 again, and here too NEO's second batch comes from host memory.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.2, 2.8))
for ax, (name, (title, card)), counts in zip(axes, CARDS.items(), ((1, 2, 4), (2, 4, 8))):
    tokens = [room(MODELS[name], card, n) / 1e3 for n in counts]
    bars = ax.bar([f"{n} x {title}" for n in counts], tokens, 0.6, color=KV, label="what fits")
    ax.bar_label(bars, fmt="%.0f", size=9)
    ax.plot([tokens[0] * n / counts[0] for n in counts], "k--", lw=1, label="in proportion to the cards")
    ax.set(title=name, ylabel="thousand tokens of KV")
axes[0].legend(fontsize=8)
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(
    fig, "12_room", "code", "arithmetic: the models' shapes, the cards' data sheets; fp16, 0.9 of the memory"
)

# %% [markdown]
# ## 5. Two ranks, for real
#
# Now start two processes. The launcher is torch's own, `torchrun`: it runs the same command twice and tells each process
# its number. The scheduler runs once, on rank 0, and sends each iteration's plan to the others; they own weights and KV,
# and decide nothing. This cell writes the command line.


# %%
def neo_lite(*words, ranks=1):
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launch, "neo_lite", *words, "--tensor-parallel", str(ranks), "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# %% [markdown]
# One rank, then two, with all KV on the "GPU" and with all of it offloaded. Do they say the same?

# %%
ask = [
    "generate",
    "--model",
    "random:tiny",
    "--device",
    "cpu",
    "--prompt",
    "Two ranks walk into a bar",
    "--max-tokens",
    "24",
]
for mode in ("gpu-only", "simple"):
    one, two = (neo_lite(*ask, "--mode", mode, ranks=ranks)["tokens"] for ranks in (1, 2))
    assert one == two
    print(f"{mode:9} 1 rank, 2 ranks: the same {len(two)} tokens, {two[:6]} ...")

# %% [markdown]
# To the last token. (Sums in another order differ in their last digits. In 32 bits that hardly ever tips a choice between
# two tokens; in 16 bits it sometimes does.)
#
# Does it pay? Ask the benchmark, with one rank and with two:

# %%
load = ["bench", "--model", "random:tiny", "--device", "cpu", "--workload", "synthetic:40,60", "--requests", "16"]
pools = ["--gpu-kv-tokens", "4096", "--cpu-kv-gib", "0.01", "--cpu-threads", "2"]
runs = {ranks: neo_lite(*load, *pools, ranks=ranks) for ranks in (1, 2)}
for ranks, run in runs.items():
    print(f"{ranks} rank(s): {run['output_tokens_per_s']:7.0f} tokens a second")

# %% [markdown]
# On this model it does not, and it cannot: its matrices take microseconds. What the sums cost, the ranks have measured
# along the way:

# %%
curve = [(n, s) for n, s in runs[2]["all_reduce_s"] if n <= 1024]
small_s = curve[0][1]
tiny = MODELS["tiny"]
print(
    f"an all-reduce of one token: {1e6 * small_s:.0f} us; {2 * tiny.num_layers} of them in an iteration of {tiny.name}:",
    end=" ",
)
print(f"{2e3 * tiny.num_layers * small_s:.2f} ms; in one of Llama-3.1-8B it would be {2e3 * 32 * small_s:.0f} ms")

# %% [markdown]
# That is the price between two *processes on a CPU*, through gloo and the loopback network. Two GPUs add up by NCCL, over
# NVLink where they have it, and on the compute stream, so that no processor has a part in it. The figure sets what two
# H200s took beside it: of a few tokens 11 microseconds, most of it latency, out of a CUDA graph (the shape of the 8B); 44
# where each sum was launched on its own (that of the 70B).

# %%
path = DATA_DIR / "recorded" / "tensor_parallel_2xh200.json"
recorded = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
fig, ax = plt.subplots(figsize=(6.4, 3))
ax.plot(
    *zip(*((n, 1e6 * s) for n, s in curve)),
    "o-",
    color=plots.COLORS["link"],
    label=f"here: gloo, {tiny.hidden_size} wide",
)
for run in {r["model"]: r for r in recorded if "all_reduce_s" in r}.values():
    size, width = run["model"].split("-")[-1].upper(), MODELS[run["model"][7:]].hidden_size
    how = "in a CUDA graph" if size == "8B" else "launched one by one"
    label = f"2 x H200: NCCL, {width:,} wide ({size}), {how}"
    ax.plot(*zip(*((n, 1e6 * s) for n, s in run["all_reduce_s"])), "s-", label=label)
ax.set(xscale="log", yscale="log", ylim=(5, 1e4), xlabel="tokens", ylabel="microseconds of an all-reduce")
ax.legend(fontsize=8, loc="upper left")
fig.tight_layout(rect=BELOW)
_ = plots.save_figure(
    fig, "12_all_reduce", "measured + recorded" if recorded else "measured", f"here: {machine.cpu_name()}"
)

# %% [markdown]
# ## 6. How it scales
#
# `benchmarks/tensor_parallel.sh` makes such runs: the shapes of Llama-3.1-8B and 70B on two H200s, and the 8B on one of
# them (which had half of the host's cores; the other card was at work on something else). The 8B's load has long contexts,
# so that reading weights and KV, which two cards share, takes most of an iteration.


# %%
def bars_of(runs, ax):
    sizes = [" + ".join(f"{int(n):,}" for n in r["workload"].split(":")[1].split(",")) for r in runs]
    what = [f"{r['model'][7:]}, {size} tokens\n{r['mode']}" for r, size in zip(runs, sizes)]
    names = [f"{text}, {'one GPU' if r['tensor_parallel'] == 1 else 'two GPUs'}" for text, r in zip(what, runs)]
    colors = [plots.COLORS["gpu" if r["mode"] == "gpu-only" else "cpu"] for r in runs]
    ax.bar_label(ax.barh(names, [r["output_tokens_per_s"] for r in runs], 0.6, color=colors), fmt=" %.0f", size=8)
    ax.tick_params(axis="y", labelsize=8)
    ax.margins(x=0.1)
    ax.invert_yaxis()
    ax.set_xlabel("output tokens a second")


# %% [markdown]
# Where the file is missing, there is no figure.

# %%
if recorded:
    fig, ax = plt.subplots(figsize=(7.2, 0.5 * len(recorded) + 1))
    bars_of(recorded, ax)
    fig.tight_layout(rect=BELOW)
    plots.save_figure(fig, "12_scaling", "recorded", "random weights of these shapes, bf16, H200")
else:
    print(f"{path.name} is not recorded yet: sh benchmarks/tensor_parallel.sh OUT, on a machine with two GPUs")

# %% [markdown]
# How many iterations of each kind, and the median time of one:
# %%
for r in recorded:
    print(f"{r['model'][7:]}, {r['mode']}, {r['tensor_parallel']} x H200")
    for kind, count in r["iterations"].items():
        print(f"    {count:5,} iterations of {1e3 * r['iteration_s'][kind]:4.0f} ms: {kind}")
# %% [markdown]
# Two cards decode in 16 ms what one does in 25. They gain less over the whole run, for prompts come in chunks of 2,048
# tokens, whose iterations are short enough on two whole cards to wait for their launches. `neo` takes a prompt whole, and
# gains there; its two batches stay unused, for these cards have room for all KV. So `neo` on two cards has 1.5 times the
# throughput of one GPU-only card, and GPU-only on two 1.4 times.
#
# The 70B was given 40,000 tokens on the GPUs, about what section 4 counts for two H100s: room for some fifty of its 120
# requests. There `neo` was misled, and is slower than GPU-only. Its stage times were measured launch by launch, which made
# one batch of decodes look slower, and two look better, than they are: in one batch such an iteration takes 30 ms, in two
# 184. Stage times come from CUDA graphs since then, where the pipeline uses those, and launches count as what an iteration
# costs besides. The 70B has not been recorded again.
#
# Can the simulator tell what the 8B does on two cards? It takes the stage times that the two ranks measured together, sums
# included, before the run of mode `neo`, and serves the same requests.

# %%
measured_by = [r for r in recorded if "profile" in r and "note" not in r]
for r in recorded if measured_by else []:
    if r["model"] == measured_by[0]["model"] and r["tensor_parallel"] == 2:
        shape = MODELS[r["model"].removeprefix("random:")]
        tokens = int(r["cpu_kv_gib"] * 2**30 / shape.kv_bytes_per_token(r["dtype"]))
        setting = EngineConfig(r["mode"], gpu_kv_tokens=r["gpu_kv_tokens"], cpu_kv_tokens=tokens, max_seqs=512)
        load = parse(r["workload"], r["requests"], seed=r["seed"])
        told = simulate(shape, Profile(**measured_by[0]["profile"]), setting, load).summary()["requests_per_s"]
        print(f"{r['mode']:9} recorded {r['requests_per_s']:.2f} requests/s, simulated {told:.2f}")
        assert abs(told / r["requests_per_s"] - 1) < 0.15

# %% [markdown]
# It promises a tenth too much, in either mode; so what `neo` gains over GPU-only comes out right.
#
# ## 7. When a rank dies
#
# Ranks wait for one another in every layer. So if one dies, the others would wait for ever. Rank 0 therefore keeps a
# connection open to each of the others, the one on which it sends the plans. When a process ends, for whatever reason,
# the system closes its connections. Rank 0 sees that at once, says which rank it was, marks the requests in flight as
# failed and ends; `torchrun` takes down whoever is left. (The sums alone would not tell: gloo knows that *somebody* is
# gone, and NCCL waits.)
#
# Try it in a shell: start a long `bench` on two ranks and kill one of the processes.
#
# ## Summary
# - By columns, then by rows: two products, one sum. Two sums a layer are all that ranks exchange.
# - A rank holds whole KV groups, in its own GPU pool and its own CPU pool. KV crosses no link.
# - What crosses depends on the tokens of an iteration, not on their context.
# - A second card brings more than twice the room for KV, since the weights are cut as well.
# - The scheduler runs once. The others follow its plans, and the tokens are the same.
#
# ## Exercises
#
# **Exercise 1.** A projection that is cut by rows has a bias. Each rank has `x_part` [tokens, its inputs], `w_part`
# [outputs, its inputs] and the whole `bias`. Write what `rank` must compute so that the *sum* over all ranks is right.


# %% tags=["exercise"]
def row_parallel(x_part, w_part, bias, rank): ...  # your answer


# %% [markdown]
# The check adds three ranks up.


# %% tags=["check"]
@exercise.check("1: a bias among ranks")
def bias_solved():
    w, b = torch.randn(5, 12), torch.randn(5)
    x = torch.randn(2, 12)
    cut = [slice(0, 4), slice(4, 8), slice(8, 12)]
    parts = [row_parallel(x[:, c], w[:, c], b, rank) for rank, c in enumerate(cut)]
    assert all(p is not None for p in parts), "Return a tensor."
    total = sum(parts)
    assert not torch.allclose(total, F.linear(x, w, 3 * b), atol=1e-4), "Now the bias is in the sum three times."
    assert torch.allclose(total, F.linear(x, w, b), atol=1e-4), "The parts must add up to x @ w.T + bias."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def row_parallel(x_part, w_part, bias, rank):
#     return F.linear(x_part, w_part, bias if rank == 0 else None)
# ```
#
# The package gives the other ranks a bias of zeros when it loads the weights: then `post_attention` needs no case.
#
# </details>

# %% [markdown]
# **Exercise 2.** With more ranks than groups, KV is kept more than once. How many times as much KV does the *whole* of a
# model with `groups` KV heads keep on `ranks` ranks as on one?


# %% tags=["exercise"]
def copies(groups, ranks): ...  # your answer


# %% [markdown]
# The check counts what `heads` gives to each rank.


# %% tags=["check"]
@exercise.check("2: copies of the KV")
def copies_solved():
    for name, ranks in (("llama-3.1-8b", 2), ("llama-3.1-8b", 8), ("llama-3.1-8b", 16), ("tiny", 4), ("smollm2", 4)):
        shape = MODELS[name]
        kept = sum(len(heads(shape, rank, ranks)[0]) for rank in range(ranks))
        answer = copies(shape.num_kv_heads, ranks)
        assert answer is not None, "Return a number."
        assert abs(answer - kept / shape.num_kv_heads) < 1e-9, f"{name} over {ranks}: {kept} KV heads are kept in all."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def copies(groups, ranks):
#     return max(1, ranks / groups)
# ```
#
# Up to as many ranks as groups nothing is kept twice; beyond, each rank keeps one group.
#
# </details>

# %% [markdown]
# **Exercise 3.** When does a second card pay? One card takes `linear_s` for a layer's products and `attention_s` for its
# attention. Two cards take half of each, and two sums of `reduce_s`. Write the speedup.


# %% tags=["exercise"]
def speedup(linear_s, attention_s, reduce_s): ...  # your answer


# %% [markdown]
# The check tries free sums, dear ones, and the break-even.


# %% tags=["check"]
@exercise.check("3: when a second card pays")
def speedup_solved():
    answer = speedup(3e-4, 1e-4, 0)
    assert answer is not None, "Return a number."
    assert abs(answer - 2) < 1e-9, "Sums that cost nothing leave a factor of two."
    assert abs(speedup(3e-4, 1e-4, 2e-5) - 4e-4 / 2.4e-4) < 1e-9, "Two sums a layer."
    assert abs(speedup(3e-4, 1e-4, 1e-4) - 1) < 1e-9, "Here the sums eat up what was won."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def speedup(linear_s, attention_s, reduce_s):
#     one = linear_s + attention_s
#     return one / (one / 2 + 2 * reduce_s)
# ```
#
# So a sum may cost up to a quarter of the layer. More tokens in an iteration make the layer longer, and the sums hardly.
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | Llama-3.1-70B | on two H100s | room for its KV, counted | computed from data sheets: `12_room` |
# | KV of a sharded model | with its worker, on GPU and CPU | the same; uneven and replicated groups too | code: `12_heads` |
# | tokens over two ranks | not reported | those of one rank | measured |
# | cost of a sum | not reported | gloo on a CPU, NCCL on two H200s | measured, recorded: `12_all_reduce` |
# | scaling to two GPUs | figures 6a, 8, 9a | the 8B: 1.4 times one card, `neo` 1.5 | recorded: `12_scaling` |
