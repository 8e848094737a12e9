"""The paper's ten figures: its points, the simulated curves, recorded or measured runs, side by side and labelled.

Each comes with a table paper / simulated / measured / difference. Called by `python -m neo_lite figures` and notebook 11.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from neo_lite import hardware, machine, plots, simulator
from neo_lite.blocks import Blocks
from neo_lite.config import NeoLiteError
from neo_lite.neo import POLICIES
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.sweep import (
    NEO,
    QUANTILES,
    RECORDED,
    SETTINGS,
    SWIFT,
    VLLM,
    Recorded,
    Results,
    Run,
    compute,
    curve_of,
    get,
    paper,
    ratio,
    recorded,
    results,
    run,
)  # fmt: skip
from neo_lite.timeline import LANES, Timeline

SOURCES = ("simulated", "recorded", "measured")
NAN = float("nan")


# ---- What each figure shows ----


class Load(NamedTuple):
    """Figures 6 and 8a: per-token latency against request rate; `limit_s` is where the paper compares loads."""

    machine: str
    workload: str
    modes: tuple[str, ...]
    rates: tuple[float, ...]
    limit_s: float
    vllm_rates: tuple[float, ...] = ()  # where vLLM saturates far earlier

    def rates_of(self, mode: str) -> tuple[float, ...]:
        return self.vllm_rates if mode == VLLM and self.vllm_rates else self.rates


class Panel(NamedTuple):
    """Figures 8b, 9 and 10a: throughput over the baseline's against output length."""

    title: str
    machine: str
    prompt: int
    outputs: tuple[int, ...] = (50, 100, 200, 300, 400)
    stand_in: str = ""  # the part of an H200 whose recorded runs belong here; "": any

    def load(self, output: int) -> str:
        return f"synthetic:{self.prompt},{output}"


_H100, _A10G = (1, 2, 3, 3.4, 3.6, 3.8, 4, 4.2, 4.4, 4.6, 5, 5.5), (0.4, 0.8, 1.2, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2)
LOADS = {
    "6a": Load("2xh100", "azure-code", (VLLM, *NEO), _H100, 2.0),
    "6b": Load("a10g-g5.4xlarge", "azure-code", (VLLM, *NEO), _A10G, 2.0),
    "6c": Load("t4-g4dn.4xlarge", "osc", (VLLM, *NEO), (0.2, 0.5, 1.5, 2.5, 3.1, 3.3, 3.5, 3.7, 3.9, 4.2), 1.0,
               (0.2, 0.3, 0.4, 0.45, 0.5, 0.53, 0.56, 0.6)),
    "8a": Load("2xh100", "azure-code", ("fastdecode+", *NEO), _H100, 2.0),
}  # fmt: skip
RATIOS = {  # the paper's prompt lengths in figure 9 are not among our facts: these are ours
    "8b": [Panel("prompts of 2,000", "2xh100", 2000)],
    "9a": [Panel(f"prompts of {n:,}", "2xh100", n) for n in (1000, 2000)],
    "9b": [Panel(f"prompts of {n:,}", "a10g-g5.4xlarge", n, stand_in="h200-8sm-4t") for n in (500, 1000)],
    "9c": [Panel(f"prompts of {n:,}", "t4-g4dn.4xlarge", n, (10, 25, 50, 100, 200)) for n in (250, 500)],
    "10a": [Panel(f"g5.{n}xlarge", f"a10g-g5.{n}xlarge", 1000, stand_in=f"h200-8sm-{t}t")
            for n, t in ((2, 4), (4, 4), (8, 8), (16, 14))],
}  # fmt: skip
ONLY = {"8b": ("fastdecode+", *NEO)}  # modes, where there are more than NEO's two
PEERS = {"1 GPU (A10G)": "a10g-g5.4xlarge", "2 GPUs (2 x H100)": "2xh100"}
NAMES = ("1", "2", "3", "4", "5", "6a", "6b", "6c", "7", "8a", "8b", "9a", "9b", "9c", "10a", "10b")


