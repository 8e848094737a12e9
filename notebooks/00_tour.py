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
# # The tour: one idea, in fifteen minutes
#
# A language model answers your question one word piece at a time. To do so quickly, it keeps notes on everything it has
# read so far: the *KV cache*. Those notes fill a GPU's memory long before they fill its arithmetic units. NEO
# ([arXiv 2411.01142](https://arxiv.org/abs/2411.01142)) keeps some of the notes in the host's memory, and lets the CPU
# do the small part of the work that reads them.
#
# You will see
# 1. a real Llama answer, and give the *same tokens* when its attention is computed by the CPU kernel instead;
# 2. why memory is the limit: how many conversations fit on a T4 beside Llama-2-7B (guess now: 200? 20? 2?);
# 3. what NEO moves to the CPU, what it leaves, and why that is a good cut;
# 4. one request on its way through every part of this package;
# 5. where the rest of the course goes.
#
# **Takes** about 15 minutes to read and half a minute to run on 2 cores. **Memory** 1.6 GB. **Needs** no GPU, no
# account and no network once installed. Without a GPU, the "GPU" of this notebook is your CPU standing in: the paths
# through the code are the real ones, the hardware behind one of them is not. It is said again wherever it matters.

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
# ## 1. A real Llama answers
#
# The bundled model is SmolLM2-135M-Instruct: small, trained, and a Llama in every part that matters here. We load it in
# fp32, so that later "the same tokens" can mean exactly that.

# %%
import matplotlib.pyplot as plt
import torch

from neo_lite import SamplingParams, Timeline, build_engine, exercise, load_model, metrics, plots
from neo_lite.config import MODELS

# %% [markdown]
# It comes from an installed package, so nothing is downloaded.

# %%
plots.use_style()
plt.rcParams["figure.autolayout"] = True
model = load_model("smollm2", dtype="float32")
shape = model.config
print(f"{shape.num_parameters / 1e6:.0f} M parameters in {shape.num_layers} layers, on {model.device}")
print(f"{shape.num_heads} query heads share {shape.num_kv_heads} KV heads of {shape.head_dim} numbers")

# %% [markdown]
# A chat model wants its question wrapped in a template. After that a prompt is nothing but a list of token ids.

# %%
tokenizer = model.tokenizer


