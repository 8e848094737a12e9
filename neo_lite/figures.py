"""The paper's ten figures: its points, the simulated curves, recorded or measured runs, side by side and labelled.

Each comes with a table paper / simulated / measured / difference. Called by `python -m neo_lite figures` and notebook 11.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from neo_lite import hardware, machine, plots, simulator, sweep
from neo_lite.blocks import Blocks
from neo_lite.config import NeoLiteError
from neo_lite.neo import POLICIES
from neo_lite.request import IterationPlan, Request, SubBatch, Work
from neo_lite.sweep import NEO, RECORDED, SETTINGS, SWIFT, VLLM, Recorded, Results, curve_of, get, paper, ratio, run
from neo_lite.timeline import COLOURS, LANES, Timeline

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
    "6c": Load("t4-g4dn.4xlarge", "osc", (VLLM, *NEO), (0.2, 0.4, 0.5, 1.5, 2.5, 3.1, 3.3, 3.5, 3.7, 3.9, 4.2), 1.0,
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


def wanted(name: str, runs: Sequence[Recorded] = ()) -> list[sweep.Run]:
    """The simulations that a figure shows, and those that repeat its recorded runs."""
    if name in LOADS:
        f = LOADS[name]
        theirs = [r for r in runs if beside(r, f)]
        found = [run(f.machine, mode, f.workload, rate) for mode in f.modes for rate in (*f.rates_of(mode), 0)]
    elif name in RATIOS:
        loads = [(p.machine, p.load(n)) for p in RATIOS[name] for n in p.outputs]
        modes = ONLY.get(name, NEO)
        theirs = [r for r in runs if r.mode in modes and any(belongs(r, *load) for load in loads)]
        found = [run(place, mode, load) for place, load in loads for mode in (SWIFT, *modes)]
    elif name == "7":
        return [run(LOADS["6b"].machine, mode, "azure-code", 1.6) for mode in (VLLM, *NEO)]
    else:
        peers = PEERS.values() if name == "10b" else ()
        return [run(place, mode, "synthetic:1000,200") for place in peers for mode in (VLLM, SWIFT)]
    return [r.like._replace(mode=mode) for r in theirs if r.like for mode in (r.mode, r.base) if mode] + found


def belongs(r: Recorded, place: str, load: str) -> bool:
    return (r.model, r.workload) == (SETTINGS[place].model, load)


def beside(r: Recorded, f: Load) -> bool:
    """In a load figure's table: runs of its model, and of a model that no figure has with this workload."""
    homeless = not any(belongs(r, other.machine, other.workload) for other in LOADS.values())
    return r.mode in f.modes and r.workload == f.workload and (homeless or belongs(r, f.machine, f.workload))


RAN_ON = re.compile(r"(all|\d+) of the \d+ SMs of an (?:NVIDIA )?(.+), (\d+) of (\d+) threads of (.+)")


def at(r: Recorded, p: Panel) -> bool:
    """Whether a run was made on the panel's machine, or on the part of an H200 that stands for it."""
    card, threads = p.machine.split("-")[0], 2 * hardware.HARDWARE[p.machine].cpu_threads  # vCPUs: AWS has two a core
    found = RAN_ON.match(r.ran_on)
    own = found and found[1] == "all" and card in found[2].lower().split() and found[4] == str(threads)
    return bool(own) or (r.source == "recorded" and not p.stand_in) or (r.place == p.stand_in != "")


def in_panel(r: Recorded, p: Panel, panels: Sequence[Panel], load: str) -> bool:
    """Recorded runs lie where their machine is meant; a reader's own are never left out: in every panel, if none is theirs."""
    theirs = at(r, p) or (r.source == "measured" and not any(at(r, q) for q in panels))
    return theirs and belongs(r, p.machine, load) and not r.rate


def all_runs() -> list[sweep.Run]:
    """Each simulation once."""
    runs = runs_in(RECORDED)
    return list(dict.fromkeys(r for name in NAMES for r in wanted(name, runs)))


# ---- Reading what was recorded ----

FIELDS: dict[str, type] = {
    "command": str, "ran_on": str, "model": str, "dtype": str, "mode": str, "workload": str, "requests": int, "seed": int,
    "requests_per_s": float, "gpu_kv_tokens": int, "cpu_kv_gib": float, "stamp": dict,
}  # fmt: skip
NAMED = ("model", "dtype", "mode", "workload", "requests", "rate", "seed", "gpu-kv-tokens", "cpu-kv-gib", "num-sms")
PEER_FIELDS = {**{k: v for k, v in FIELDS.items() if k != "cpu_kv_gib"}, "peers_per_s": dict}