def wanted(name: str, runs: Sequence[Recorded] = ()) -> list[Run]:
    """The simulations that a figure shows, and those that repeat its recorded runs."""
    if name in LOADS:
        f = LOADS[name]
        mine = [r.like for r in runs if r.like and belongs(r, f.machine, f.workload)]
        return mine + [run(f.machine, mode, f.workload, rate) for mode in f.modes for rate in (*f.rates_of(mode), 0)]
    if name in RATIOS:
        loads = [(p.machine, p.load(n)) for p in RATIOS[name] for n in p.outputs]
        modes = ONLY.get(name, NEO)
        theirs = [r for r in runs if r.mode in modes and any(belongs(r, *load) for load in loads)]
        like = [r.like._replace(mode=mode) for r in theirs if r.like for mode in (r.mode, r.base) if mode]
        found = [run(place, mode, load) for place, load in loads for mode in (SWIFT, *modes)]
        return like + found
    if name == "7":
        return [run(LOADS["6b"].machine, mode, "azure-code", 1.6) for mode in (VLLM, *NEO)]
    peers = PEERS.values() if name == "10b" else ()
    return [run(place, mode, "synthetic:1000,200") for place in peers for mode in (VLLM, SWIFT)]


def belongs(r: Recorded, place: str, load: str) -> bool:
    return (r.model, r.workload) == (SETTINGS[place].model, load)


def all_runs() -> list[Run]:
    """Each simulation once."""
    runs = recorded(RECORDED)
    return list(dict.fromkeys(r for name in NAMES for r in wanted(name, runs)))


# ---- Drawing ----

INK, GREY = "#000000", "#777777"  # Okabe and Ito's colours from here on
LOOK = {
    VLLM: ("GPU-only, vLLM's scheduling", "#56b4e9"), SWIFT: ("GPU-only, SwiftLLM's scheduling", "#56b4e9"),
    "neo-released": ("NEO, released constants", "#d55e00"), "neo": ("NEO, the six steps", "#0072b2"),
    "fastdecode+": ("FastDecode+", "#009e73"),
}  # fmt: skip
STAGES = {
    "linear": "#0072b2", "prefill_attn": "#56b4e9", "gpu_attn": "#009e73", "cpu_attn": "#e69f00", "transfer": INK, "store": INK,
    "swap": INK,
}  # fmt: skip
WIDTH = 3.4  # inches: a column of the paper
STYLE: Any = {
    "font.size": 7,
    "axes.titlesize": 7,
    "legend.fontsize": 6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
}
Drawn = tuple[Any, list["Row"]]  # a matplotlib figure, and its table


class Row(NamedTuple):
    """A line of the table beneath a figure; nan: nothing known."""

    what: str
    paper: float = NAN
    simulated: float = NAN
    measured: float = NAN
    alike: float = NAN  # simulated as measured: as many requests, the profile of that machine

    def __str__(self) -> str:
        cells = [*self[1:], self.simulated - self.paper]
        return f"{self.what:42}" + "".join(f"{'' if c != c else format(c, '.3g'):>11}" for c in cells)


def table(rows: Sequence[Row]) -> str:
    head = ("paper", "simulated", "measured", "sim. alike", "difference")
    return "\n".join([" " * 42 + "".join(f"{h:>11}" for h in head), *map(str, rows)])


