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
# # The paged KV cache: notes that grow, in a notebook of loose leaves
#
# A request's KV cache grows by one token in each iteration, and nobody knows where it will end. Reserve too much and
# the memory stands empty; reserve too little and there is no room to grow. vLLM's answer (2023) was an old one from
# operating systems: cut memory into small *blocks* and give each request blocks as it needs them, wherever they lie.
# NEO has two such pools, one on the GPU and one in host memory.
#
# You will
# 1. watch contiguous reservations waste a pool, and measure how much;
# 2. write a block allocator in 15 lines that does exactly what the package's does;
# 3. follow a token to its slot, through a block table, and compute attention over scattered blocks;
# 4. move a request from one pool to the other, whole;
# 5. overfill a pool with real requests, and watch the scheduler park, resume and drop them, while every word of
#    their texts stays the same.
#
# **Takes** 25 minutes to read and under a minute to run on 2 cores. **Memory** 1.5 GB. **Needs** nothing beyond the
# package. Nearly all of it is bookkeeping, which is the same on every machine; without a GPU the "GPU pool" is host
# memory too.

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
# ## 1. What contiguous memory costs
#
# Let us look at a pool for 4,096 tokens. Requests come with prompts of about 370 tokens and stop after about 45, as in
# the paper's OSC workload, but the server cannot know that: they may ask for up to 256.

# %%
from collections import deque

import matplotlib.pyplot as plt
import numpy as np
import torch

# %% [markdown]
# From the package we take the allocator, the pools and the attention backends, to hold our toys against.
# %%
from neo_lite import EngineConfig, NeoLiteError, SamplingParams, attention, build_engine, exercise, load_model, plots
from neo_lite.blocks import Blocks
from neo_lite.kv_cache import KVCache, KVPool
from neo_lite.request import Request
from neo_lite.workload import synthetic

# %% [markdown]
# Everything random here is seeded, so yours are the same as mine.

# %%
plots.use_style()
plt.rcParams["figure.autolayout"] = True
torch.manual_seed(0)
POOL_TOKENS, BLOCK, MOST_OUTPUT = 4096, 16, 256
arrivals = synthetic(200, prompt_tokens=372, output_tokens=45, spread=0.5, seed=1)
print("first three (prompt, output):", [(a.prompt_tokens, a.output_tokens) for a in arrivals[:3]])

# %% [markdown]
# The contiguous pool gives each request one piece, as long as it may ever become, in the first hole that is large
# enough.


# %%
class Contiguous:
    def __init__(self) -> None:
        self.taken: dict[int, tuple[int, int]] = {}  # request -> its piece [low, high)

    def add(self, name: int, tokens: int) -> bool:
        low = 0
        for start, end in [*sorted(self.taken.values()), (POOL_TOKENS, POOL_TOKENS)]:
            if start - low >= tokens + MOST_OUTPUT:
                self.taken[name] = (low, low + tokens + MOST_OUTPUT)
                return True
            low = end
        return False

    def grow(self, name: int, tokens: int) -> bool:
        return True  # it has its room already

    def release(self, name: int) -> None:
        del self.taken[name]


# %% [markdown]
# ## 2. An allocator of blocks
#
# The alternative: blocks of 16 tokens, a queue of free ones, and for each request a list of those it has, its *block
# table*. A request takes a block when the last one is full, from anywhere, and gives all of them back when it ends.