def fits(value: Any, kind: type) -> bool:
    """A text or an object that is not empty, a count from 0 on, a rate or size above 0."""
    if kind is float:
        return type(value) in (int, float) and 0 < value < 1e300
    return type(value) in (kind,) and (value >= 0 if kind is int else bool(value))


def options_of(command: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+) (\S+)", command))


def complaint(line: Any, fields: Mapping[str, type]) -> str:
    """What is wrong with a line of `bench --json`: a field, or a command that is not the fields'; else ""."""
    if not isinstance(line, dict):
        return f"{str(line)[:20]!r} is no JSON object"
    fields = {**fields, "mean_per_token_latency_s": float} if line.get("rate_per_s") else fields
    if bad := [name for name, kind in fields.items() if not fits(line.get(name), kind)]:
        return f"its {bad[0]} is {line.get(bad[0])!r}"
    card, option = line["stamp"].get("gpu"), options_of(line["command"])
    if not isinstance(card, dict):
        return f"its stamp's gpu is {card!r}"
    if bad := [k for k, v in (line["peers_per_s"] if "peers_per_s" in fields else {}).items() if not fits(v, float)]:
        return f"its peers_per_s has {line['peers_per_s'][bad[0]]!r}"
    said = {**line, "num_sms": card.get("partition_sms") or 0, "rate": line.get("rate_per_s") or float("inf")}
    for name in NAMED:
        asked, found = option.get(name, "auto"), str(said.get(name.replace("-", "_")))
        asked, found = asked.removesuffix(".0"), found.removesuffix(".0")
        if found not in (asked.split(",") if name == "mode" else [asked]) and asked != "auto":
            return f"its command has --{name} {asked}, and it has {found}"
    budget = option.get("max-batched-tokens", "0")
    return "" if budget.isdecimal() else f"its command has --max-batched-tokens {budget}"


def checked(path: Path, fields: Mapping[str, type] = FIELDS) -> list[dict[str, Any]]:
    """A recorded file's lines; raises NeoLiteError that names the file."""
    try:
        lines: list[dict[str, Any]] = sweep.lines_of(path)
        whys = [why for line in lines if (why := complaint(line, fields))] or ([] if lines else ["it is empty"])
    except (OSError, ValueError):
        whys = ["it is no JSON, or ends amid a line"]
    if whys:
        raise NeoLiteError(f"{path}: {whys[0]}: remove the file, or run its command again")
    return lines


def runs_in(folder: Path) -> list[Recorded]:
    """A folder's runs, each file checked."""
    for path in sorted(folder.glob("bench_*.json")):
        checked(path)
    return sweep.recorded(folder)


# ---- Drawing ----

INK, GREY = "#000000", "#777777"  # Okabe and Ito's colours from here on
# Line styles and markers differ, so that the curve beneath shows where two coincide.
LOOK = {
    VLLM: ("GPU-only, vLLM's scheduling", "#56b4e9", "-", "s"), SWIFT: ("GPU-only, SwiftLLM's scheduling", "#56b4e9", "-", "s"),
    "neo-released": ("NEO, released constants", "#d55e00", "-", "^"), "neo": ("NEO, the six steps", "#0072b2", "--", "."),
    "fastdecode+": ("FastDecode+", "#009e73", "-.", "x"),
}  # fmt: skip
STAGES = ("linear", "prefill_attn", "gpu_attn", "cpu_attn", "transfer", "store", "swap")  # in the legend's order
WIDTH, SOURCE_IN = 3.4, 0.16  # inches: a column of the paper; the line that names the source
STYLE: Any = {"font.size": 7, "axes.titlesize": 7, "legend.fontsize": 6, "lines.linewidth": 1.1, "lines.markersize": 3}
Drawn = tuple[Any, list["Row"]]  # a matplotlib figure, and its table


class Row(NamedTuple):
    """A line of the table beneath a figure; nan: nothing known."""

    what: str
    paper: float = NAN
    simulated: float = NAN
    measured: float = NAN
    alike: float = NAN  # simulated as measured: as many requests, the profile of that machine

    def __str__(self) -> str:
        like = self.alike if self.alike == self.alike else self.simulated  # a run is held against its own simulation
        cells = [*self[1:], self.simulated - self.paper, self.measured - like]
        return f"{self.what:46.46}" + "".join(f"{'' if c != c else format(c, '.3g'):>11}" for c in cells)


