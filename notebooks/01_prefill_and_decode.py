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
# # Prefill and decode: one model, two kinds of work
#
# Generating text has two phases. *Prefill* reads the whole prompt at once. *Decode* then writes one token at a time.
# They run the same layers with the same weights, and yet they behave like two different programs: one is limited by
# how fast your machine multiplies, the other by how fast it reads memory. NEO lives off that difference, so let us
# see it.
#
# You will
# 1. write the forward pass of a Llama in fewer than twenty lines, from the package's pieces;
# 2. find the waste in it, and remove it with a KV cache of your own;
# 3. measure both phases, and place each operation on a roofline;
# 4. see why engines batch iteration by iteration, and what a reader feels of it (TTFT and TPOT).
#
# **Takes** 25 minutes to read and about a minute to run on 2 cores. **Memory** 2 GB. **Needs** nothing beyond the
# package. On a machine without a GPU all times are the CPU's. The shapes of the curves are what to look at; a GPU moves
# them by two orders of magnitude and keeps the shapes.

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
# ## 1. A forward pass from pieces
#
# A Llama layer is cut in three around attention. `pre_attention` and `post_attention` treat each token by itself; only
# attention, between them, lets tokens look at one another.

# %%
import time

import matplotlib.pyplot as plt
import torch

from neo_lite import SamplingParams, Timeline, attention, build_engine, exercise, load_model, metrics, plots
from neo_lite.config import MODELS

# %% [markdown]
# The model is the one of the tour.

# %%
plots.use_style()
plt.rcParams["figure.autolayout"] = True
torch.manual_seed(0)
model = load_model("smollm2", dtype="float32")
shape, tokenizer = model.config, model.tokenizer
card = machine.gpu()
where = f"{card['name'] if card else machine.cpu_name()}, torch threads: {torch.get_num_threads()}"
print(shape.num_layers, "layers,", shape.hidden_size, "hidden,", where)

# %% [markdown]
# Attention first, written out. Each query is compared with every key (`scores`), may not look into the future (`mask`),
# and takes the weighted mean of the values. Three query heads share one KV head here (GQA), hence `repeat_interleave`.