# %%
class ToyBlocks:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size, self.free = block_size, deque(range(num_blocks))
        self.tables: dict[int, list[int]] = {}

    def grow(self, name: int, tokens: int) -> bool:
        table = self.tables.setdefault(name, [])
        missing = max(0, -(-tokens // self.size) - len(table))  # -(-a // b): rounded up
        if missing > len(self.free):
            return False
        table += [self.free.popleft() for _ in range(missing)]
        return True

    def release(self, name: int) -> None:
        self.free.extend(self.tables.pop(name, []))


# %% [markdown]
# The package's `Blocks` keeps two of these, for GPU and CPU, and writes the table into the request. Do they agree? Two
# thousand random steps, and after each of them the same tables and the same number of free blocks:

# %%
rng = np.random.default_rng(0)
toy, blocks = ToyBlocks(64, BLOCK), Blocks(num_gpu_blocks=64, num_cpu_blocks=0, block_size=BLOCK)
requests = [Request(name, (1,)) for name in range(12)]

# %% [markdown]
# The same steps to both:

# %%
refused = 0
for _ in range(2000):
    request, tokens = requests[rng.integers(12)], int(rng.integers(1, 200))
    if rng.random() < 0.7:
        granted = blocks.grow(request, tokens)
        refused += not granted
        assert toy.grow(request.id, tokens) == granted
    else:
        toy.release(request.id), blocks.release(request)
    assert toy.tables.get(request.id, []) == request.block_table and len(toy.free) == blocks.free("gpu")
print("agreed 2000 times;", refused, "requests for more were refused by both")

# %% [markdown]
# Now the same requests through both pools. A paged pool lets somebody in if the prompt fits and one block is left for
# everyone who is there (so that nobody is stuck at once; the package's scheduler has the same rule).


# %%
class Paged(ToyBlocks):
    def add(self, name: int, tokens: int) -> bool:
        spare = len(self.free) - -(-tokens // self.size) - len(self.tables)
        return spare >= 0 and self.grow(name, tokens)


# %% [markdown]
# A server in a dozen lines: who is done leaves, who fits comes in, everyone grows by a token. It notes how many
# tokens are really *written*. Predict: what share of the pool will that be, for each?


# %%
def serve(pool: Contiguous | Paged, steps: int) -> tuple[dict[int, int], list[int]]:
    """request -> tokens written, at the end; and the tokens written after each step."""
    waiting, running, history = deque(enumerate(arrivals)), {}, []
    for _ in range(steps):
        for name in [n for n, t in running.items() if t == arrivals[n].prompt_tokens + arrivals[n].output_tokens]:
            pool.release(name)
            del running[name]
        while waiting and pool.add(waiting[0][0], waiting[0][1].prompt_tokens):
            name, arrival = waiting.popleft()
            running[name] = arrival.prompt_tokens
        for name in running:
            running[name] += pool.grow(name, running[name] + 1)
        history.append(sum(running.values()))
    return running, history


# %% [markdown]
# Both, for 300 iterations:

# %%
contiguous, paged = Contiguous(), Paged(POOL_TOKENS // BLOCK, BLOCK)
written, history = {}, {}
for name, pool in (("contiguous", contiguous), ("paged", paged)):
    written[name], history[name] = serve(pool, 300)
    share = np.mean(history[name]) / POOL_TOKENS
    print(f"{name:10} {len(written[name]):2} requests at the end; {share:.0%} of the pool written, on average")

# %% [markdown]
# To see where the rest went, we draw each pool as 256 cells of 16 tokens. Colour says whose tokens lie there; grey is
# reserved and unwritten; white is free.


# %%
def shades(names: list[int]) -> dict[int, tuple[float, float, float]]:
    """A colour for each request, far apart for neighbours."""
    spread = np.linspace(0.05, 0.95, len(names))
    order = np.argsort([(i * 7) % max(1, len(names)) for i in range(len(names))], kind="stable")
    return {name: plt.cm.viridis(spread[i])[:3] for name, i in zip(sorted(names), order)}


# %% [markdown]
# The contiguous map follows each piece from its start; the paged map follows the block tables.

# %%
GREY = (0.8, 0.8, 0.8)
cells = {name: np.ones((POOL_TOKENS // BLOCK, 3)) for name in written}
colours = {name: shades(list(running)) for name, running in written.items()}
for name, (low, high) in contiguous.taken.items():
    cells["contiguous"][low // BLOCK : -(-high // BLOCK)] = GREY
    cells["contiguous"][low // BLOCK : (low + written["contiguous"][name]) // BLOCK] = colours["contiguous"][name]

# %% [markdown]
# The paged map in two lines:

# %%
for name, table in paged.tables.items():
    cells["paged"][table] = colours["paged"][name]

# %% [markdown]
# And beside them the share written, over time.

# %%
fig, axes = plt.subplots(1, 3, figsize=(9.5, 3.3), width_ratios=(1, 1, 1.5))
for ax, (name, map_) in zip(axes, cells.items()):
    ax.imshow(map_.reshape(16, 16, 3))
    ax.set_xticks(np.arange(-0.5, 16), [])
    ax.set_yticks(np.arange(-0.5, 16), [])
    ax.grid(color="white", linewidth=0.8, alpha=1)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(f"{name}: {len(written[name])} requests", fontsize=10)
for name, colour in (("contiguous", "cpu"), ("paged", "gpu")):
    axes[2].plot(100 * np.array(history[name]) / POOL_TOKENS, color=plots.COLORS[colour], label=name)
axes[2].set(xlabel="iteration", ylabel="% of the pool written", ylim=(0, 100), xlim=0)
axes[2].legend(loc="lower right")
plots.save_figure(fig, "02_fragmentation", "simulated", "4,096 tokens, blocks of 16; grey: reserved, white: free")
plt.show()

# %% [markdown]
# Grey is *internal* fragmentation: kept for tokens that mostly never come. White between the pieces is *external*
# fragmentation: holes too small for anyone. In the paged pool only the last block of each request can have empty
# places, and every free block is as good as any other.
#
# ## 3. Block tables and slots
#
# The price is that a request's tokens are no longer neighbours. Token `p` lies at place `p % block_size` of block
# `block_table[p // block_size]`. The two together make its **slot**, the number of a place in the pool.


# %%
def slot(block_table: list[int], position: int, block_size: int) -> int:
    return block_table[position // block_size] * block_size + position % block_size


print([slot([5, 2, 7], p, 4) for p in range(10)])

# %% [markdown]
# Let us see it with words. Two sentences in a pool of 8 blocks of 4:

# %%
model = load_model("smollm2", dtype="float32")
shape, tokenizer = model.config, model.tokenizer
sentences = ["Once upon a time there was a very small llama", "The sea was quiet that evening"]
tables = [[5, 2, 7], [0, 3]]

# %% [markdown]
# Their tokens, and what holds them:

# %%
words = [[tokenizer.decode([t]).strip() for t in tokenizer.encode(s)] for s in sentences]
print([len(w) for w in words], "tokens, in", [len(t) for t in tables], "blocks")
assert all(len(w) <= 4 * len(t) for w, t in zip(words, tables))

# %% [markdown]
# Each column is a block, each field a slot with its number.

# %%
owners = {block: i for i, table in enumerate(tables) for block in table}
fills = {0: "#c9dcf2", 1: "#f6dcbc", None: "#f2f2f2"}
text_at = {slot(t, p, 4): word for t, w in zip(tables, words) for p, word in enumerate(w)}

# %% [markdown]
# Now draw them:

# %%
fig, ax = plt.subplots(figsize=(9, 2.7))
for number in range(32):
    block, place = divmod(number, 4)
    ax.add_patch(plt.Rectangle((block, 3 - place), 0.94, 0.94, color=fills[owners.get(block)]))
    ax.text(block + 0.47, 3.42 - place, text_at.get(number, ""), ha="center", va="center", fontsize=9)
    ax.text(block + 0.04, 3.72 - place, number, fontsize=6, color="#777777")
ax.set(xlim=(-0.1, 8), ylim=(-0.1, 4.1), yticks=[], title="The pool: 8 blocks of 4 slots")
ax.set_xticks(np.arange(8) + 0.47, [f"block {i}" for i in range(8)])
ax.grid(visible=False)
ax.spines[:].set_visible(False)
plots.save_figure(
    fig, "02_block_table", "simulated", f"a drawing; block tables {tables[0]} (blue) and {tables[1]} (orange)"
)
plt.show()

# %% [markdown]
# A real pool keeps, for each layer, K and V as `[block, kv_head, place, head_dim]`. We make one, fill it with NaN, so
# that any place we should not touch will betray us, and write ten tokens at their slots.

# %%
cpu = torch.device("cpu")
pool = KVPool(shape, 8, 4, torch.float32, cpu, "cpu")
for half in (pool.k, pool.v):
    half.fill_(torch.nan)

# %% [markdown]
# Storing means splitting each slot into block and place again:


# %%
def toy_store(pool: KVPool, layer: int, k: torch.Tensor, v: torch.Tensor, slots: list[int]) -> None:
    """k, v [tokens, kv_heads, head_dim] to their slots."""
    number = torch.tensor(slots)
    block, place = number // pool.k.shape[3], number % pool.k.shape[3]
    pool.k[layer][block, :, place], pool.v[layer][block, :, place] = k, v


# %% [markdown]
# Ten tokens of random K and V, to the slots of the first table:

# %%
k, v = (torch.randn(10, shape.num_kv_heads, shape.head_dim) for _ in range(2))
toy_store(pool, 0, k, v, [slot(tables[0], p, 4) for p in range(10)])
print(tuple(pool.k.shape), "places still NaN in layer 0:", int(pool.k[0, :, 0, :, 0].isnan().sum()), "of", 8 * 4)

# %% [markdown]
# Reading goes the other way: block by block through the table, and cut off at the length.


# %%
def toy_gather(cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    """One layer's K or V of one request: [length, kv_heads, head_dim]."""
    return torch.cat([cache[block].transpose(0, 1) for block in table])[:length]


# %% [markdown]
# Does the package find our tokens? It reads through a `View`: which sequences, how long, and which blocks.

# %%
view = attention.View((1,), torch.tensor([10]), torch.tensor([tables[0]]))
theirs = attention.gather(pool.k[0], pool.v[0], view, 0)
assert torch.equal(toy_gather(pool.k[0], tables[0], 10), k) and torch.equal(theirs[0], k)
assert torch.equal(toy_gather(pool.v[0], tables[0], 10), v) and torch.equal(theirs[1], v)
print("ten tokens in, the same ten tokens out")

# %% [markdown]
# ## 4. Attention over scattered blocks
#
# Attention does not care about the order in which memory is laid out, only about which key goes with which value. So
# paged attention must give what attention over a plain tensor gives. Four requests of awkward lengths (one token, a
# full block, one more than that, many), blocks dealt out at random, NaN wherever nothing was written:

# %%
lengths = [1, 16, 17, 45]
deck = deque(torch.randperm(16).tolist())
tables = [[deck.popleft() for _ in range(-(-n // BLOCK))] for n in lengths]

# %% [markdown]
# A pool full of NaN, and each request's K and V at its slots:

# %%
pool = KVPool(shape, 16, BLOCK, torch.float32, cpu, "cpu")
for half in (pool.k, pool.v):
    half.fill_(torch.nan)
plain = [torch.randn(2, n, shape.num_kv_heads, shape.head_dim) for n in lengths]
for (k, v), table in zip(plain, tables):
    toy_store(pool, 0, k, v, [slot(table, p, BLOCK) for p in range(len(k))])
print(tables)

# %% [markdown]
# One query each: four decodes. Our attention on the plain tensors, in three lines:

# %%
q = torch.randn(4, shape.num_heads, shape.head_dim)
expected = []
for query, (k, v) in zip(q, plain):
    k, v = (t.repeat_interleave(shape.group_size, dim=1) for t in (k, v))  # GQA: 3 query heads share a KV head
    weights = torch.einsum("hd,thd->ht", query, k).mul(shape.head_dim**-0.5).softmax(-1)
    expected.append(torch.einsum("ht,thd->hd", weights, v))
expected = torch.stack(expected)

# %% [markdown]
# And the package's backends, from the pool, through the block tables. All have one signature; the C++ kernel is there
# if this machine has a compiler.

# %%
width = max(len(t) for t in tables)
padded = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
view = attention.View((1,) * 4, torch.tensor(lengths, dtype=torch.int32), padded)
new_k, new_v = (torch.stack([pair[i][-1] for pair in plain]) for i in (0, 1))

# %% [markdown]
# One after the other:

# %%
backends = [
    attention.reference,
    attention.gathered_decode,
    *([attention.cpu_kernel_decode] if machine.compiler() else []),
]
for backend in backends:
    out = backend(q, new_k, new_v, pool.k[0], pool.v[0], view)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    print(f"{backend.__name__:18} largest difference {(out - expected).abs().max().item():.1e}")

# %% [markdown]
# Not one NaN came through: nobody read a place that was not theirs.
#
# ## 5. Two pools and a swap
#
# NEO keeps two pools, and a request lies *wholly* in one of them. To move it, `Blocks.move` takes as many blocks in the
# other pool, frees the old ones, and returns a `Move`, which is only bookkeeping. Copying the bytes is somebody else's
# job (the pipeline's).

# %%
settings = EngineConfig(gpu_kv_tokens=64, cpu_kv_tokens=128, block_size=BLOCK)
cache = KVCache(shape, settings, torch.float32, cpu)
blocks = Blocks(settings.num_gpu_blocks, settings.num_cpu_blocks, BLOCK)
request = Request(0, tuple(range(40)))
assert blocks.grow(request, 40)

# %% [markdown]
# Forty tokens of random KV in every layer:

# %%
for layer in range(shape.num_layers):
    k, v = (torch.randn(40, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    toy_store(cache.pools["gpu"], layer, k, v, [slot(request.block_table, p, BLOCK) for p in range(40)])
print(f"r0 on the {request.device}, blocks {request.block_table}; k, v of the last layer kept for comparison")

# %% [markdown]
# Move it. Afterwards we read the last layer from the *other* pool, through the *new* table.

# %%
move = blocks.move(request, "cpu")
cache.swap(move)
print(f"moved to the {move.target}: blocks {move.source_blocks} -> {move.target_blocks}")

# %% [markdown]
# Is it all there?

# %%
moved_bytes = 40 * shape.kv_bytes_per_token("float32")
print(f"{moved_bytes / 2**20:.1f} MiB for 40 tokens; free blocks: GPU {blocks.free('gpu')}, CPU {blocks.free('cpu')}")
assert torch.equal(toy_gather(cache.pools["cpu"].k[-1], request.block_table, 40), k)
assert torch.equal(toy_gather(cache.pools["cpu"].v[-1], request.block_table, 40), v)

# %% [markdown]
# The toy version is one line for each of K and V, since all layers use the same table. Let us bring it back by hand:

# %%
back = blocks.move(request, "gpu")
for name in ("k", "v"):
    source, target = getattr(cache.pools["cpu"], name), getattr(cache.pools["gpu"], name)
    target[:, list(back.target_blocks)] = source[:, list(back.source_blocks)]
assert torch.equal(toy_gather(cache.pools["gpu"].k[-1], request.block_table, 40), k)
print("and home again, to blocks", request.block_table)

# %% [markdown]
# ## 6. When it does not fit
#
# First the hopeless case: a request that could never fit, even alone. It is refused when it arrives, with a reason
# and a remedy, before it costs anybody anything.

# %%
engine = build_engine(model, gpu_kv_tokens=160, cpu_kv_tokens=320)
try:
    engine.add(tokenizer.encode("A very long story:"), SamplingParams(max_tokens=500))
except NeoLiteError as error:
    print(error)

# %% [markdown]
# The ordinary case: each request fits, but not all of them to their ends. Five stories of 56 tokens each, in a pool
# of 10 blocks. What should a server do when the oldest needs a block and none is free?
#
# - **park** the newest request in the other pool, and bring it back when there is room;
# - or, if the other pool is full too, **drop** its KV. Nothing is lost: the KV is only a cache of its tokens, and
#   they can be prefilled again. It costs time, not words.
#
# We watch the real scheduler do it. `watch` notes after each iteration how many blocks are taken, and who is where.


# %%
def watch(engine) -> list[dict]:
    """Steps to the end; one row for each iteration."""
    rows, plans, scheduler = [], tap(engine), engine.scheduler
    while scheduler.unfinished:
        engine.step()
        taken = {d: scheduler.blocks.total[d] - scheduler.blocks.free(d) for d in ("gpu", "cpu")}
        queues = {"running": scheduler.running, "parked": scheduler.parked, "waiting": scheduler.waiting}
        places = {r.id: where for where, queue in queues.items() for r in queue}
        rows.append({"plan": plans[-1], "places": places, **taken})
    return rows


# %% [markdown]
# The tap on the scheduler is the one from the tour:


# %%
def tap(engine) -> list:
    """Every plan that this engine's scheduler will make from now on, in a list."""
    plans, plan = [], engine.scheduler.plan

    def recorded(now_s: float):
        plans.append(plan(now_s))
        return plans[-1]

    engine.scheduler.plan = recorded
    return plans


# %% [markdown]
# Three engines answer the same five prompts: one with plenty of room, one whose CPU pool can take parked requests, and
# one whose CPU pool is a single block.

# %%
starts = ("Gravity is", "Once upon a time", "A llama is", "The sea was quiet", "My grandmother")
pools = {"roomy": (1024, 16), "park": (160, 320), "drop": (160, 16)}

# %% [markdown]
# To the end, watching:

# %%
answers, rows = {}, {}
for name, (gpu_tokens, cpu_tokens) in pools.items():
    engine = build_engine(model, gpu_kv_tokens=gpu_tokens, cpu_kv_tokens=cpu_tokens)
    params = SamplingParams(max_tokens=56, ignore_eos=True)
    answers[name] = [engine.add(tokenizer.encode(start), params) for start in starts]
    rows[name] = watch(engine)

# %% [markdown]
# The texts must be the same, word for word. And what did it cost?

# %%
for name in pools:
    assert [r.output for r in answers[name]] == [r.output for r in answers["roomy"]]
    prefilled = sum(w.length for row in rows[name] for batch in row["plan"].batches for w in batch.prefills)
    swaps, drops = (sum(getattr(r, key) for r in answers[name]) for key in ("num_swaps", "num_recomputes"))
    print(f"{name:6} {len(rows[name]):3} iterations, {prefilled:4} tokens prefilled, {swaps:2} swaps, {drops:2} drops")

# %% [markdown]
# The same words, at three different prices. The plans say why, for example:

# %%
for name in ("park", "drop"):
    reasons = [reason for row in rows[name] for reason in row["plan"].why if "makes way" in reason or "back" in reason]
    print(f"{name}:", *reasons[:3], sep="\n  ")

# %% [markdown]
# Now the picture. Above: blocks taken in each pool, with every park, resume and drop marked. Below: where each
# request is.

# %%
MARKS = {
    ("running", "parked"): ("v", "#b35c00", "parked"),
    ("parked", "running"): ("^", plots.COLORS["gpu"], "resumed"),
    ("running", "waiting"): ("X", "#000000", "dropped"),
}


def changes(history: list[dict], step: tuple[str, str]) -> list[int]:
    """The iterations in which a request went from one queue to the other."""
    pairs = enumerate(zip(history, history[1:]), 1)
    return [i for i, (a, b) in pairs for r in range(len(starts)) if (a["places"].get(r), b["places"].get(r)) == step]


# %% [markdown]
# The upper half:


# %%
def draw_pool(ax: plt.Axes, history: list[dict], capacity: int) -> None:
    """Occupied blocks of both pools, and what happened when."""
    for device in ("gpu", "cpu"):
        ax.step(
            range(len(history)), [row[device] for row in history], color=plots.COLORS[device], label=f"{device} pool"
        )
    ax.axhline(capacity, color="#777777", linestyle="--", linewidth=1)
    for step, (marker, colour, label) in MARKS.items():
        if at := changes(history, step):
            ax.plot(at, [capacity + 1] * len(at), marker, color=colour, label=label, ms=6)
    ax.set(ylabel="blocks taken", ylim=(0, capacity + 4))


# %% [markdown]
# The lower half: one line for each request.


# %%
def draw_places(ax: plt.Axes, history: list[dict]) -> None:
    """Which queue each request is in after each iteration."""
    fills = {"running": plots.COLORS["gpu"], "parked": plots.COLORS["cpu"], "waiting": plots.COLORS["idle"]}
    colour = {place: plt.matplotlib.colors.to_rgb(fill) for place, fill in fills.items()} | {None: (1, 1, 1)}
    ax.imshow([[colour[row["places"].get(r)] for row in history] for r in range(len(starts))], aspect="auto")
    ax.hlines(np.arange(len(starts)) + 0.5, -0.5, len(history) - 0.5, color="white", linewidth=5)
    for place, fill in fills.items():
        ax.plot([], [], "s", color=fill, label=place)
    ax.set_yticks(range(len(starts)), [f"r{i}" for i in range(len(starts))])
    ax.set(xlabel="iteration")
    ax.grid(visible=False)


# %% [markdown]
# Side by side: parking on the left, dropping on the right.

# %%
fig, axes = plt.subplots(2, 2, figsize=(10, 5), sharex=True, sharey="row", height_ratios=(3, 2))
titles = {"park": "CPU pool of 20 blocks: parked", "drop": "CPU pool of 1 block: dropped"}
for column, (name, title) in enumerate(titles.items()):
    draw_pool(axes[0, column], rows[name], 10)
    draw_places(axes[1, column], rows[name])
    axes[0, column].set_title(title, fontsize=10)
    axes[0, column].legend(fontsize=8, ncols=5, loc="upper right", columnspacing=1, handletextpad=0.4)
axes[0, 1].set_ylabel("")
axes[1, 1].legend(fontsize=8, loc="upper right")
plots.save_figure(fig, "02_full_pool", "measured", "the real scheduler, SmolLM2, GPU pool of 10 blocks of 16")
plt.show()

# %% [markdown]
# The oldest request is never sent away: it can take the whole pool if need be, so there is always progress. Everyone
# else may have to step aside.
#
# Look at the orange line on the left once more. While requests are parked, their KV lies in host memory, next to a
# processor that could read it, and they make no progress at all. *Why should they wait?* That is NEO's question.
# Notebook 03 measures what the waiting costs, and from 05 on the CPU works.
#
# ## Summary
#
# - Contiguous reservations waste memory inside (room for tokens that never come) and outside (holes). Blocks waste at
#   most one block less one token for each request.
# - A block table maps positions to slots. Attention through it gives the same numbers.
# - A request lies wholly in one pool. A swap copies its blocks and gives it a new table.
# - When a pool is full, the newest request is parked or dropped. KV is a cache: losing it costs time, never words.
#
# ## Exercises
#
# **Exercise 1.** `room_left(num_tokens, block_size)`: how many more tokens fit into a request's last block before it
# needs another one?


# %% tags=["exercise"]
def room_left(num_tokens: int, block_size: int) -> int:
    return ...


# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("1: room in the last block")
def solved_1():
    for size in (1, 4, 16):
        for tokens in range(1, 70):
            have = Blocks(99, 0, size).needed(tokens) * size
            assert room_left(tokens, size) == have - tokens, (
                f"{tokens} tokens in blocks of {size}: {have - tokens} left."
            )


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def room_left(num_tokens: int, block_size: int) -> int:
#     return -num_tokens % block_size
# ```
#
# On average it is half a block: that is all that paging wastes.
#
# </details>

# %% [markdown]
# **Exercise 2.** The reverse of `slot`: whose token lies in slot `number`? Return the position in the request, or -1 if
# the block is not in its table.


# %% tags=["exercise"]
def position_of(number: int, block_table: list[int], block_size: int) -> int:
    return ...


# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("2: from a slot back to a position")
def solved_2():
    table = [5, 2, 7]
    for position in range(12):
        found = position_of(slot(table, position, 4), table, 4)
        assert found == position, f"slot {slot(table, position, 4)} holds position {position}, not {found}."
    assert position_of(0, table, 4) == -1, "Block 0 is not in the table: -1."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def position_of(number: int, block_table: list[int], block_size: int) -> int:
#     block, place = divmod(number, block_size)
#     return block_table.index(block) * block_size + place if block in block_table else -1
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** The paper's T4 holds 864 tokens of KV. How many OSC requests of 418 tokens fit at once with blocks
# of 16, and how many with blocks of 128?

# %% tags=["exercise"]
fit_16, fit_128 = ..., ...

# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("3: block size on a T4")
def solved_3():
    assert fit_16 is not ... and fit_128 is not ..., "Fill in both."
    for size, answer in ((16, fit_16), (128, fit_128)):
        blocks = Blocks(864 // size, 0, size)
        assert answer == blocks.total["gpu"] // blocks.needed(418), (
            f"Blocks of {size}: whole blocks only, on both sides."
        )


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# fit_16, fit_128 = (864 // 16) // -(-418 // 16), (864 // 128) // -(-418 // 128)
# ```
#
# Two and one. Small blocks waste less; very small ones make long tables and short reads. 16 is the usual choice.
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | block size | 16 tokens | 16, or any | paper, figures 6c and 10a |
# | pools | GPU-cache and CPU-cache | the same, one allocator | package, `blocks` and `kv_cache` |
# | a request's KV | wholly in one of them | the same, asserted in section 5 | measured |
# | paged attention on the CPU | PACPU, after vLLM | the C++ kernel, asserted in section 4 | measured |
# | GPU pool full | swap out, if the CPU has room | park, else drop, section 6 | measured |
# | KV tokens on the T4 | 864 in 54 blocks | exercise 3 | paper, figure 6c |