def table(rows: Sequence[Row]) -> str:
    head = ("paper", "simulated", "real run", "sim. alike", "sim.-paper", "run-sim.")
    return "\n".join([" " * 46 + "".join(f"{h:>11}" for h in head), *map(str, rows)])


def axes(count: int = 1, height: float = 2.5, **more: Any) -> tuple[Any, list[Any]]:
    """A figure one column wide with up to two panels a row."""
    shape = -(-count // 2), min(count, 2)
    fig, grid = plt.subplots(*shape, figsize=(WIDTH, height), squeeze=False, layout="constrained", **more)
    grow(fig, 0)
    return fig, grid.ravel().tolist()


def grow(fig: Any, inches: float) -> None:
    """Higher by some; beneath the axes stays room for the source."""
    height = fig.get_figheight() + inches
    fig.set_figheight(height)
    fig.get_layout_engine().set(rect=(0, SOURCE_IN / height, 1, 1 - SOURCE_IN / height))


def line_of(mode: str) -> dict[str, Any]:
    return dict(zip(("label", "color", "ls", "marker"), (f"simulated: {LOOK[mode][0]}", *LOOK[mode][1:])))


def legend(fig: Any, panels: Sequence[Any], title: str = "") -> None:
    """One for all panels, above them."""
    found = {text: line for ax in panels for line, text in zip(*ax.get_legend_handles_labels())}
    fig.legend(found.values(), found.keys(), loc="outside upper center", frameon=False, title=title, title_fontsize=7)
    grow(fig, 0.11 * max(0, len("\n".join(found).splitlines()) - 4))  # a legend takes no room from the axes


def heading(place: str, about: str = "", host: bool = True) -> str:
    card, _, instance = place.partition("-")
    where = card.upper().replace("2X", "2 x ") + (f" ({instance})" if host and instance else "")
    return f"{SETTINGS[place].model.title()} on {where}{about}"


def place_of(r: Recorded) -> str:
    """Of a part of a card its share and threads; of a whole machine its CPU, too."""
    if not (found := RAN_ON.match(r.ran_on)):
        return r.ran_on
    part, card, threads, _, cpu = found.groups()
    return f"{card}, {threads} threads of {cpu}" if part == "all" else f"{part} SMs of an {card}, {threads} threads"


def label_of(r: Recorded, how: str) -> str:
    """Wrapped: a column is narrow, and names of CPUs are long."""
    text = f"{r.source} on {place_of(r)}: {LOOK[r.mode][0]}, {r.requests} requests{how}"
    return textwrap.fill(text, 52, break_on_hyphens=False)


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
        ax.plot(*zip(*points), **line_of(mode))
    for who, marker in (("vLLM", "s"), ("NEO", "o")):
        if known := curve_of(name, who):
            ax.plot(*zip(*known.items()), marker, mfc="none", color=INK, label=f"paper: {who}, digitised")
    for r in runs:
        mine = belongs(r, f.machine, f.workload) and r.mode in f.modes
        if mine and r.rate:
            ax.plot(r.rate, r.latency_s, "D", color=LOOK[r.mode][1], mec=INK, label=label_of(r, ""))
        elif mine:
            ax.axvline(r.per_s, color=LOOK[r.mode][1], ls=":", label=label_of(r, " at once"))
    ax.axhline(f.limit_s, color=GREY, lw=0.6, ls="--")
    ax.set(ylim=(0, 2 * f.limit_s), xlim=0, xlabel="request rate (requests/s)", ylabel="mean per-token latency (s)")
    if VLLM in curves and not curve_of(name, "NEO"):  # the paper prints no more than a gain
        gain, load = paper(name, "reported")[0].y, crossing(curves[VLLM], f.limit_s)
        ends = {"arrowstyle": "|-|,widthA=.3,widthB=.3", "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (gain * load, f.limit_s), (load, f.limit_s), arrowprops=ends)
        text = f"paper: load {gain - 1:+.1%}, reported\n(from the simulated baseline's)"
        ax.annotate(text, (load, f.limit_s), (-6, 4), textcoords="offset points", ha="right", size=6)
    legend(fig, [ax], title=heading(f.machine, f", {f.workload}"))
    return fig, load_rows(name, curves, results, [r for r in runs if beside(r, f)])


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
        at_once = get(results, run(f.machine, mode, f.workload), "requests_per_s")
        rows.append(Row("    completions/s, 2,000 at once", NAN, at_once))
        for r in (r for r in runs if r.mode == mode):
            how, field, y = "at once", "requests_per_s", r.per_s
            if r.rate:
                how, field, y = f"at {r.rate:g}/s: latency (s)", "latency_s", r.latency_s
            rows.append(Row(f"    {r.source}: {r.model}, {r.requests} {how}", NAN, NAN, y, get(results, r.like, field)))
            if r.base not in ("", mode) and not r.rate:
                over = ratio(results, r.like, "requests_per_s", r.base)
                rows.append(Row(f"        over its {r.base}'s", NAN, NAN, r.ratio, over))
    return rows


def draw_ratio(name: str, results: Results, runs: Sequence[Recorded]) -> Drawn:
    """Figures 8b, 9 and 10a, whose four hosts differ too much for one scale."""
    panels, several = RATIOS[name], len(RATIOS[name]) > 2
    fig, grid = axes(len(panels), 4.0 if several else 2.5, sharex=True, sharey=not several)
    rows = [row for ax, p in zip(grid, panels) for row in draw_panel(ax, name, p, results, runs)]
    legend(fig, grid, title=heading(panels[0].machine, *((", prompts of 1,000", False) if several else ())))
    for ax in grid[-2:]:
        ax.set_xlabel("output length (tokens)")
    fig.supylabel("throughput over GPU-only's\n(SwiftLLM's scheduling)", size=7, multialignment="center")
    return fig, rows


def draw_panel(ax: Any, name: str, p: Panel, results: Results, runs: Sequence[Recorded]) -> list[Row]:
    known, rows = curve_of(name, p.title), list[Row]()
    for mode in ONLY.get(name, NEO):
        ys = {n: ratio(results, run(p.machine, mode, p.load(n))) for n in p.outputs}
        ax.plot(*zip(*ys.items()), **line_of(mode))
        for n in p.outputs:
            mine = [r for r in runs if r.mode == mode and in_panel(r, p, RATIOS[name], p.load(n))]
            pairs = {r: (r.ratio, ratio(results, r.like, "requests_per_s", r.base)) for r in mine}
            first = next((r for r in mine if at(r, p)), None)
            rows.append(Row(f"{p.title}, {n} out: {mode}", known.get(n, NAN), ys[n], *(pairs[first] if first else ())))
            for r in (r for r in mine if r.ratio == r.ratio):  # its baseline is there
                marker, how = "D" if r.base == SWIFT else "s", f", whole run, over {r.base}"
                ax.plot(n, r.ratio, marker, color=LOOK[mode][1], mec=INK, label=label_of(r, how))
                if r is not first:
                    rows.append(Row(f"    {r.source}, {r.requests} requests: {place_of(r)}", NAN, NAN, *pairs[r]))
    if known:
        ax.plot(*zip(*known.items()), "o", mfc="none", color=INK, label="paper: NEO, digitised")
    reported = paper(name, "reported") if not known else []
    for point in reported:
        text = f"paper: {point.curve} {point.what.rpartition(': ')[2]}: {point.y:g}"
        color = {"NEO": LOOK[NEO[0]][1], "FastDecode+": LOOK["fastdecode+"][1]}[point.curve]
        ax.axhline(point.y, color=color, lw=0.9, ls=":", label=text if len(reported) == 1 else None)
        if len(reported) > 1:  # told apart where they are
            below = point.y >= 1  # where no curve is
            ax.annotate(text, (1, point.y), (0, -4 if below else 2), ("axes fraction", "data"), "offset points", ha="right",
                        va="top" if below else "bottom", color=color, size=6)  # fmt: skip
    if all(point.y != 1 for point in reported):
        ax.axhline(1, color=GREY, lw=0.6, ls="--")
    ax.set_title(p.title)
    return rows


def draw_distribution(name: str, results: Results, runs: Sequence[Recorded]) -> Drawn:
    """Figure 7: per-token latencies of all requests at one rate, as a cumulative distribution."""
    (fig, (ax,)), rows = axes(), list[Row]()
    for r in wanted(name):
        values = results[r]["latency_quantiles_s"] if r in results else [NAN] * len(sweep.QUANTILES)
        ax.plot(values, sweep.QUANTILES, **line_of(r.mode), markevery=2)
        of = dict(zip(sweep.QUANTILES, values))
        rows += [Row(f"p{q} per-token latency (s): {r.mode}", NAN, of[q]) for q in (50, 90, 95)]
    ax.set(xscale="log", xlabel="per-token latency (s)", ylabel="requests (%)")
    legend(fig, [ax], title=heading(LOADS["6b"].machine, ", azure-code at 1.6/s"))
    return fig, rows


def draw_peer(results: Results, source: str, folder: Path) -> Drawn:
    """Figure 10b: GPU-only against a peer. The simulator knows both by their scheduling only, with the same kernels."""
    (fig, (ax,)), rows, bars = axes(), list[Row](), list[tuple[str, float, str]]()
    for point, (title, place) in zip(paper("10b", "reported"), PEERS.items()):
        y = ratio(results, run(place, SWIFT, "synthetic:1000,200"), base=VLLM)
        bars += [(f"paper\n{title}", point.y, GREY), (f"simulated\n{title}", y, LOOK[SWIFT][1])]
        rows.append(Row(f"SwiftLLM / vLLM, {title}", point.y, y))
    found = [] if source == "simulated" else sorted(folder.glob("peer_*.json"))
    for line in (line for path in found for line in checked(path, PEER_FIELDS)):
        for peer, per_s in line["peers_per_s"].items():
            bars.append((f"{source}\nover\n" + peer.replace(" ", "\n"), y := line["requests_per_s"] / per_s, "#cc79a7"))
            rows.append(Row(f"{SWIFT} / {peer}", NAN, NAN, y))
    for i, (_, y, colour) in enumerate(bars):
        ax.bar(i, y, color=colour)
        ax.annotate(f"{y:.2f}", (i, y), ha="center", va="bottom")
    ax.set_xticks(range(len(bars)), [text.replace(" (", "\n(") for text, _, _ in bars], size=6)
    ax.set_ylabel("GPU-only throughput (SwiftLLM's\nscheduling) over the peer's")
    ax.set_ylim(0, 1.2 * max(y for _, y, _ in bars))
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
    try:
        for lane, stage, start_s, end_s, layer, batch in json.loads(PIPELINES.read_text())["cases"][case]["events"]:
            found["recorded"].record(lane, stage, float(start_s), float(end_s), layer=layer, batch=batch)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NeoLiteError(f"{PIPELINES} lacks events of {case!r} ({error!r}): record them again") from None
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
    stages = [{"pre": "linear", "post": "linear"}.get(e.name, e.name) for e in inside]
    for stage in (stage for stage in STAGES if stage in stages):  # the legend, always in this order
        ax.bar(0, 0, 0, fc=COLOURS[stage], label=stage)
    if any(e.args.get("batch") for e in inside):  # a hatch needs no colour
        ax.bar(0, 0, 0, fc=GREY, ec="white", lw=0, hatch="/////", label="hatched: sub-batch 1")
    for e, stage in zip(inside, stages):
        x, y = ((e.start_s - start_s) * 1e3, e.duration_s * 1e3), (lanes.index(e.lane) - 0.4, 0.8)
        hatch = "/////" if e.args.get("batch") and stage != "transfer" else ""  # transfers are too thin for one
        ax.broken_barh([x], y, lw=0, fc=COLOURS[stage], ec="white", hatch=hatch)
    for i in {*range(len(lanes))} - {lanes.index(e.lane) for e in inside}:
        none = "not simulated" if kind == "simulated" else "idle"
        ax.text(0.5, i, none, ha="center", va="center", color=GREY, transform=ax.get_yaxis_transform())
    ax.set_axisbelow(True)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set(ylim=(len(lanes) - 0.5, -0.5), xlabel="time (ms)",
           title=f"{kind} on 8 SMs of an H200:\n{TIMELINES[name][0]}, layers {first} to {first + 2}")  # fmt: skip
    fig.legend(loc="outside upper center", ncols=3, frameon=False)
    spans = [(t.span_s[1] - t.span_s[0]) / len(layers) * 1e3 for t in found.values()]
    shares = [Row(f"busy share, {k}", NAN, *(t.busy_fraction(k) for t in found.values())) for k in ("gpu", "cpu")]
    return fig, [Row("ms a layer", NAN, *spans), *shares]


def canvas(rows: Sequence[tuple[float, float, float, str, str]], height: float) -> tuple[Any, Any]:
    """A diagram of boxes (left, bottom, width, text, colour), 0.8 high, on a sheet 12 wide and as high as the figure."""
    fig = plt.figure(figsize=(WIDTH, height))
    ax = fig.add_axes((0, 0, 1, 1), xlim=(-0.1, 12.1), ylim=(-0.1, 12.2 * height / WIDTH - 0.1))
    ax.set_axis_off()
    for x, y, width, text, colour in rows:
        ax.add_patch(FancyBboxPatch((x, y), width, 0.8, boxstyle="round,pad=0.03", fc=colour, ec=INK, lw=0.6))
        name = re.sub("[cg]pu", lambda found: found[0].upper(), text)
        ax.text(x + width / 2, y + 0.4, name, ha="center", va="center", size=6)
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
    names = (k for k, v in vars(scheduler).items() if isinstance(v, (deque, list)))
    queues = sorted(names, key=lambda name: name == "waiting")  # whose requests are step 3's
    steps = [k.strip("_").replace("step", "step ").replace("_", " ") for k in dir(scheduler) if k.startswith("_step")]
    kinds = [f.name.replace("_", " ") for f in fields(SubBatch)]
    rows = [(0.0, 4.9 - 1.0 * i, 1.6, queue, PALE) for i, queue in enumerate(queues)]
    rows += [(2.2, 5.4 - 0.95 * i, 3.4, step, GREEN) for i, step in enumerate(["step 1 empty batches", *steps])]
    rows += [(6.2, 4.9, 5.8, f"0: {', '.join(kinds)}", BLUE), (9.65, 3.2, 2.35, f"1: {kinds[-1]}", YELLOW)]
    rows += [(6.2 + 3.1 * i, 1.2, 2.4 + 0.3 * i, f"{d} pool:\n{n:,} blocks", (BLUE, YELLOW)[i])
             for i, (d, n) in enumerate(blocks.total.items())]  # fmt: skip
    fig, ax = canvas(rows, 1.85)
    for x, text in ((0, "queues"), (2.2, "scheduler: plan()"), (6.2, "pipeline: two sub-batches")):
        ax.text(x, 6.35, text, size=6)
    arrows(ax, (1.65, 5.3, 2.15, 4.95), (1.65, 4.3, 2.15, 4.75), (1.65, 3.3, 2.15, 3.9))
    arrows(ax, (5.65, 4.4, 6.15, 5.2), (5.65, 3.3, 9.6, 3.6))
    arrows(ax, (7.4, 4.85, 7.4, 2.05), (9.45, 4.85, 9.45, 2.05), (10.8, 3.15, 10.8, 2.05))
    arrows(ax, (8.65, 1.6, 9.25, 1.6), style="<->")
    ax.text(6.2, 0.7, f"swaps: {', '.join(LANES[2::2])}; blocks of {config.block_size} tokens", size=6, va="center")
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
             Claim("10a: machines in the published order", f"pairs out of order: {wrong}", not wrong)]  # fmt: skip
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

HOW = {**dict.fromkeys(LOADS, draw_load), **dict.fromkeys(RATIOS, draw_ratio), "7": draw_distribution}


def draw(name: str, source: str = "recorded", folder: Path = RECORDED) -> tuple[Any, str, str]:
    """A figure, its table, and whose data it shows. Raises NeoLiteError for a name or source that is unknown."""
    if name not in NAMES:
        raise NeoLiteError(f"figure {name!r} is unknown: choose from {', '.join(NAMES)}")
    if source not in SOURCES:
        raise NeoLiteError(f"source {source!r} is unknown: choose from {', '.join(SOURCES)}")
    runs = runs_in(folder) if source != "simulated" else []
    with plt.rc_context({**plots.STYLE, **STYLE}):
        if name in ("1", "2"):
            return (draw_workflow() if name == "1" else draw_architecture())[0], "", "code"
        if name in TIMELINES:
            fig, rows = draw_timeline(name, source)
        elif name == "10b":
            fig, rows = draw_peer(sweep.results(wanted(name)), source, folder)
        else:
            fig, rows = HOW[name](name, sweep.results(wanted(name, runs)), runs)
    return fig, table(rows), " + ".join(shown(fig))


def shown(fig: Any) -> list[str]:
    """Whose data a figure shows: every label begins with its source, and nothing is stamped that is not drawn."""
    return [kind for kind in ("paper", *SOURCES) if any(t.get_text().startswith(kind) for t in fig.findobj(Text))]


MEASURES = {  # what `--source measured` runs on the GPU at hand; each command has its own baseline
    "6c": ["--model random:llama-2-7b --dtype float16 --mode gpu-only,neo --workload osc --requests 300 --gpu-kv-tokens 864"
           " --cpu-kv-gib 20.0 --max-batched-tokens 832"],
    "10a": [f"--model random:llama-3.1-8b --dtype float16 --mode gpu-only-unchunked,neo --workload synthetic:1000,{n}"
            " --requests 150 --gpu-kv-tokens 26400 --cpu-kv-gib 20.0 --max-batched-tokens 20480" for n in (100, 200, 400)],
}  # fmt: skip


def measure(names: Sequence[str], folder: Path) -> Path:
    """Runs on this machine's GPU what was not measured on it with this code yet; where that lies: a folder a stamp."""
    if machine.gpu() is None:
        raise NeoLiteError("--source measured: no CUDA GPU here; choose recorded: runs on a part of an H200")
    if none := [name for name in names if name not in MEASURES]:
        print(f"nothing to measure for {', '.join(none)}: only {', '.join(MEASURES)} run here", file=sys.stderr)
    here = stamp_of(machine.stamp())
    digest = hashlib.sha256(json.dumps(here).encode()).hexdigest()[:8]
    folder /= f"{here[0]['name'].replace(' ', '-')}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    todo = [(name, folder / f"bench_{name}_{i}.json", options) for name in MEASURES if name in names
            for i, options in enumerate(MEASURES[name])]  # fmt: skip
    for name, path, options in todo:
        if why := unfit(path, options, here):
            command = [sys.executable, "-m", "neo_lite", "bench", "--json", *options.split()]
            print(f"measuring ({why}): python", *command[1:], file=sys.stderr)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise NeoLiteError(f"figure {name} could not be measured, for the reason above: choose recorded")
            (part := path.with_suffix(".part")).write_text(done.stdout)
            if why := unfit(part, options, here):
                raise NeoLiteError(f"figure {name} could not be measured: {why}")
            os.replace(part, path)  # whole, or not there
    return folder