# %%
def toy_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [new, q_heads, d] are the last tokens of k, v [all, kv_heads, d] -> [new, q_heads, d]."""
    new, total = len(q), len(k)
    k, v = (t.repeat_interleave(shape.group_size, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q, k) * shape.head_dim**-0.5
    mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return torch.einsum("hnt,thd->nhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


# %% [markdown]
# Now the whole model. Note how little of this knows about attention.


# %%
@torch.inference_mode()
def forward(tokens: list[int]) -> torch.Tensor:
    """All tokens through all layers -> the logits after the last one [vocabulary]."""
    x = model.embed(torch.tensor(tokens, device=model.device))
    rope = model.rope(torch.arange(len(tokens), device=model.device))
    for layer in range(shape.num_layers):
        q, k, v = model.pre_attention(layer, x, rope)
        x = model.post_attention(layer, toy_attention(q, k, v), x)
    return model.head(x[-1:])[0]


# %% [markdown]
# Greedy generation is a loop around it:

# %%
prompt = tokenizer.encode("Gravity is")
text = list(prompt)
for _ in range(12):
    text.append(int(forward(text).argmax()))
print(tokenizer.decode(text))

# %% [markdown]
# A language model in sixteen lines. Does it say what the engine says? And does our attention agree with the package's
# definition, `attention.reference`, which computes in float64?

# %%
engine = build_engine(model, gpu_kv_tokens=1024, cpu_kv_tokens=64)
request = engine.add(prompt, SamplingParams(max_tokens=12))
engine.run()
assert text[len(prompt) :] == request.output
print("The same", len(request.output), "tokens.")

# %% [markdown]
# And the attention, on random numbers (the block table is notebook 02's subject; here it has one block):

# %%
q = torch.randn(5, shape.num_heads, shape.head_dim, device=model.device)
k, v = (torch.randn(5, shape.num_kv_heads, shape.head_dim, device=model.device) for _ in range(2))
one_block = [t.transpose(0, 1)[None] for t in (k, v)]  # [1 block, kv_heads, 5 tokens, d]
view = attention.View((5,), torch.tensor([5]), torch.zeros(1, 1, dtype=torch.int32))
torch.testing.assert_close(toy_attention(q, k, v), attention.reference(q, k, v, *one_block, view), atol=1e-5, rtol=1e-5)
print("The same attention.")

# %% [markdown]
# ## 2. The waste, and the cache
#
# To write token 100, `forward` computes all 99 before it once more. How much of that is new? Before you run the next
# cell: if one token is appended, which of the earlier tokens' keys and values change?


# %%
@torch.inference_mode()
def keys_of_layer(tokens: list[int], wanted: int) -> torch.Tensor:
    x = model.embed(torch.tensor(tokens, device=model.device))
    rope = model.rope(torch.arange(len(tokens), device=model.device))
    for layer in range(wanted + 1):
        q, k, v = model.pre_attention(layer, x, rope)
        x = model.post_attention(layer, toy_attention(q, k, v), x)
    return k


# %% [markdown]
# The last layer sees everything that happened below it, so it is the one to look at:

# %%
before, after = keys_of_layer(text[:-1], 29), keys_of_layer(text, 29)
print("largest change of an old key in the last layer:", (after[:-1] - before).abs().max().item())
torch.testing.assert_close(after[:-1], before, atol=1e-3, rtol=1e-3)

# %% [markdown]
# None (beyond rounding). The mask forbids looking ahead, so nothing that comes later can change what came before. Keys
# and values can be kept. That is the KV cache, and it is one list for each layer.


# %%
@torch.inference_mode()
def forward_cached(new: list[int], cache: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Only the new tokens through the layers; `cache` holds (k, v) of each layer and grows."""
    start = len(cache[0][0])
    x = model.embed(torch.tensor(new, device=model.device))
    rope = model.rope(torch.arange(start, start + len(new), device=model.device))
    for layer in range(shape.num_layers):
        q, k, v = model.pre_attention(layer, x, rope)
        cache[layer] = tuple(torch.cat(pair) for pair in zip(cache[layer], (k, v)))
        x = model.post_attention(layer, toy_attention(q, *cache[layer]), x)
    return model.head(x[-1:])[0]


# %% [markdown]
# It starts with nothing:


# %%
def empty_cache() -> list[tuple[torch.Tensor, torch.Tensor]]:
    nothing = torch.empty(0, shape.num_kv_heads, shape.head_dim, device=model.device)
    return [(nothing, nothing)] * shape.num_layers


# %% [markdown]
# The first call gets the whole prompt, the later ones a single token each. *That* is the difference between prefill and
# decode: nothing but the number of new tokens.

# %%
cache = empty_cache()
logits = forward_cached(prompt, cache)  # prefill
cached_text = list(prompt)
for _ in range(12):
    cached_text.append(int(logits.argmax()))
    logits = forward_cached(cached_text[-1:], cache)  # decode
assert cached_text == text

# %% [markdown]
# How large is it? The formula of the tour should say the same.

# %%
kv_bytes = sum(t.nbytes for pair in cache for t in pair)
assert kv_bytes == len(cached_text) * shape.kv_bytes_per_token("float32")
print(f"the same text; the cache holds {kv_bytes / 1024:.0f} KiB for {len(cached_text)} tokens")

# %% [markdown]
# What is it worth? We time the next token after texts of several lengths, both ways. Predict the two curves first.


# %%
def seconds(call, repeats: int = 3) -> float:
    """The fastest of some calls; on a GPU, the work included and not only its launch."""
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return min(times)


# %% [markdown]
# The next token after 16, 64, 128 and 256 tokens:

# %%
lengths, rows = (16, 64, 128, 256), []
for length in lengths:
    tokens, cache = [100 + i for i in range(length)], empty_cache()
    forward_cached(tokens[:-1], cache)
    full = seconds(lambda tokens=tokens: forward(tokens))
    rows.append((full, seconds(lambda t=tokens, c=cache: forward_cached(t[-1:], list(c)), 8)))
    print(f"{length:4} tokens: {rows[-1][0] * 1e3:6.0f} ms without, {rows[-1][1] * 1e3:5.0f} ms with the cache")