def chat(question: str) -> list[int]:
    """The question as this model was trained to read it, in token ids."""
    turn = [{"role": "user", "content": question}]
    return tokenizer.encode(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


# %% [markdown]
# Our question:

# %%
prompt = chat("In two sentences: what is gravity?")
print(len(prompt), "tokens:", prompt[:8], "...")
print(repr(tokenizer.decode(prompt[-12:])))

# %% [markdown]
# `build_engine` makes an engine with two pools of KV cache, `add` queues a prompt, and `stream` yields tokens as they
# come. Each token costs one trip through all 30 layers.

# %%
engine = build_engine(model, mode="gpu-only", gpu_kv_tokens=2048, cpu_kv_tokens=2048)
request = engine.add(prompt, SamplingParams(max_tokens=48))
for token in engine.stream(request):
    print(tokenizer.decode([token]), end="", flush=True)

# %% [markdown]
# ## 2. The same tokens, another way
#
# Now the experiment that this course is about. We answer the question twice, and write down who did what:
#
# - `gpu-only`: the KV cache lies in the pool of the model's device, and that device computes the attention;
# - `simple`: the KV cache lies in host memory, and a C++ kernel on the CPU computes the decode attention. Everything
#   else stays on the model's device. (The paper's first sketch. NEO proper is a mixture of the two.)
#
# Before you run it: should the answers be the same? Two different programs will add up the same numbers in different
# orders.


# %%
def answer_in(mode: str):
    """The finished request and the timeline of an engine of its own."""
    timeline, pools = Timeline(), dict(gpu_kv_tokens=2048, cpu_kv_tokens=2048)
    engine = build_engine(model, timeline=timeline, mode=mode, cpu_threads=1, **pools)
    answer = engine.add(prompt, SamplingParams(max_tokens=48))
    engine.run()
    return answer, timeline


# %% [markdown]
# Both modes, and the moment of truth:

# %%
runs = {mode: answer_in(mode) for mode in ("gpu-only", "simple")}
for mode, (answer, _) in runs.items():
    print(f"{mode:9} {tokenizer.decode(answer.output[:14])} ...")
assert runs["gpu-only"][0].output == runs["simple"][0].output == request.output
print("\nThe same", len(request.output), "tokens.")

# %% [markdown]
# Their numbers differ in the seventh digit or so, and in fp32 that is far too little to change which word is the best.
# (In fp16 it could be enough, now and then, where two words are nearly as good.)
#
# But equal answers prove little if both runs took the same path. The timeline knows: every attention call was
# recorded with its lane and with the backend that served it.

# %%
from collections import Counter

for mode, (_, timeline) in runs.items():
    calls = Counter((e.lane, e.name, e.args["backend"]) for e in timeline.events if "backend" in e.args)
    for (lane, name, backend), count in calls.items():
        print(f"{mode:9} lane {lane:4} {name:13} {count:5} calls, served by {backend}")

# %% [markdown]
# We do not only look, we assert: neither mode used the other's attention.

# %%
names = {mode: {e.name for e in timeline.events} for mode, (_, timeline) in runs.items()}
assert "gpu_attn" in names["gpu-only"] and "cpu_attn" not in names["gpu-only"]
assert "cpu_attn" in names["simple"] and "gpu_attn" not in names["simple"]

# %% [markdown]
# One call in each layer for the prompt (30), then one in each layer for each further token. In `simple`, not one decode
# attention ran in the `gpu` lane. (Had you no C++ compiler, torch would serve the CPU pool, and the line would say so.)
#
# Here are four layers of a decode step in each mode, the quickest of the run, drawn from those events.


# %%
def quick_layers(timeline: Timeline, count: int = 4) -> Timeline:
    """The quickest `count` layers in a row of all decode steps (a busy machine slows some of them)."""
    pre, post = ([e for e in timeline.events if e.name == name][shape.num_layers :] for name in ("pre", "post"))
    pairs = [(a, b) for a, b in zip(pre, post[count - 1 :]) if b.args["layer"] - a.args["layer"] == count - 1]
    first, last = min(pairs, key=lambda pair: pair[1].end_s - pair[0].start_s)
    return timeline.between(first.start_s, last.end_s)


# %% [markdown]
# And the drawing. `where` goes into the stamp of every measured figure, so that you know what it ran on.

# %%
card = machine.gpu()
where = f"{card['name'] if card else machine.cpu_name()}, torch threads: {torch.get_num_threads()}"
fig, axes = plt.subplots(2, 1, figsize=(8, 4.2), height_ratios=(2, 3), sharex=True)
for ax, (mode, (_, timeline)) in zip(axes, runs.items()):
    quick_layers(timeline).plot(ax, legend=False)
    ax.set_title(f"{mode}: four layers of a decode step", loc="left", fontsize=10)
    ax.set_xlabel("milliseconds" if ax is axes[1] else "")
entries = {name: mark for ax in axes for mark, name in zip(*ax.get_legend_handles_labels())}
axes[0].legend(entries.values(), entries.keys(), loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
plots.save_figure(fig, "00_same_step_two_ways", "measured", where)
plt.show()

# %% [markdown]
# `pre` and `post` are the matrix products before and after attention. In the lower picture the `gpu` lane has a hole
# wherever the `cpu` lane has a block: each waits for the other. Keep that hole in mind. Filling it is what NEO's
# pipeline is for, and notebook 05 measures how large it is.
#
# ## 3. Why anyone would want this
#
# Each token that a model has read leaves a key and a value in every layer. How many bytes is that?
#
# `2 (K and V) x layers x KV heads x head_dim x bytes per number`
#
# Let us do it for the paper's hardest case: Llama-2-7B in fp16 on a T4, with the prompts of the OSC workload
# (summaries of web posts: 372.5 tokens in and 45.3 out, on average).

# %%
GIB, MIB = 2**30, 2**20
llama = MODELS["llama-2-7b"]
kv_token_bytes = 2 * llama.num_layers * llama.num_kv_heads * llama.head_dim * 2
assert kv_token_bytes == llama.kv_bytes_per_token("float16")

# %% [markdown]
# The weights, and what a whole request leaves behind:

# %%
weights_bytes = llama.weight_bytes("float16")
print(f"weights          {weights_bytes / GIB:6.2f} GiB of the T4's 15 GiB")
print(f"KV of one token  {kv_token_bytes / MIB:6.2f} MiB")
print(f"one OSC request  {(372.5 + 45.3) * kv_token_bytes / MIB:6.0f} MiB when it ends")

# %% [markdown]
# The paper's experiment had room for **864 tokens** of KV on that card, after weights, activations and what the CUDA
# runtime takes. (The number is the paper's.) How many requests is that?

# %%
paper_gpu_tokens, paper_cpu_bytes = 864, 20 * GIB
osc_tokens = 372.5 + 45.3
cpu_tokens = paper_cpu_bytes // kv_token_bytes
print(f"on the T4:   {paper_gpu_tokens:6} tokens = {paper_gpu_tokens * kv_token_bytes / GIB:5.2f} GiB")
print(f"             -> {paper_gpu_tokens / osc_tokens:5.1f} requests at a time")
print(f"on the host: {cpu_tokens:6} tokens = {paper_cpu_bytes / GIB:5.2f} GiB")
print(f"             -> {cpu_tokens / osc_tokens:5.1f} requests at a time")

# %% [markdown]
# Two. A card of 65 TFLOP/s (fp16, by its data sheet), serving two people at once, because there is nowhere to keep
# the notes for a third. The host next to it has memory for nearly a hundred.

# %%
rest_bytes = 15 * GIB - weights_bytes - paper_gpu_tokens * kv_token_bytes
bars = {
    "T4": [("weights", weights_bytes, "#9db8d6"), ("other", rest_bytes, plots.COLORS["idle"]),
           ("KV", paper_gpu_tokens * kv_token_bytes, plots.COLORS["gpu"])],
    "host": [("KV pool of the paper's experiment", paper_cpu_bytes, plots.COLORS["cpu"])],
}  # fmt: skip

# %% [markdown]
# Drawn to scale:

# %%
fig, ax = plt.subplots(figsize=(8, 2.6))
for row, parts in enumerate(bars.values()):
    left = 0.0
    for name, size, colour in parts:
        ax.barh(row, size / GIB, left=left, color=colour, edgecolor="white", height=0.6)
        place = left + size / GIB / 2 if name != "KV" else left + size / GIB + 0.2
        ax.text(place, row, name, ha="left" if name == "KV" else "center", va="center", fontsize=9)
        left += size / GIB
ax.text(15.8, 0, f": {paper_gpu_tokens} tokens, 2 requests", va="center", fontsize=9)
ax.text(20.2, 1, f"{cpu_tokens:,} tokens,\n{int(cpu_tokens / osc_tokens)} requests", va="center", fontsize=9)
ax.set(yticks=(0, 1), yticklabels=bars, xlabel="GiB", xlim=(0, 25), title="Where Llama-2-7B's memory goes")
ax.invert_yaxis()
plots.save_figure(
    fig, "00_t4_memory", "paper", "figure 6c's set-up; sizes from the model's shape; other: activations, CUDA"
)
plt.show()

# %% [markdown]
# ### Why not fetch the notes when they are needed?
#
# One could keep all KV on the host and copy it to the GPU for each step. Or one could leave it there and send the
# *question* instead: the query, key and value of the one new token, and get the attention's output back. Guess the
# ratio.

# %%
fetch_bytes = osc_tokens * kv_token_bytes
vectors = 2 * llama.num_heads + 2 * llama.num_kv_heads  # q and the output; k and v
ask_bytes = llama.num_layers * vectors * llama.head_dim * 2
print(f"fetch the KV of one request: {fetch_bytes / MIB:6.1f} MiB a token")
print(f"send q, k, v; get attention: {ask_bytes / MIB:6.1f} MiB a token: {fetch_bytes / ask_bytes:.0f} times less")

# %% [markdown]
# And can a CPU do that attention in time? Decode attention reads every key and value once and does next to no
# arithmetic on it: what counts is memory bandwidth, and there a CPU is not so far behind. From the paper:
#
# | | A10G GPU | x86 server | GPU / CPU |
# |---|---|---|---|
# | arithmetic | 125 TFLOP/s | about 1.2 TFLOP/s | about 100 x |
# | memory bandwidth | 600 GB/s | about 200 GB/s | **3 x** |
#
# So the cut is: **matrix products, with their hundredfold gap, stay on the GPU. Decode attention, with its threefold
# gap, may go to the CPU, together with the KV that it reads.** Nothing is approximated: the tokens stay the same, as
# you saw.
#
# ## 4. The picture
#
# Two pools of KV, three queues, and a scheduler that decides before every iteration. The next cell only draws it.


# %%
def box(ax: plt.Axes, x: float, y: float, w: float, h: float, text: str, colour: str, solid: bool = True) -> None:
    ax.add_patch(plt.Rectangle((x, y), w, h, facecolor=colour if solid else "none", edgecolor=colour, linewidth=1.5))
    ink = "white" if solid and colour != plots.COLORS["cpu"] else "black"
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=9, color=ink)


# %% [markdown]
# And its arrow, with some text beside it:


# %%
def arrow(ax: plt.Axes, start: tuple, end: tuple, text: str = "", at: tuple = (0, 0), both: bool = False) -> None:
    style = "<|-|>" if both else "-|>"
    ax.annotate("", end, start, arrowprops=dict(arrowstyle=style, color="#444444", linewidth=1.3, shrinkA=0, shrinkB=0))
    ax.text(*at, text, ha="center", va="bottom", fontsize=8.5)


# %% [markdown]
# The boxes: queues and scheduler on the left, the two devices on the right.

# %%
gpu, cpu, grey = plots.COLORS["gpu"], plots.COLORS["cpu"], "#5a5a5a"


def draw_boxes(ax: plt.Axes) -> None:
    box(ax, 2.6, 0.3, 1.7, 5.6, "scheduler\n\nbefore each\niteration:\n\ntwo batches,\nor GPU only?", grey)
    box(ax, 6.3, 3.5, 7.2, 2.4, "", gpu, solid=False)
    box(ax, 6.3, 0.3, 7.2, 2.0, "", cpu, solid=False)
    ax.text(6.45, 5.5, "GPU: fast, small", fontsize=9, color=gpu, weight="bold")
    ax.text(6.45, 0.45, "host: slower, large", fontsize=9, color="#a85f10", weight="bold")
    box(ax, 6.5, 4.1, 2.6, 1.1, "weights and all of\nthe linear layers", gpu)
    box(ax, 9.8, 4.1, 1.5, 1.1, "attention", gpu)
    box(ax, 11.9, 4.1, 1.4, 1.1, "GPU-cache", gpu)
    box(ax, 9.8, 0.9, 1.5, 1.1, "decode\nattention", cpu)
    box(ax, 11.9, 0.9, 1.4, 1.1, "CPU-cache", cpu)


# %% [markdown]
# Read it from the left: requests wait, the scheduler sorts them into two sub-batches, and each sub-batch passes through
# the layers with its attention on one side or the other.

# %%
fig, ax = plt.subplots(figsize=(9.5, 4.6))
ax.set(xlim=(-0.1, 13.6), ylim=(0, 6.2))
ax.axis("off")
draw_boxes(ax)
for y, text, colour in ((4.6, "prefill queue", grey), (2.7, "GPU run queue", gpu), (0.8, "CPU run queue", cpu)):
    box(ax, 0, y, 1.9, 0.8, text, colour, solid=False)
    arrow(ax, (1.9, y + 0.4), (2.6, y + 0.4))
arrow(ax, (4.3, 5.0), (6.5, 5.0), "batch-0:\nprefills,\nGPU decodes", (5.3, 5.1))
arrow(ax, (4.3, 4.3), (6.5, 4.3), "batch-1:\nCPU decodes", (5.3, 3.5))
arrow(ax, (9.1, 4.65), (9.8, 4.65), both=True)
arrow(ax, (11.3, 4.65), (11.9, 4.65), both=True)
arrow(ax, (11.3, 1.45), (11.9, 1.45), both=True)
arrow(ax, (8.2, 4.1), (9.8, 1.7), "q, k, v of the\nnew tokens", (7.7, 2.45))
arrow(ax, (10.1, 2.0), (8.9, 4.1), "output", (10.4, 2.65))
arrow(ax, (12.6, 2.0), (12.6, 4.1), "swap", (13.05, 2.75), both=True)
plots.save_figure(fig, "00_neo_idea", "paper", "redrawn after figure 2")
plt.show()

# %% [markdown]
# - **What moves:** for *some* requests, the KV cache and the decode attention over it. A request's KV lies wholly on
#   one side: it is a GPU-request or a CPU-request.
# - **What stays:** the weights, every matrix product, every prefill.
# - **Why two sub-batches:** while batch-0 does long matrix products on the GPU, batch-1's attention runs on the CPU,
#   and the other way round. Neither side has to wait as in section 2, if the two are well matched.
# - **Why a scheduler:** matching them is the hard part. Requests come and go and differ in length, so it is decided
#   anew in each iteration, and "GPU only" remains a choice.
#
# ## 5. One request, top to bottom
#
# The code follows the same line. One iteration of the engine is three calls, and nothing reaches back:
#
# ```python
# def step(self):
#     plan = self.scheduler.plan(self.clock())   # an IterationPlan: who computes what, which KV moves, and why
#     tokens = self.executor.run(plan)           # the layers, on real devices
#     return self._commit(plan, tokens)          # append tokens, finish requests, free blocks
# ```
#
# We put a tap on `scheduler.plan`, give the engine a pool for only 96 tokens and at most 48 tokens an iteration, and
# send three questions.


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
# Three questions, of different lengths:

# %%
engine = build_engine(model, mode="gpu-only", gpu_kv_tokens=96, cpu_kv_tokens=512, max_batched_tokens=48)
plans = tap(engine)
texts = ("Gravity is", "Once upon a time", "A llama is")
requests = [engine.add(tokenizer.encode(text), SamplingParams(max_tokens=32, ignore_eos=True)) for text in texts]

# %% [markdown]
# One step, and the plan that it carried out:

# %%
engine.step()
for work in plans[0].batches[0].prefills:
    print(f"prefill r{work.request.id}: tokens {work.start} to {work.seq_len}, of {len(work.request.prompt)}")
print("GPU decodes:", plans[0].batches[0].gpu_decodes, " CPU decodes:", plans[0].batches[0].cpu_decodes)
print("moves:", plans[0].moves)
print("why:  ", *plans[0].why, sep="\n  ")

# %% [markdown]
# That is the real object, frozen once made: one sub-batch, three prefills with all tokens of their prompts, no
# decodes, no moves. And `why`, one sentence for each decision. Let us run to the end and read the other reasons.

# %%
engine.run()
for number, plan in enumerate(plans):
    if plan.why:
        batch = plan.batches[0]
        print(f"iteration {number:2}: {len(batch.prefills)} prefills, {len(batch.gpu_decodes)} GPU decodes", end="")
        print("".join(f"\n    {reason}" for reason in plan.why))
for question in requests:
    print(f"\n{texts[question.id]}{tokenizer.decode(question.output[:16])} ... ({question.num_swaps} swaps)")

# %% [markdown]
# The pool was too small for three, so the newest request was parked in the CPU pool and came back when there was room.
# Its text does not show it. Notebook 02 takes this apart.
#
# Inside `executor.run`, each layer is three steps: `pre_attention` (norm, Q, K and V, rotary positions), `attention`,
# and `post_attention` (output projection and feed-forward network). Here they are by hand for the first prompt. Watch
# the shapes: only attention looks at more than one token.

# %%
from neo_lite import attention

tokens = torch.tensor(tokenizer.encode(texts[0]), device=model.device)
count = len(tokens)
no_table = torch.zeros(1, 1, dtype=torch.int32, device=model.device)
view = attention.View((count,), torch.tensor([count], dtype=torch.int32, device=model.device), no_table)

# %% [markdown]
# All thirty layers:

# %%
x, rope = model.embed(tokens), model.rope(torch.arange(count, device=model.device))
for layer in range(shape.num_layers):
    q, k, v = model.pre_attention(layer, x, rope)
    attn = attention.prefill(q, k, v, None, None, view)
    x = model.post_attention(layer, attn, x)
logits = model.head(x[-1:])

# %% [markdown]
# The shapes that went by:

# %%
print(f"tokens {tuple(tokens.shape)} -> x {tuple(x.shape)}")
print(f"q {tuple(q.shape)}, k and v {tuple(k.shape)} -> attention {tuple(attn.shape)} -> logits {tuple(logits.shape)}")

# %% [markdown]
# The last row of logits holds a score for each word piece that might come next. The best one must be the token that the
# engine gave.

# %%
best = logits[0].softmax(-1).topk(5)
for probability, token in zip(best.values.tolist(), best.indices.tolist()):
    print(f"{probability:6.1%}  {tokenizer.decode([token])!r}")
assert best.indices[0] == requests[0].output[0]

# %% [markdown]
# Then `commit` appends the token to the request, and the next iteration feeds it back in. That is the whole engine.
#
# ## 6. Play with it
#
# When does each token arrive? The static figure first: time from `add` to each token, in both modes of section 2. The
# first token carries the whole prompt's prefill; after it come the decodes, one step each.

# %%
fig, ax = plt.subplots(figsize=(7, 3))
for (mode, (answer, _)), colour, marker in zip(runs.items(), (gpu, cpu), "os"):
    since_s = [t - answer.arrival_s for t in answer.token_times_s]
    ax.plot(range(1, len(since_s) + 1), since_s, marker, ms=3.5, color=colour, label=mode)
ax.set(xlabel="output token", ylabel="seconds since add()", xlim=0, ylim=0)
ax.legend()
plots.save_figure(fig, "00_token_times", "measured", where)
plt.show()

# %% [markdown]
# Without a GPU do not read this as "GPU against CPU": both curves ran on your CPU, one through torch, one through the
# C++ kernel. And now yours: choose, press the button, and read the text, the latencies and a timeline of four layers
# (hover over a block for its name and duration). It needs a live kernel; on GitHub you see only the figure above.

# %%
import html

import ipywidgets as widgets
from IPython.display import display

# %% [markdown]
# The controls, each with a label:

# %%
wide = {"style": {"description_width": "90px"}, "layout": {"width": "560px"}}
starts = ["Gravity is", "Once upon a time", "The fastest way to sort a list is", "Llamas live in"]
prompt_box = widgets.Dropdown(options=starts, description="Prompt", **wide)
mode_box = widgets.Dropdown(options=["gpu-only", "simple"], description="Mode", **wide)
length_box = widgets.IntSlider(value=24, min=4, max=64, description="Max tokens", **wide)
button = widgets.Button(description="Generate", tooltip="Run the model with these settings")
result = widgets.HTML()

# %% [markdown]
# What the button does is what you did above: build, add, run, and draw. (For one request, one thread of the CPU
# kernel is plenty.)


# %%
def generate(_=None) -> None:
    result.value = "Working ..."
    timeline, ids = Timeline(), tokenizer.encode(prompt_box.value)
    engine = build_engine(model, timeline=timeline, mode=mode_box.value, cpu_kv_tokens=1024, cpu_threads=1)
    answer = engine.add(ids, SamplingParams(max_tokens=length_box.value))
    engine.run()
    text = html.escape(tokenizer.decode(answer.output))
    times = f"first token {metrics.ttft_s(answer) * 1e3:.0f} ms, then {metrics.tpot_s(answer) * 1e3:.0f} ms a token"
    drawing = quick_layers(timeline).svg(width=760)
    result.value = f"<p><b>{html.escape(prompt_box.value)}</b>{text}</p><p>{times}</p>{drawing}"


# %% [markdown]
# Hook it to the button, and run it once:

# %%
button.on_click(generate)
generate()
display(widgets.VBox([prompt_box, mode_box, length_box, button, result]))

# %% [markdown]
# ## The map
#
# | notebook | the question it answers |
# |---|---|
# | 00 tour | you are here |
# | [01 prefill and decode](01_prefill_and_decode.ipynb) | why are there two phases, and what bounds each? |
# | [02 paged KV cache](02_paged_kv_cache.ipynb) | how do you keep notes that grow, on two devices? |
# | [03 GPU memory crisis](03_gpu_memory_crisis.ipynb) | what does a small KV pool cost in throughput? |
# | 04 CPU attention (planned) | how fast can a CPU read a KV cache? |
# | [05 simple offloading](05_simple_offloading.ipynb) | all decode attention on the CPU: where does it idle? |
# | later (planned) | two sub-batches, the load-aware scheduler, the paper's figures beside ours, several GPUs |
#
# The package reads in this order: `config`, `request`, `workload`, `metrics`, `blocks`, `scheduler`, `timeline`,
# `engine`, `kv_cache`, `attention`, `model`, `pipeline`. Each imports only what stands before it.
#
# ## Summary
#
# - A token's KV is large (half a MiB for Llama-2-7B), a GPU's memory is not: on a T4 two requests fit at a time.
# - Decode attention is bound by memory bandwidth, where the CPU is 3 times slower, not 100 times. It also needs only
#   q, k and v of the new token, not the KV cache, to cross the link.
# - So NEO keeps part of the requests' KV on the host and computes their decode attention there. The tokens do not
#   change.
# - `step()` is plan, run, commit. A plan says why.
#
# ## Exercises
#
# **Exercise 1.** Llama-3.1-8B shares each KV head among four query heads. How many tokens of *its* KV, in fp16, fit in
# the space of the T4's 864 tokens of Llama-2-7B?

# %% tags=["exercise"]
tokens_that_fit = ...  # a number, or an expression with MODELS["llama-3.1-8b"]

# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("1: tokens of Llama-3.1-8B")
def solved_1():
    assert tokens_that_fit is not ..., "Fill in the blank."
    wanted = 864 * kv_token_bytes // MODELS["llama-3.1-8b"].kv_bytes_per_token("float16")
    assert tokens_that_fit == wanted, "Bytes of 864 tokens of the one, divided by the bytes of one token of the other."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# tokens_that_fit = 864 * kv_token_bytes // MODELS["llama-3.1-8b"].kv_bytes_per_token("float16")
# ```
#
# Four times as many: 8 KV heads instead of 32, all else equal. (Its weights would not fit beside them.)
#
# </details>

# %% [markdown]
# **Exercise 2.** In `simple`, which share of one decode step does the model's device spend waiting for the CPU's
# attention? Write `cpu_share(timeline)`: the busy seconds of lane `"cpu"` divided by those of lanes `"gpu"` and `"cpu"`
# together. `timeline.busy_s(lane)` gives the seconds.


# %% tags=["exercise"]
def cpu_share(timeline: Timeline) -> float:
    return ...


# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("2: the CPU's share")
def solved_2():
    assert cpu_share(runs["gpu-only"][1]) == 0, "In gpu-only the CPU lane is empty: the share is 0."
    step = quick_layers(runs["simple"][1])
    total = step.busy_s("gpu") + step.busy_s("cpu")
    assert abs(cpu_share(step) - step.busy_s("cpu") / total) < 1e-9, "Busy seconds of one lane over those of both."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def cpu_share(timeline: Timeline) -> float:
#     return timeline.busy_s("cpu") / (timeline.busy_s("gpu") + timeline.busy_s("cpu"))
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** A link of 12 GB/s joins host and GPU, and 50 OSC requests decode at once. How many seconds does one
# step take for the copies alone, if their whole KV is fetched? And if only q, k, v and the output cross?

# %% tags=["exercise"]
fetch_s, ask_s = ..., ...  # in seconds; fetch_bytes and ask_bytes of section 3 are for one request

# %% [markdown]
# Check it:


# %% tags=["check"]
@exercise.check("3: seconds on the link")
def solved_3():
    assert fetch_s is not ... and ask_s is not ..., "Fill in both."
    assert abs(fetch_s - 50 * fetch_bytes / 12e9) < 1e-6, (
        "50 requests, each with all of its KV, at 12e9 bytes a second."
    )
    assert abs(ask_s - 50 * ask_bytes / 12e9) < 1e-6, "The same with ask_bytes."


# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# fetch_s, ask_s = 50 * fetch_bytes / 12e9, 50 * ask_bytes / 12e9
# ```
#
# Nearly a second for each token, against a few milliseconds. That is why offloading the *computation* matters.
#
# </details>

# %% [markdown]
# ## Paper, ours, source
#
# | | paper | ours | source |
# |---|---|---|---|
# | KV of one token, Llama-2-7B fp16 | implied by the set-up | 0.5 MiB | the model's shape (section 3) |
# | KV tokens on the T4 | 864 (baseline), 832 (NEO) | not measured here | paper, figure 6c's set-up |
# | KV pool on the host | 20 GiB | not measured here | paper, figure 6c's set-up |
# | GPU / CPU bandwidth gap | 600 / 200 GB/s (A10G, x86) | the host's: environment report | paper; measured |
# | tokens with offloading | unchanged (no approximation) | asserted equal in section 2 | measured |
# | load at 1 s a token, T4 | 563 % more than vLLM | a later notebook | paper, figure 6c |