def stamp_of(stamp: Mapping[str, Any]) -> list[Any]:
    """Of a stamp what a measurement depends on, as JSON has it."""
    return json.loads(json.dumps([stamp.get(k) for k in ("gpu", "cpu", "usable_cores", "torch", "neo_lite")]))


def unfit(path: Path, options: str, here: list[Any]) -> str:
    """Why a file is no measurement with these options on this machine; "" if it is one."""
    if not path.exists():
        return f"{path.name} is not there"
    try:
        lines = checked(path)
    except NeoLiteError as error:
        return str(error)
    asked, modes = options_of(options), [line["mode"] for line in lines]
    here_too = all(stamp_of(line["stamp"]) == here for line in lines) and modes == asked["mode"].split(",")
    same = here_too and all(asked.items() <= options_of(line["command"]).items() for line in lines)
    return "" if same else f"{path} is of another machine, code or command"


def main(args: argparse.Namespace) -> int:
    """Draws figures to files, and prints their tables and how close the simulation comes."""
    names = args.names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        raise NeoLiteError(f"figure {unknown[0]!r} is unknown: choose from {', '.join(NAMES)}")
    folder = RECORDED
    if args.source == "measured":
        folder = measure(names, Path(args.out) / "measured")
    runs = runs_in(folder)
    if args.fresh:
        sweep.compute([r for name in names for r in wanted(name, runs)], all_runs())
    for name in names:
        fig, text, source = draw(name, args.source, folder)
        note = "stale: figures --fresh computes it anew" if sweep.stale(wanted(name, runs)) else ""
        path = plots.save_figure(fig, f"11_fig{name}", source, note, args.out)
        fig.savefig(path.with_suffix(".png"), dpi=250, bbox_inches="tight")
        plt.close(fig)
        print(f"figure {name}: {source}; {path} and .png\n{text}\n")
    if not args.names:
        print(f"How close the simulated curves of {NEO[0]} come (25 %: of the printed number, not of the gain):")
        for claim in fidelity(sweep.results(all_runs())):
            print(f"{'yes' if claim.holds else 'NO':4}{claim.text:64}{claim.found}")
    return 0