# %% [markdown]
# As a picture:

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.2))
for column, (name, colour, marker) in enumerate((("recompute all", "cpu", "o"), ("KV cache", "gpu", "s"))):
    ax.plot(lengths, [row[column] * 1e3 for row in rows], marker + "-", color=plots.COLORS[colour], label=name)
ax.set(xlabel="tokens so far", ylabel="ms for the next token", xlim=0, ylim=0)
ax.legend()
plots.save_figure(fig, "01_kv_cache_pays", "measured", where)
plt.show()

# %% [markdown]
# Without the cache each token costs more than the one before; with it the cost hardly moves. The price is memory, and
# notebook 02 is about paying it well.
#
# ## 3. Two phases, measured
#
# From here on the package's engine does the work. Its timeline records each stage, so one iteration tells us where its
# time went: `linear` (pre + post), and attention.

# %%
STAGES = {"pre": "linear", "post": "linear", "prefill_attn": "prefill", "gpu_attn": "decode", "cpu_attn": "decode"}


def iteration(engine) -> dict[str, float]:
    """Seconds of one engine step: in all, and in each kind of stage."""
    start_s = time.perf_counter()
    engine.step()
    took = {"all": time.perf_counter() - start_s, "linear": 0.0, "prefill": 0.0, "decode": 0.0}
    for event in engine.timeline.events:
        if event.name in STAGES and event.start_s >= start_s:
            took[STAGES[event.name]] += event.duration_s
    return took


# %% [markdown]
# And an engine with a batch of equal requests, none of them begun yet:


# %%
def loaded_engine(batch: int, prompt_tokens: int, **settings):
    """An engine with a batch of equal requests, none of them begun."""
    room = batch * (prompt_tokens + 32)
    pools = dict(gpu_kv_tokens=room, cpu_kv_tokens=room, max_batched_tokens=4096, cpu_threads=torch.get_num_threads())
    engine = build_engine(model, timeline=Timeline(), **pools | settings)
    for i in range(batch):
        prompt = [1000 + i] + [100 + j for j in range(prompt_tokens - 1)]
        engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    return engine


# %% [markdown]
# Prefill: one request, prompts of growing length. Decode: growing batches, each request with 32 tokens behind it. In
# both cases *n* tokens go through the layers in one iteration. For prefill they belong to one request; for decode to
# n requests. Same n, same matrix products. Which will be slower?


# %%
def keep_quickest(best: dict[int, dict[str, float]], n: int, took: dict[str, float]) -> None:
    """Of several rounds, the one that the rest of the machine disturbed least."""
    best[n] = min(best.get(n, took), took, key=lambda times: times["all"])


counts, prefills, decodes = (1, 4, 16, 64, 256), {}, {}
engines = {n: loaded_engine(n, 32) for n in counts[:-1]}
for engine in engines.values():
    engine.step()  # the prompts: what comes now are decodes

# %% [markdown]
# Five rounds, prefills and decodes in turn, so that both meet the same machine:

# %%
for _ in range(5):
    for n in counts:
        keep_quickest(prefills, n, iteration(loaded_engine(1, n)))
        if n in engines:
            keep_quickest(decodes, n, iteration(engines[n]))

# %% [markdown]
# Side by side:

# %%
for n in counts:
    decode = f"decode of {n:3} requests {decodes[n]['all'] * 1e3:5.0f} ms" if n in decodes else ""
    print(f"prefill of {n:3} tokens {prefills[n]['all'] * 1e3:5.0f} ms    {decode}")

# %% [markdown]
# Two views of it: milliseconds for the iteration, and tokens a second. Both axes are logarithmic: a straight line up
# means "twice the tokens, twice the time".

# %%
from matplotlib import ticker