def axes(count: int = 1, height: float = 2.5, **more: Any) -> tuple[Any, list[Any]]:
    """A figure one column wide with up to two panels a row."""
    from matplotlib import pyplot as plt

    shape = -(-count // 2), min(count, 2)
    fig, grid = plt.subplots(*shape, figsize=(WIDTH, height), squeeze=False, layout="constrained", **more)
    fig.get_layout_engine().set(rect=(0, 0.16 / height, 1, 1 - 0.16 / height))  # beneath: the source
    return fig, grid.ravel().tolist()


def legend(fig: Any, panels: Sequence[Any], ncols: int = 1) -> None:
    """One for all panels, above them."""
    found = {text: line for ax in panels for line, text in zip(*ax.get_legend_handles_labels())}
    fig.legend(found.values(), found.keys(), loc="outside upper center", ncols=ncols, frameon=False)


def crossing(points: Sequence[tuple[float, float]], level: float) -> float:
    """The first x where a curve passes a level, between its points; nan if it never does."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if y0 <= level < y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return NAN


def load_curve(results: Results, f: Load, mode: str) -> list[tuple[float, float]]:
    """(rate, mean per-token latency)."""
    return [(rate, get(results, run(f.machine, mode, f.workload, rate), "latency_s")) for rate in f.rates_of(mode)]


def draw_load(name: str, results: Results, runs: Sequence[Recorded]) -> Drawn:
    """Figures 6 and 8a."""
    f, (fig, (ax,)) = LOADS[name], axes()
    curves = {mode: load_curve(results, f, mode) for mode in f.modes}
    for mode, points in curves.items():
        ax.plot(*zip(*points), marker=".", color=LOOK[mode][1], label=f"simulated: {LOOK[mode][0]}")
    for who, marker in (("vLLM", "s"), ("NEO", "o")):
        if known := curve_of(name, who):
            ax.plot(*zip(*known.items()), marker, mfc="none", color=INK, label=f"paper: {who}, digitised")
    mine = [r for r in runs if belongs(r, f.machine, f.workload) and r.mode in f.modes]
    for r in mine:
        label = f"{r.source} on {r.place or r.ran_on}: {r.mode}, {r.requests} at once"
        ax.axvline(r.per_s, color=LOOK[r.mode][1], ls=":", label=label)
    ax.axhline(f.limit_s, color=GREY, lw=0.6, ls="--")
    ax.set(ylim=(0, 2 * f.limit_s), xlim=0, xlabel="request rate (requests/s)", ylabel="mean per-token latency (s)")
    legend(fig, [ax])
    return fig, load_rows(name, curves, results, mine)


def load_rows(name: str, curves: Mapping[str, Any], results: Results, runs: Sequence[Recorded]) -> list[Row]:
    """Loads at the paper's latency, latencies at the paper's rates, completions of a batch offered at once."""
    f, rows = LOADS[name], list[Row]()
    loads = {mode: crossing(points, f.limit_s) for mode, points in curves.items()}
    gain = next((p.y for p in paper(name, "reported")), NAN)
    neo = crossing([*curve_of(name, "NEO").items()], f.limit_s)
    for mode, points in curves.items():
        known = curve_of(name, "vLLM" if mode == VLLM else "NEO")
        rows.append(Row(f"load at {f.limit_s:.0f} s (1/s): {mode}", neo / gain if mode == VLLM else neo, loads[mode]))
        if mode in NEO and VLLM in loads:
            rows.append(Row("    over vLLM's", gain, loads[mode] / loads[VLLM]))
        rows += [Row(f"    latency at {x}/s (s)", known[x], y) for x, y in points if x in known]
        mine = [(r.per_s, get(results, r.like, "requests_per_s")) for r in runs if r.mode == mode]
        at_once = get(results, run(f.machine, mode, f.workload), "requests_per_s")
        rows.append(Row("    completions/s, all at once", NAN, at_once, *(mine[0] if mine else ())))
    return rows


def draw_ratio(name: str, results: Results, runs: Sequence[Recorded]) -> Drawn:
    """Figures 8b, 9 and 10a."""
    panels, rows = RATIOS[name], list[Row]()
    fig, grid = axes(len(panels), 4.0 if len(panels) > 2 else 2.5, sharey=True, sharex=True)
    for ax, p in zip(grid, panels):
        known = curve_of(name, p.title)
        for mode in ONLY.get(name, NEO):
            ys = {n: ratio(results, run(p.machine, mode, p.load(n))) for n in p.outputs}
            ax.plot(*zip(*ys.items()), marker=".", color=LOOK[mode][1], label=f"simulated: {LOOK[mode][0]}")
            for n in p.outputs:
                mine = [
                    r
                    for r in runs
                    if belongs(r, p.machine, p.load(n)) and r.mode == mode and p.stand_in in ("", r.place)
                ]
                pairs = [(r.ratio, ratio(results, r.like, "requests_per_s", r.base)) for r in mine]
                rows.append(Row(f"{p.title}, {n} out: {mode}", known.get(n, NAN), ys[n], *(pairs[0] if pairs else ())))
                for r in mine:
                    label = f"{r.source} on {r.place or r.ran_on}: {mode}, {r.requests} requests"
                    ax.plot(n, r.ratio, "D", color=LOOK[mode][1], mec=INK, label=label)
        if known:
            ax.plot(*zip(*known.items()), "o", mfc="none", color=INK, label="paper: NEO, digitised")
        for point in paper(name, "reported") if not known else ():
            label = f"paper: {point.curve} {point.what.rpartition(': ')[2]}"
            ax.axhline(point.y, color=INK, lw=0.8, ls=":", label=label)
        ax.axhline(1, color=GREY, lw=0.6, ls="--")
        ax.set(title=p.title, xlabel="mean output length (tokens)" if ax in grid[-2:] else "")
    for ax in grid[::2]:
        ax.set_ylabel("relative throughput")
    legend(fig, grid)
    return fig, rows


def draw_distribution(name: str, results: Results, runs: Sequence[Recorded]) -> Drawn:
    """Figure 7: per-token latencies of all requests at one rate, as a cumulative distribution."""
    (fig, (ax,)), rows = axes(), list[Row]()
    for r in wanted(name):
        values = results[r]["latency_quantiles_s"] if r in results else [NAN] * len(QUANTILES)
        ax.plot(values, QUANTILES, color=LOOK[r.mode][1], label=f"simulated: {LOOK[r.mode][0]}")
        rows += [Row(f"p{q} per-token latency (s): {r.mode}", NAN, values[QUANTILES.index(q)]) for q in (50, 90, 95)]
    ax.set(xscale="log", xlabel="per-token latency (s)", ylabel="requests (%)", title="A10G, AC at 1.6 requests/s")
    legend(fig, [ax])
    return fig, rows


def draw_peer(name: str, results: Results, runs: Sequence[Recorded]) -> Drawn:
    """Figure 10b: GPU-only against a peer. The simulator knows both by their scheduling only, with the same kernels."""
    (fig, (ax,)), rows, bars = axes(), list[Row](), list[tuple[str, float, str]]()
    for point, (title, place) in zip(paper(name, "reported"), PEERS.items()):
        y = ratio(results, run(place, SWIFT, "synthetic:1000,200"), base=VLLM)
        bars += [(f"paper\n{title}", point.y, GREY), (f"simulated\n{title}", y, LOOK[SWIFT][1])]
        rows.append(Row(f"SwiftLLM / vLLM, {title}", point.y, y))
    for path in sorted(RECORDED.glob("peer_*.json")):
        line = json.loads(path.read_text())
        for peer, per_s in line["peers_per_s"].items():
            bars.append((f"recorded\nover {peer}", y := line["requests_per_s"] / per_s, "#cc79a7"))
            rows.append(Row(f"{SWIFT} / {peer}", NAN, NAN, y))
    for i, (_, y, colour) in enumerate(bars):
        ax.bar(i, y, color=colour)
        ax.annotate(f"{y:.2f}", (i, y), ha="center", va="bottom")
    ax.set_xticks(range(len(bars)), [text.replace(" (", "\n(") for text, _, _ in bars], size=6)
    ax.set(ylabel="GPU-only throughput\nover the peer's", ylim=(0, 1.2 * max(y for _, y, _ in bars)))
    ax.grid(axis="x", alpha=0)
    return fig, rows


# ---- Timelines and diagrams ----

PIPELINES = RECORDED / "h200_8sm_pipelines.json"
TIMELINES = {  # figure: what, case of a recorded one, and its sub-batches: prefills of 512 tokens, GPU decodes, CPU decodes
    "3": ("simple offloading", "simple", [(0, 0, 44)]),
    "4": ("symmetric pipelining", "symmetric", [(0, 0, 22), (0, 0, 22)]),
    "5": ("asymmetric pipelining", "asymmetric, with a prefill", [(1, 22, 4), (0, 0, 40)]),
}


def timelines(name: str, source: str) -> dict[str, Timeline]:
    """The layers of one iteration on 8 SMs of an H200, simulated and recorded; decodes are at 1,100 tokens."""
    _, case, counts = TIMELINES[name]
    model, costs, config = hardware.setting("h200-8sm-14t", "llama-3.1-8b", "float16", 26400, 40)
    prompt, decode = Work(Request(0, (1,) * 512), 0, 512), Work(Request(1, (1,) * 1100), 1099, 1)
    batches = tuple(SubBatch((prompt,) * p, (decode,) * g, (decode,) * c) for p, g, c in counts)
    devices = simulator.VirtualDevices(model, costs, config)
    devices.run(IterationPlan(case, batches))
    found = {"simulated": Timeline(), "recorded": Timeline()}
    simulator.draw(found["simulated"], devices.iterations[0], costs)
    for lane, stage, start_s, end_s, layer, batch in json.loads(PIPELINES.read_text())["cases"][case]["events"]:
        found["recorded"].record(lane, stage, start_s, end_s, layer=layer, batch=batch)
    for timeline in found.values():
        timeline.events = [e for e in timeline.events if e.args.get("layer") is not None]
    return found if source != "simulated" else {"simulated": found["simulated"]}


def draw_timeline(name: str, source: str) -> Drawn:
    """Figures 3 to 5: three layers of one iteration; in the table each side's busy share of all its layers."""
    found, (fig, (ax,)) = timelines(name, source), axes(height=2.1)
    kind, lanes = [*found][-1], [lane for lane in LANES if lane != "scheduler"]
    layers = sorted({e.args["layer"] for e in found[kind].events})
    first = layers[len(layers) // 3]
    inside = [e for e in found[kind].events if first <= e.args["layer"] < first + 3]
    start_s = min(e.start_s for e in inside)
    for e in inside:
        stage, batch = {"pre": "linear", "post": "linear"}.get(e.name, e.name), e.args.get("batch")
        ax.broken_barh([((e.start_s - start_s) * 1e3, e.duration_s * 1e3)], (lanes.index(e.lane) - 0.4, 0.8), linewidth=0,
                       label=stage + (", batch-1" if batch else ""), color=STAGES[stage], alpha=0.55 if batch else 1)  # fmt: skip
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    ax.set(
        xlabel="time (ms)", title=f"{kind} on 8 SMs of an H200:\n{TIMELINES[name][0]}, layers {first} to {first + 2}"
    )
    legend(fig, [ax], 3)
    spans = [(t.span_s[1] - t.span_s[0]) / len(layers) * 1e3 for t in found.values()]
    shares = [
        Row(f"busy share, {lane}", NAN, *(t.busy_fraction(lane) for t in found.values())) for lane in ("gpu", "cpu")
    ]
    return fig, [Row("ms a layer", NAN, *spans), *shares]


def canvas(rows: Sequence[tuple[float, float, float, str, str]], height: float) -> tuple[Any, Any]:
    """A diagram of boxes (left, bottom, width, text, colour), 0.8 high, on a sheet 12 wide and as high as the figure."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    fig = plt.figure(figsize=(WIDTH, height))
    ax = fig.add_axes((0, 0, 1, 1), xlim=(-0.1, 12.1), ylim=(-0.1, 12.2 * height / WIDTH - 0.1))
    ax.set_axis_off()
    for x, y, width, text, colour in rows:
        ax.add_patch(FancyBboxPatch((x, y), width, 0.8, boxstyle="round,pad=0.03", fc=colour, ec=INK, lw=0.6))
        ax.text(x + width / 2, y + 0.4, text, ha="center", va="center", size=6)
    return fig, ax


def arrows(ax: Any, *ends: tuple[float, float, float, float], style: str = "->") -> None:
    for x0, y0, x1, y1 in ends:
        ax.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": style, "lw": 0.8, "shrinkA": 0, "shrinkB": 0})


BLUE, YELLOW, GREEN, PALE = "#cfe8f7", "#fbe3b5", "#d6efe5", "#eeeeee"


def draw_workflow() -> Drawn:
    """Figure 1, from the model's own pieces: whatever `Llama` declares as x -> y, with attention between its halves."""
    tree = ast.parse(Path(__file__).with_name("model.py").read_text())
    llama = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Llama")
    methods = [f for f in llama.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
    pieces = [f.name for f in methods if "->" in (ast.get_docstring(f) or "")]
    stages = [*pieces[:2], "attention", *pieces[2:], "sample"]
    lefts, widths = (0, 1.6, 3.9, 6.2, 8.8, 10.4), (1.4, 2.1, 2.1, 2.4, 1.4, 1.6)
    rows = [(x, y, w, stage, BLUE) for y in (3.9, 0.6) for x, w, stage in zip(lefts, widths, stages)]
    fig, ax = canvas([*rows, (2.8, 2.3, 4.3, "KV cache: all tokens so far", YELLOW)], 1.6)
    ax.text(0, 5.0, "prefill: a whole prompt at once, bound by arithmetic", size=6)
    ax.text(0, 0.1, "decode: one token a request, bound by memory", size=6)
    ax.text(7.4, 2.7, f"{stages[1]} to {stages[3]}:\nonce a layer", size=6, va="center")
    arrows(ax, (4.95, 3.85, 4.95, 3.2), (4.95, 2.25, 4.95, 1.5))
    return fig, []


def draw_architecture() -> Drawn:
    """Figure 2, from live objects: the scheduler's queues and steps, a sub-batch's fields, the pools, the lanes."""
    _, costs, config = hardware.setting("a10g-g5.4xlarge", "llama-3.1-8b", gpu_kv=26400, cpu_kv_gib=48, mode="neo")
    blocks = Blocks(config.num_gpu_blocks, config.num_cpu_blocks, config.block_size)
    scheduler = POLICIES["neo"](config, blocks, costs)
    queues = [k for k, v in vars(scheduler).items() if isinstance(v, (deque, list))]
    steps = [k.strip("_").replace("step", "step ").replace("_", " ") for k in dir(scheduler) if k.startswith("_step")]
    kinds = [f.name.replace("_", " ") for f in fields(SubBatch)]
    rows = [(0.0, 4.6 - 1.1 * i, 1.7, queue, PALE) for i, queue in enumerate(queues)]
    rows += [(2.4, 5.2 - i, 3.1, step, GREEN) for i, step in enumerate(steps)]
    rows += [(6.2, 4.9, 5.8, f"0: {', '.join(kinds)}", BLUE), (6.2, 3.6, 5.8, f"1: {kinds[-1]}", YELLOW)]
    rows += [(6.2, 2.2 - 1.6 * i, 5.8, f"{d} pool: {n:,} blocks of {config.block_size} tokens", (BLUE, YELLOW)[i])
             for i, (d, n) in enumerate(blocks.total.items())]  # fmt: skip
    fig, ax = canvas(rows, 1.85)
    for x, text in ((0, "queues"), (2.4, "scheduler: plan()"), (6.2, "pipeline: two sub-batches")):
        ax.text(x, 6.2, text, size=6)
    arrows(ax, (1.75, 3.9, 2.35, 3.9), (5.55, 4.4, 6.15, 5.2), (5.55, 3.4, 6.15, 3.9), (8.9, 3.55, 8.9, 3.05))
    arrows(ax, (8.9, 1.45, 8.9, 2.15), style="<->")
    ax.text(9.1, 1.8, f"swaps: {', '.join(LANES[2::2])}", size=6, va="center")
    return fig, []


# ---- How close the simulation comes ----


class Claim(NamedTuple):
    """One line of what is asked of `neo-released` against the paper."""

    text: str
    found: str
    holds: bool


def fidelity(results: Results, mode: str = NEO[0]) -> list[Claim]:
    """Figure 10a point by point and in its order, figure 6c's saturation, and the other reported numbers within 25 %."""
    pairs = [(p.title, n, curve_of("10a", p.title)[n], ratio(results, run(p.machine, mode, p.load(n))))
             for p in RATIOS["10a"] for n in p.outputs]  # fmt: skip
    near = sum(abs(theirs - ours) <= 0.10 for _, _, theirs, ours in pairs)
    wrong = sum(a[1] == b[1] and a[2] > b[2] + 0.02 and not a[3] > b[3] for a in pairs for b in pairs)
    found = [Claim("10a: 16 of 20 points within 0.10", f"{near}", near >= 16),
             Claim("10a: machines in the published order", f"{wrong} pairs are not", not wrong)]  # fmt: skip
    for name in ("6a", "6b", "6c"):
        f, gain = LOADS[name], paper(name, "reported")[0].y
        ours, vllm = (crossing(load_curve(results, f, m), f.limit_s) for m in (mode, VLLM))
        found.append(_within(f"{name}: load over vLLM's at {f.limit_s:.0f} s", gain, ours / vllm))
        if name == "6c":
            found += [_within("6c: vLLM saturates (1/s)", 0.5, vllm), _within("6c: NEO saturates (1/s)", 3.5, ours)]
    for name in ("9a", "9b", "9c"):
        gains = [ratio(results, run(p.machine, mode, p.load(n))) for p in RATIOS[name] for n in p.outputs]
        found.append(_within(f"{name}: largest gain over output lengths", paper(name, "reported")[0].y, max(gains)))
    (p,) = RATIOS["8b"]
    least, fast = (min(ratio(results, run(p.machine, m, p.load(n))) for n in p.outputs) for m in (mode, "fastdecode+"))
    return [*found, Claim("8b: NEO at least 1.0, less 25 %", f"{least:.3g}", least >= 0.75),
            Claim("8b: FastDecode+ falls under 0.60, 25 % more", f"{fast:.3g}", fast <= 0.75)]  # fmt: skip


def _within(text: str, theirs: float, ours: float) -> Claim:
    return Claim(f"{text}: {theirs:.3g} within 25 %", f"{ours:.3g}", abs(ours / theirs - 1) <= 0.25)


# ---- Everything together ----

HOW = {
    **dict.fromkeys(LOADS, draw_load), **dict.fromkeys(RATIOS, draw_ratio), "7": draw_distribution, "10b": draw_peer
}  # fmt: skip


def draw(name: str, source: str = "recorded", folder: Path = RECORDED) -> tuple[Any, str, str]:
    """A figure, its table, and whose data it shows. Raises NeoLiteError for a name or source that is unknown."""
    import matplotlib

    if name not in NAMES:
        raise NeoLiteError(f"figure {name!r} is unknown: choose from {', '.join(NAMES)}")
    if source not in SOURCES:
        raise NeoLiteError(f"source {source!r} is unknown: choose from {', '.join(SOURCES)}")
    runs = recorded(folder) if source != "simulated" else []
    with matplotlib.rc_context({**plots.STYLE, **STYLE}):
        if name in ("1", "2"):
            return (draw_workflow() if name == "1" else draw_architecture())[0], "", "paper"
        if name in TIMELINES:
            fig, rows = draw_timeline(name, source)
            return fig, table(rows), "simulated" if source == "simulated" else "recorded"
        fig, rows = HOW[name](name, results(wanted(name, runs)), runs)
    there = bool(paper(name) or paper(name, "reported")), True, any(row.measured == row.measured for row in rows)
    kinds = ("paper", "simulated", "measured" if source == "measured" else "recorded")
    return fig, table(rows), " + ".join(kind for kind, is_there in zip(kinds, there) if is_there)


MEASURES = {  # what `--source measured` runs on the GPU at hand; each command has its own baseline
    "6c": ["--model random:llama-2-7b --mode gpu-only,neo --workload osc --requests 300 --gpu-kv-tokens 864 --cpu-kv-gib 20"
           " --max-batched-tokens 832"],
    "10a": [f"--model random:llama-3.1-8b --mode gpu-only-unchunked,neo --workload synthetic:1000,{n} --requests 150"
            " --gpu-kv-tokens 26400 --cpu-kv-gib 20 --max-batched-tokens 20480" for n in (100, 200, 400)],
}  # fmt: skip


def measure(names: Sequence[str], folder: Path) -> None:
    """Runs on this machine's GPU what is not in `folder` yet: an interrupted run goes on there."""
    if machine.gpu() is None:
        raise NeoLiteError("--source measured: no CUDA GPU here; choose recorded: runs on a part of an H200")
    folder.mkdir(parents=True, exist_ok=True)
    for name in set(names) & set(MEASURES):
        for i, options in enumerate(MEASURES[name]):
            if not (path := folder / f"bench_{name}_{i}.json").exists():
                command = [sys.executable, "-m", "neo_lite", "bench", "--json", *options.split()]
                print("measuring: python", *command[1:], file=sys.stderr)
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    raise NeoLiteError(f"figure {name} could not be measured, for the reason above: choose recorded")
                path.write_text(done.stdout)


def main(args: argparse.Namespace) -> int:
    """Draws figures to files, and prints their tables and how close the simulation comes."""
    from matplotlib import pyplot as plt

    names = args.names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        raise NeoLiteError(f"figure {unknown[0]!r} is unknown: choose from {', '.join(NAMES)}")
    folder = RECORDED
    if args.source == "measured":
        measure(names, folder := Path(args.out) / "measured")
    if args.fresh:
        runs = recorded(folder)
        compute([r for name in names for r in wanted(name, runs)], all_runs())
    for name in names:
        fig, text, source = draw(name, args.source, folder)
        path = plots.save_figure(fig, f"11_fig{name}", source, folder=args.out)
        fig.savefig(path.with_suffix(".png"), dpi=250, bbox_inches="tight")
        plt.close(fig)
        print(f"figure {name}: {source}; {path} and .png\n{text}\n")
    if not args.names:
        for claim in fidelity(results(all_runs())):
            print(f"{'yes' if claim.holds else 'NO':4}{claim.text:64}{claim.found}")
    return 0