def plain_numbers(axis) -> None:
    """1, 2, 5, 10, 20 ... on a logarithmic axis, without exponents."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


# %% [markdown]
# The drawing:

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
styles = (
    ("prefill: n tokens of one prompt", prefills, "gpu", "o"),
    ("decode: one token of n requests", decodes, "cpu", "s"),
)
for name, times, colour, marker in styles:
    style = dict(color=plots.COLORS[colour], label=name)
    axes[0].plot(list(times), [t["all"] * 1e3 for t in times.values()], marker + "-", **style)
    axes[1].plot(list(times), [n / t["all"] for n, t in times.items()], marker + "-", **style)
for ax, label in zip(axes, ("ms for the iteration", "tokens a second")):
    ax.set(xscale="log", yscale="log", xlabel="tokens in the iteration, n", ylabel=label)
    ax.set_xticks(counts, counts)
    plain_numbers(ax.yaxis)
axes[0].legend(fontsize=8)
plots.save_figure(fig, "01_two_phases", "measured", where)
plt.show()

# %% [markdown]
# - Four tokens cost nowhere near four times as much as one: the weights must be read in any case. So a lone decode is a
#   waste, and *batching* is nearly free at first. On a GPU this goes on for hundreds of tokens.
# - At equal n, decode pays for the same matrix products and then for n separate caches, one call or one loop each.
# - A long prompt fills the machine by itself. For prefill there is little to gain from a batch.
# - So decode needs many requests at once. Many requests need much KV. There is the memory crisis (notebook 03).
#
# ## 4. Why: the roofline
#
# An operation must do arithmetic (FLOPs) and move data (bytes). Their ratio is its **arithmetic intensity**. A machine
# can do so many FLOPs a second and read so many bytes a second, so the best it can reach is
#
# `FLOP/s = min(peak FLOP/s, intensity x bytes/s)`
#
# Count both for one layer. A matrix product with a weight matrix of P numbers does 2 P FLOPs a token and reads P
# numbers *once*, however many tokens share them. Decode attention, for each token of context, multiplies and adds for
# each query head, and reads one K and one V for each KV head.


# %%
def linear_work(tokens: int, config=shape, number_bytes: int = 4) -> tuple[float, float]:
    """FLOPs and bytes of the matrix products of one layer (weights only: activations are small beside them)."""
    return 2 * config.layer_parameters * tokens, config.layer_parameters * number_bytes


# %% [markdown]
# For attention the context counts, and both numbers follow from it:


# %%
def decode_work(seq_len: int, config=shape, number_bytes: int = 4) -> tuple[float, float]:
    """FLOPs and bytes of one layer's attention for one new token: q.k and weights.v; K and V read once."""
    flops = 2 * 2 * seq_len * config.num_heads * config.head_dim
    return flops, 2 * seq_len * config.num_kv_heads * config.head_dim * number_bytes


# %% [markdown]
# The ratio:


# %%
def intensity(work: tuple[float, float]) -> float:
    return work[0] / work[1]


# %% [markdown]
# Now a question that decides everything. Batching raises the intensity of the matrix products. Does it raise that of
# decode attention? Does a longer context?

# %%
llama2, llama31 = MODELS["llama-2-7b"], MODELS["llama-3.1-8b"]
print("FLOPs per byte, fp16:")
for n in (1, 16, 256):
    print(f"  matrix products, {n:4} tokens          {intensity(linear_work(n, llama31, 2)):6.0f}")

# %% [markdown]
# And decode attention, with short and long contexts:

# %%
for config in (llama2, llama31):
    for seq_len in (100, 4000):
        value = intensity(decode_work(seq_len, config, 2))
        print(f"  decode attention, {seq_len:4} of context  {value:6.0f}   {config.name}")

# %% [markdown]
# Neither does. Each request has *its own* KV, read for one token and then put away: a batch of 100 does 100 times the
# work and reads 100 times the bytes. The intensity is `2 x group / bytes per number`, and no scheduler can change it.
# Decode attention is bound by memory on every machine.
#
# Let us see this machine's roof. Memory bandwidth is what the environment report measured; the peak comes from a large
# matrix product.

# %%
square = torch.randn(1024, 1024, device=model.device)
peak_flops = 2 * 1024**3 / seconds(lambda: square @ square, 20)

# %% [markdown]
# How fast it reads:

# %%
if card:
    block = torch.ones(1 << 28, dtype=torch.float32, device=model.device)
    read_bytes_s = block.nbytes / seconds(block.sum, 5)
else:
    read_bytes_s = machine.measure_read_bandwidth(torch.get_num_threads(), repeats=10)["gb_per_s"] * 1e9
bend = peak_flops / read_bytes_s
print(f"{peak_flops / 1e9:.0f} GFLOP/s, {read_bytes_s / 1e9:.0f} GB/s: the roof bends at {bend:.1f} FLOP/byte")

# %% [markdown]
# And the operations, from the iterations that we measured above, and a decode with a longer context in mode `simple`,
# so that the package's CPU kernel serves it.

# %%
engine = loaded_engine(4, 256, mode="simple")
engine.step()
long_decode = min((iteration(engine) for _ in range(7)), key=lambda t: t["decode"])

# %% [markdown]
# FLOPs over seconds, for all layers together:

# %%
points = []
for n, times in prefills.items():
    flops, moved = linear_work(n)
    points.append((f"{n}", flops / moved, flops * shape.num_layers / times["linear"], "linear"))
flops, moved = decode_work(4 * 258)
points.append(("decode attention", flops / moved, flops * shape.num_layers / long_decode["decode"], "attention"))

# %% [markdown]
# The table, and then the picture:

# %%
for name, x, y, kind in points:
    print(f"{kind:10} {name:16} {x:6.1f} FLOP/byte {y / 1e9:7.1f} GFLOP/s")

# %% [markdown]
# Put on the roofline. The blue line is what the machine could do at best.

# %%
fig, ax = plt.subplots(figsize=(7, 3.8))
xs = torch.logspace(-1, 2.7, 100)
ax.plot(
    xs,
    (xs * read_bytes_s).clamp(max=peak_flops) / 1e9,
    color=plots.COLORS["gpu"],
    label="roof: min(peak, intensity x bandwidth)",
)
for name, x, y, kind in points:
    linear = kind == "linear"
    ax.plot(x, y / 1e9, "o" if linear else "D", color="#333333" if linear else plots.COLORS["cpu"], ms=6)
    ax.annotate(f"n = {name}" if linear else "", (x, y / 1e9), (7, -10), textcoords="offset points", fontsize=8)
ax.plot([], [], "o", color="#333333", label="matrix products, n tokens")
ax.plot([], [], "D", color=plots.COLORS["cpu"], label="decode attention on the CPU")
ax.set(
    xscale="log",
    yscale="log",
    xlabel="arithmetic intensity (FLOP/byte)",
    ylabel="GFLOP/s",
    title="This machine",
    ylim=1,
)
plain_numbers(ax.yaxis)
plain_numbers(ax.xaxis)
ax.legend(fontsize=8, loc="lower right")
plots.save_figure(fig, "01_roofline_here", "measured", where)
plt.show()

# %% [markdown]
# The matrix products climb with n, towards the flat roof. Decode attention belongs to the slope, and no batch will move
# it to the right. (A roof that was measured is not a law: a torch sum does not read as fast as a tuned kernel, and one
# matrix product need not be the fastest of all, so a point may lie a little above it. Below it lie those with overhead
# at every call, and all of them when the machine has other things to do.)
#
# ### The paper's argument in one picture
#
# Two roofs, with the paper's figures for an A10G and for an x86 server. The height between them is the GPU's advantage.
# It depends on where you stand.

# %%
machines = {
    "A10G (600 GB/s, 125 TFLOP/s)": (600e9, 125e12, "gpu"),
    "x86 server (200 GB/s, 1.2 TFLOP/s)": (200e9, 1.2e12, "cpu"),
}

# %% [markdown]
# Two places to stand at: decode attention, and matrix products over 256 tokens, both for Llama-3.1-8B in fp16.

# %%
places = {"decode attention,\nLlama-3.1-8B": intensity(decode_work(1000, llama31, 2)),
          "matrix products,\n256 tokens": intensity(linear_work(256, llama31, 2))}  # fmt: skip
fig, ax = plt.subplots(figsize=(7, 3.8))
xs = torch.logspace(-1, 3.5, 200, dtype=torch.float64)
for name, (bandwidth, peak, colour) in machines.items():
    ax.plot(xs, (xs * bandwidth).clamp(max=peak) / 1e12, color=plots.COLORS[colour], label=name, linewidth=2)
for name, x in places.items():
    low, high = sorted(min(x * bandwidth, peak) / 1e12 for bandwidth, peak, _ in machines.values())
    ax.annotate("", (x, high), (x, low), arrowprops=dict(arrowstyle="<->", color="#333333"))
    ax.text(x * 1.15, (low * high) ** 0.5, f"{high / low:.0f} x", va="center", weight="bold")
    ax.text(x * 0.9, low * 0.75, name, va="top", fontsize=8)
ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="TFLOP/s", ylim=(0.015, 400))
ax.legend(fontsize=8, loc="upper left")
plots.save_figure(fig, "01_roofline_paper", "paper", "bandwidths and peaks as printed")
plt.show()

# %% [markdown]
# On the flat part the GPU wins by a factor of a hundred. On the slope it wins by three. So if something must leave the
# GPU, let it be the decode attention: it loses least, and it takes the KV cache, the very thing that fills the memory,
# along with it.
#
# ## 5. Iteration-level batching
#
# Requests differ in length. Suppose that four can run at a time. A *static* batch starts four, waits for the longest
# and then starts the next four. An *iteration-level* batch (Orca, 2022) decides anew in each iteration: who is done
# leaves, who waits comes in. Here are both, counting iterations.

# %%
wanted_tokens = (4, 20, 6, 12, 5, 16, 8, 3)


def static_iterations(lengths: tuple[int, ...], seats: int) -> int:
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


# %% [markdown]
# The other one: a seat is taken again as soon as it is free.


# %%
def continuous_iterations(lengths: tuple[int, ...], seats: int) -> int:
    free_at = [0] * seats  # the iteration in which each seat is free again
    for length in lengths:
        seat = free_at.index(min(free_at))
        free_at[seat] += length
    return max(free_at)


# %% [markdown]
# Which one wins, and by how much?

# %%
print("static:         ", static_iterations(wanted_tokens, 4), "iterations")
print("iteration-level:", continuous_iterations(wanted_tokens, 4), "iterations")

# %% [markdown]
# The engine works in the second way, with `max_seqs=4`. Does it take as many iterations as the toy says?

# %%
engine = build_engine(model, gpu_kv_tokens=2048, cpu_kv_tokens=64, max_seqs=4)
starts = ("Gravity is", "A llama is", "The sea is", "Bread is", "Snow is", "A poem is", "The moon is", "Tea is")
requests = [
    engine.add(tokenizer.encode(start), SamplingParams(max_tokens=count, ignore_eos=True))
    for start, count in zip(starts, wanted_tokens)
]

# %% [markdown]
# Run, and compare:

# %%
engine.run()
assert engine.iterations == continuous_iterations(wanted_tokens, 4)
print(engine.iterations, "iterations;", starts[3] + tokenizer.decode(requests[3].output))

# %% [markdown]
# ## 6. What a reader feels: TTFT and TPOT
#
# Nobody sees iterations. One sees how long it takes until the first word (**TTFT**, time to first token: waiting and
# prefill) and how quickly the rest follows (**TPOT**, time per output token after the first). Both come from the
# times at which tokens were committed, and the package has one definition of each, in `metrics`.


# %%
def toy_tpot_s(request) -> float:
    times = request.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1)


# %% [markdown]
# One line for each request:

# %%
for request in requests:
    assert metrics.ttft_s(request) == request.token_times_s[0] - request.arrival_s
    assert metrics.tpot_s(request) == toy_tpot_s(request)
    print(f"r{request.id}: TTFT {metrics.ttft_s(request) * 1e3:5.0f} ms, TPOT {metrics.tpot_s(request) * 1e3:4.0f} ms")

# %% [markdown]
# All eight asked at the same moment. Grey is waiting (for a seat, then for the prefill); each tick is a token.

# %%
fig, ax = plt.subplots(figsize=(8, 3.4))
for request in requests:
    times = [(t - requests[0].arrival_s) * 1e3 for t in request.token_times_s]
    ax.barh(request.id, times[0], color=plots.COLORS["idle"], height=0.6)
    ax.barh(request.id, times[-1] - times[0], left=times[0], color="#9dbce0", height=0.6)
    ax.plot(times, [request.id] * len(times), "|", color=plots.COLORS["gpu"], ms=11)
ax.set(xlabel="ms since all eight arrived", xlim=0)
ax.set_yticks(range(8), [f"r{i}: {n} tokens" for i, n in enumerate(wanted_tokens)])
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
plots.save_figure(fig, "01_iteration_level_batching", "measured", f"four seats; {where}")
plt.show()

# %% [markdown]
# When r0 has said its four tokens, r4 takes its seat in the very next iteration. The ticks of all running requests
# stand in line, since they share their iterations: a slow iteration (say, with a long prefill in it) is felt by
# everyone.
#
# The **paper's** figure 6 uses yet another number: end-to-end time, the queue included, divided by the output tokens
# (`metrics.per_token_latency_s`). When you compare systems, ask which of them is meant.

# %%
summary = metrics.summary(requests)
for name in ("requests_per_s", "output_tokens_per_s", "per_token_latency_s", "ttft_p50_s", "tpot_p50_s"):
    print(f"{name:22} {summary[name]:8.3f}")

# %% [markdown]
# ## Summary
#
# - Prefill and decode are one computation with many or with one new token a request. The KV cache makes decode
#   possible: what was computed for earlier tokens does not change.
# - Matrix products read the weights once for all tokens of an iteration. Batching is what makes decode worth it.
# - Decode attention has a fixed, low intensity (`2 x group / bytes`), so memory bandwidth bounds it, and there the
#   CPU is 3 times behind, not 100 times.
# - Engines decide in each iteration who runs. TTFT, TPOT and per-token latency are three different things.
#
# ## Exercises
#
# **Exercise 1.** The KV cache in int8 takes one byte a number. What is the intensity of decode attention for
# Llama-3.1-8B then (32 query heads, 8 KV heads)?

# %% tags=["exercise"]
int8_intensity = ...  # FLOP per byte

# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("1: intensity with an int8 cache")
def solved_1():
    assert int8_intensity is not ..., "Fill in the blank."
    hint = "2 x group / bytes per number; the group is 32 / 8."
    assert abs(int8_intensity - intensity(decode_work(1000, llama31, 1))) < 1e-6, hint


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# int8_intensity = 2 * (32 / 8) / 1
# ```
#
# 8 FLOP/byte: twice that of fp16, still far to the left of any bend.
#
# </details>

# %% [markdown]
# **Exercise 2.** With how many tokens in an iteration do the matrix products leave the slope of the A10G's roof (fp16,
# 600 GB/s, 125 TFLOP/s) and become bound by arithmetic?

# %% tags=["exercise"]
tokens_at_the_bend = ...

# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("2: tokens at the bend")
def solved_2():
    assert tokens_at_the_bend is not ..., "Fill in the blank."
    bend = 125e12 / 600e9
    assert abs(tokens_at_the_bend - bend) <= 1, "In fp16, n tokens have an intensity of n. Where does the roof bend?"


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# tokens_at_the_bend = 125e12 / 600e9
# ```
#
# About 208. With 864 tokens of KV in all, as on the paper's T4, decode will never come near its card's bend.
#
# </details>

# %% [markdown]
# **Exercise 3.** Write `per_token_latency(request)`, the paper's figure 6: from arrival to the end, over the output
# tokens. A request has `arrival_s`, `finished_s` and `output`.


# %% tags=["exercise"]
def per_token_latency(request) -> float:
    return ...


# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("3: per-token latency")
def solved_3():
    for request in requests:
        wanted = metrics.per_token_latency_s(request)
        assert abs(per_token_latency(request) - wanted) < 1e-9, "(finished_s - arrival_s) / number of output tokens"


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def per_token_latency(request) -> float:
#     return (request.finished_s - request.arrival_s) / len(request.output)
# ```
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | GPU / CPU, arithmetic | 125 / 1.2 TFLOP/s: about 100 x | section 4, last figure | paper (A10G, x86 server) |
# | GPU / CPU, bandwidth | 600 / 200 GB/s: 3 x | this host: environment report | paper; measured |
# | decode attention bound by memory | stated | intensity counted, point on the slope | counted; measured |
# | throughput grows with the batch | almost linear up to hundreds | tokens a second against n, section 3 | measured |
# | iteration-level batching | used, after Orca | asserted against a toy, section 5 | measured |
# | per-token latency | end-to-end / output tokens | the same, in `metrics` | paper, figure 6 |
