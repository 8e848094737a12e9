"""The scheduler under sliders: what would NEO decide for this load on that machine, and why? Torch-free.

Pure functions turn one planned iteration (a `View`) or a simulated run into HTML and SVG, each drawing with the same facts
as text beneath it. `Explorer` puts ipywidgets around them, only such as versions 7.7 and 8 share, so that JupyterLab, Colab
and Voila show the same. Called by notebook 09. Whatever it draws is simulated.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from html import escape
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from neo_lite import hardware, workload
from neo_lite.blocks import Blocks
from neo_lite.config import MODELS, EngineConfig, ModelConfig, NeoLiteError, is_int
from neo_lite.cost_model import Candidate, Curve, Profile, Stages
from neo_lite.engine import check_sampling
from neo_lite.neo import POLICIES
from neo_lite.request import IterationPlan, Request, SamplingParams
from neo_lite.scheduler import Scheduler
from neo_lite.simulator import DUMMY, SimResult, simulate

COMPARED = ("gpu-only", "gpu-only-unchunked", "fastdecode+", "neo", "neo-released")
# Okabe and Ito's colours, told apart with any colour vision, and the ink on them; each box carries its name, too.
COLOURS = {
    "l0": ("#0072b2", "#fff"), "pref0": ("#56b4e9", "#000"), "ga0": ("#009e73", "#000"), "l1": ("#003f63", "#fff"),
    "ca0": ("#f0e442", "#000"), "ca1": ("#e69f00", "#000"), "bubble": ("#f2f2f2", "#444"), "idle": ("#f2f2f2", "#444"),
}  # fmt: skip
LEFT, WIDTH = 92, 860
LOOK: dict[str, Any] = {"style": {"description_width": "105px"}, "layout": {"width": "310px"}}
HEAD = "policy", "requests/s", "s a token", "s to the first (p50)", "two batches", "swaps", "recomputes"
# What can be set: its label, its widget, its value (None: what the machine has), its range. A decode's tokens include its
# new one; `output_tokens` is what each request may still add.
_TOKENS = {"min": 10, "max": 8000, "step": 10}
SCENE: Mapping[str, tuple[str, str, Any, dict[str, Any]]] = {
    "machine": ("machine", "Dropdown", "h200-8sm-14t", {"options": [*hardware.HARDWARE, "here"]}),
    "model": ("model", "Dropdown", "llama-3.1-8b", {"options": [*MODELS]}),
    "policy": ("policy", "Dropdown", "neo", {"options": ["asymmetric", "fastdecode+", "neo", "neo-released"]}),
    "gpu_kv_tokens": ("GPU KV tokens", "BoundedIntText", 26400, {"min": 0, "max": 4_000_000, "step": 800}),
    "cpu_gb_per_s": ("CPU GB/s", "FloatSlider", None, {"max": 200, "step": 0.1, "readout_format": ".1f"}),
    "waiting": ("waiting", "IntSlider", 4, {"max": 64}),
    "prompt_tokens": ("prompt tokens", "IntSlider", 1000, _TOKENS),
    "on_gpu": ("GPU-requests", "IntSlider", 22, {"max": 64}),
    "gpu_tokens": ("tokens of each", "IntSlider", 1100, _TOKENS),
    "on_cpu": ("CPU-requests", "IntSlider", 24, {"max": 64}),
    "cpu_tokens": ("tokens of each", "IntSlider", 1100, _TOKENS),
    "output_tokens": ("output tokens", "IntSlider", 150, {"min": 1, "max": 500}),
    "requests": ("run: requests", "IntSlider", 120, {"min": 1, "max": 250}),
    "rate_per_s": ("run: requests/s", "FloatSlider", 2.0, {"max": 40, "step": 0.1, "readout_format": ".1f"}),
    "rising": ("rate rises, 0 to 2 x", "Checkbox", True, {}),
}


class View(NamedTuple):
    """One planned iteration, and who waits after it."""

    plan: IterationPlan
    config: EngineConfig
    waiting: Sequence[Request]


# ---- What is looked at ----


def scene(**changes: Any) -> SimpleNamespace:
    """The values of `SCENE`, some of them changed."""
    if unknown := changes.keys() - SCENE.keys():
        raise NeoLiteError(f"the explorer has no {sorted(unknown)[0]!r}: choose from {', '.join(SCENE)}")
    for name, value in changes.items():
        _, kind, start, about = SCENE[name]
        least, numbers = about.get("min", 0), kind in ("IntSlider", "BoundedIntText")
        if numbers and not (is_int(value) and value >= least or value is start):
            raise NeoLiteError(f"{name} is {value!r}: give a whole number from {least} on")
        if name == "model" and value not in MODELS:
            raise NeoLiteError(f"model {value!r} is unknown: choose one of {', '.join(MODELS)}")
    return SimpleNamespace(**{name: changes.get(name, value) for name, (_, _, value, _) in SCENE.items()})


@lru_cache
def of_machine(machine: str, model: str) -> tuple[Profile, int, int, float]:
    """Its stage times, the KV tokens that the card and half of the host's memory hold, and the GB/s that its CPU reads."""
    spec, shape = hardware.find(machine), MODELS[model]
    tokens = hardware.gpu_kv_tokens(spec, shape, "float16", EngineConfig().max_batched_tokens)
    costs, kv_bytes = hardware.costs_of(spec, shape), shape.kv_bytes_per_token("float16")
    (x0, y0), (x1, y1) = costs.cpu_attn.points[-2:]
    gb_per_s = (x1 - x0) / (y1 - y0) * kv_bytes / shape.num_layers / 1e9
    return costs, tokens, int(spec.cpu_memory_bytes / 2 / kv_bytes), round(gb_per_s, 1)


def build(s: SimpleNamespace) -> tuple[ModelConfig, Profile, EngineConfig]:
    """What the simulator takes. Raises NeoLiteError, as if the machine cannot hold the model."""
    costs, gpu_tokens, cpu_tokens, gb_per_s = of_machine(s.machine, s.model)
    wanted = gb_per_s if s.cpu_gb_per_s is None else s.cpu_gb_per_s
    if not 0 < wanted < np.inf:
        raise NeoLiteError(f"the CPU reads {wanted} GB/s: give a number above 0")
    factor, least_s = wanted / gb_per_s, costs.cpu_attn.points[0][1]  # what a CPU decode costs besides reading stays
    curve = Curve([(x, least_s + (y - least_s) / factor) for x, y in costs.cpu_attn.points])
    costs = replace(costs, cpu_attn=curve, cpu_request_tokens=costs.cpu_request_tokens * factor)
    gpu_tokens = gpu_tokens if s.gpu_kv_tokens is None else round(s.gpu_kv_tokens)
    return MODELS[s.model], costs, EngineConfig(s.policy, gpu_kv_tokens=gpu_tokens, cpu_kv_tokens=cpu_tokens)


def decide(**changes: Any) -> View:
    """What the policy plans for the next iteration of a scene."""
    s = scene(**changes)
    if s.policy not in SCENE["policy"][3]["options"]:
        raise NeoLiteError(
            f"policy {s.policy!r} weighs nothing: choose from {', '.join(SCENE['policy'][3]['options'])}"
        )
    model, costs, config = build(s)
    check_sampling(SamplingParams(s.output_tokens), max(s.prompt_tokens, s.gpu_tokens, s.cpu_tokens), model)
    blocks = Blocks(config.num_gpu_blocks, config.num_cpu_blocks, config.block_size)
    scheduler = POLICIES[s.policy](config, blocks, costs)
    on_gpu, on_cpu = [s.gpu_tokens] * s.on_gpu, [s.cpu_tokens] * s.on_cpu
    fill(scheduler, on_gpu, on_cpu, [s.prompt_tokens] * s.waiting, s.output_tokens)
    return View(scheduler.plan(0.0), config, tuple(scheduler.waiting))


def fill(s: Scheduler, on_gpu: Sequence[int], on_cpu: Sequence[int], waiting: Sequence[int], more: int) -> None:
    """Requests of these lengths into a scheduler's queues, ids in this order; each may add `more` tokens. NeoLiteError."""
    ids, may_add = count(), SamplingParams(more, ignore_eos=True)
    for device, lengths in (("gpu", on_gpu), ("cpu", on_cpu)):
        for tokens in lengths:
            request = Request(next(ids), (DUMMY,) * (tokens - 1), may_add, output=[DUMMY], num_computed=tokens - 1)
            request.device = "gpu" if device == "gpu" else "cpu"
            if not s.blocks.grow(request, tokens - 1):
                pool = f"the {device} pool of {s.blocks.total[request.device] * s.config.block_size:,} KV tokens"
                raise NeoLiteError(f"{pool} is full at request {request.id + 1}: take fewer, shorten, or enlarge it")
            s.running.append(request)
    for tokens in waiting:
        s.waiting.append(Request(next(ids), (DUMMY,) * tokens, may_add))
        s.check(s.waiting[-1])


def run(progress: Callable[[int], object] = lambda finished: None, **changes: Any) -> SimResult:
    """The simulated run of a scene, its plans kept."""
    s = scene(**changes)
    arrivals = workload.synthetic(s.requests, s.prompt_tokens, s.output_tokens, s.rate_per_s)
    if s.rising:  # the same requests, the rate growing with time
        arrivals = [replace(a, time_s=(a.time_s * arrivals[-1].time_s) ** 0.5) for a in arrivals]
    model, costs, config = build(s)
    return simulate(model, costs, config, arrivals, True, progress)


def view_at(result: SimResult, config: EngineConfig, k: int) -> View:
    """Iteration `k` of a run."""
    plan, now_s = (result.plans or [])[k], result.iterations[k].start_s
    placed = {w.request.id for w in plan.work} | {i for i, why in plan.reasons.items() if not why.startswith("waits")}
    here = [r for r in result.requests if r.arrival_s <= now_s < (r.finished_s or now_s + 1)]
    return View(plan, config, [r for r in here if r.id not in placed])


# ---- In words ----


def decision(view: View) -> str:
    """The decision and its reason."""
    if not view.plan:
        return "Nothing to run."
    (chosen, other), forced = view.plan.candidates, [f"r{i} has waited too long" for i in view.plan.forced if i >= 0]
    told = f"{_rate(chosen)} against {_rate(other)}"
    if view.plan.forced:
        why = f"forced, {', '.join(forced) or 'nothing is left for the GPU, and neither inequality leaves room'}"
    elif not any(batch.cpu_decodes for c in (chosen, other) for batch in c.batches):
        why, told = "no CPU decode can be hidden", _rate(chosen)
    elif chosen.rate >= other.rate:
        why = "the higher x/T"
    else:
        why = f"{view.config.mode} does not weigh" if other.stages.holds else "two batches would break an inequality"
    return f"{chosen.name[0].upper()}{chosen.name[1:]}: {why}. {told}."


def _rate(c: Candidate) -> str:
    ms = 1e3 * c.seconds
    return f"{c.requests} requests in {ms:.1f} ms ({c.rate:.0f} tokens/s)" if c.requests else "nothing to run"


def reasons(view: View) -> dict[int, str]:
    """Why each request is where it is, by id."""
    found = dict(view.plan.reasons)
    for r, target in ((move.request, move.target.upper()) for move in view.plan.moves):
        found[r.id] = f"{found.get(r.id, 'swapped')}; moved to the {target} pool just now"
    if behind := [r for r in view.waiting if r.id not in found]:
        found.update((r.id, f"waits behind r{behind[0].id}: first come, first served") for r in behind)
        found[behind[0].id] = f"waits: {_why_waits(view, behind[0])}"
    return found


def _why_waits(view: View, request: Request) -> str:
    """Where step 3 stopped."""
    taken = sum(w.length for b in view.plan.batches for w in (*b.prefills, *b.gpu_decodes))
    taken += sum(len(r.prompt) for r in view.waiting if r.id in view.plan.reasons)  # and then taken back by step 5
    left, tokens = view.config.max_batched_tokens - taken, len(request.prompt)
    if any("dropped" in text for text in view.plan.why):
        return "somebody has just been dropped for want of room, so nobody new comes"
    if taken and left < tokens:
        return f"an iteration takes {view.config.max_batched_tokens:,} tokens; {max(0, left):,} are left, it has {tokens:,}"
    return f"no pool has room for its {tokens:,} tokens beside those that run"


# ---- As drawings ----


def panel(view: View) -> str:
    """All of one iteration: the decision, its candidates, the inequalities, and each request with its reason."""
    parts = [f'<p role="status" class="neo-decision" style="font-size:15px"><b>{escape(decision(view))}</b></p>']
    pair = sorted((c for c in view.plan.candidates if c.requests), key=lambda c: c.name)
    barriers = view.config.mode == "neo-released"  # whose launches bring the paper's
    layers_s = [c.stages.paper_layer if barriers else c.stages.layer for c in pair]
    for c, layer_s in zip(pair, layers_s):
        parts.append(schedule(c, layer_s, max(layers_s), chosen=c is view.plan.candidates[0]))
    return _paper(*parts, *(inequalities(c.stages) for c in pair if c.name != "GPU only"), placement(view))


def schedule(c: Candidate, layer_s: float, longest_s: float, chosen: bool = False, layers: int = 2) -> str:
    """A few layers of a candidate on both lanes, as `simulator` charges them; `longest_s`: a layer at full width."""
    s, name = c.stages, f"{c.name} (chosen)" if chosen else c.name
    gpu = [(n, getattr(s, n)) for n in ("l0", "pref0", "ga0")] + [("bubble", layer_s - s.gpu), ("l1", s.l1)]
    before_s = max(0.0, s.l0 - s.ca1) if s.ca0 else 0.0
    cpu = [("ca1", s.ca1), ("idle", before_s), ("ca0", s.ca0), ("idle", layer_s - s.ca1 - before_s - s.ca0)]
    busy = f"GPU {s.gpu * 1e3:.2f}, bubble {gpu[3][1] * 1e3:.2f}; CPU {(s.ca0 + s.ca1) * 1e3:.2f}"
    label = f"{name}: a layer takes {layer_s * 1e3:.2f} ms ({busy}). Drawn: {layers} layers. All of them: {_rate(c)}."
    return _bars(label, [("GPU", gpu * layers), ("CPU", cpu * layers)], layers * longest_s)


def inequalities(s: Stages) -> str:
    """Tca1 against Tl0, and Tca0 against Tl1 + Tga0 (the paper's, with batch-0's prefill attention in Tga0)."""
    sides = ("Tca1", ["ca1"]), ("Tl0", ["l0"]), ("Tca0", ["ca0"]), ("Tl1 + Tga0", ["l1", "pref0", "ga0"])
    rows = [(name, [(n, getattr(s, n)) for n in stages]) for name, stages in sides]
    told = [f"{a} <= {b} {'holds' if spare >= 0 or s.holds else 'is broken'}: {spare * 1e3:.2f} ms to spare"
            for a, b, spare in zip(("Tca1", "Tca0"), ("Tl0", "Tl1 + Tga0"), s.slack)]  # fmt: skip
    return _bars("; ".join(told) + ".", rows, 1.2 * max(sum(t for _, t in row) for _, row in rows))


def _bars(label: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], span_s: float) -> str:
    """Rows of stages, one after the other; each box with its name and milliseconds where they fit, and in its tooltip."""
    shapes, scale = [], (WIDTH - LEFT) / max(span_s, 1e-12)
    for y, (name, stages) in zip(count(2, 25), rows):
        shapes.append(f'<text x="0" y="{y + 16}">{name}</text>')
        x = float(LEFT)
        for stage, seconds in stages:
            width, (paint, ink), text = seconds * scale, COLOURS[stage], f"{stage} {seconds * 1e3:.2f}"
            shown = next((t for t in (text, stage) if 6.6 * len(t) < width - 4), "")
            dashes = 'stroke="#777" stroke-dasharray="4 3"' if ink == "#444" else ""
            at = f'x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="{ink}"'
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{paint}" {dashes}'
            if width > 0.05:
                shapes.append(f"<rect {box}><title>{text} ms</title></rect><text {at}>{shown}</text>")
            x += width
    return _svg(label, 25 * len(rows) + 4, shapes)


def _svg(label: str, height: int, shapes: Sequence[str]) -> str:
    """A drawing, and what it shows in words: for a screen reader, and beneath it for everybody."""
    head = f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    style = 'style="max-width:100%;height:auto;display:block" font-size="12" font-family="sans-serif" fill="#1a1a1a"'
    return f'{head} {style}>{"".join(shapes)}</svg><p style="margin:0 0 10px">{escape(label)}</p>'


def _paper(*parts: str) -> str:
    """Dark on white, in light and dark themes alike."""
    style = f"background:#fff;color:#1a1a1a;padding:4px 10px;max-width:{WIDTH + 10}px;font:13px/1.4 sans-serif"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _table(*rows: Sequence[object]) -> str:
    """The first row is its head."""
    cell = '<{0} style="text-align:left;padding:2px 8px">{1}</{0}>'
    told = ["".join(cell.format("td" if i else "th", escape(str(v))) for v in row) for i, row in enumerate(rows)]
    return f"<table><tr>{'</tr><tr>'.join(told)}</tr></table>"


def placement(view: View) -> str:
    """Every request, those with one reason in one row."""
    tokens, rows = {w.request.id: w.seq_len for w in view.plan.work}, dict[str, list[int]]()
    for i, text in sorted(reasons(view).items()):
        rows.setdefault(text, []).append(i)
    told = [(text, len(i), f"{sum(tokens.get(n, 0) for n in i):,}", _ids(i)) for text, i in sorted(rows.items())]
    return _table(("where, and why", "requests", "tokens attended to", "which"), *told)


def _ids(ids: Sequence[int]) -> str:
    """0, 1, 2, 5 as r0-r2, r5."""
    ends = zip([i for i in ids if i - 1 not in ids], [i for i in ids if i + 1 not in ids])
    return ", ".join(f"r{a}" if a == b else f"r{a}-r{b}" for a, b in ends)


def strip(result: SimResult, columns: int = 380) -> str:
    """A whole run, iteration by iteration, a row for each quantity; `@x` in it is where the cursor stands."""
    every, plans, shapes = result.iterations, result.plans or [], list[str]()
    edges = np.unique(np.linspace(0, len(every), columns + 1).astype(int))
    two = [float(len(p.batches) > 1) for p in plans]
    queues = [(i.waiting, i.requests[1], i.requests[2]) for i in every]
    rows: dict[str, Sequence[float]] = {"two batches": two}
    rows.update(zip(("waiting", "GPU decodes", "CPU decodes"), zip(*queues)))
    for y, (name, values), paint in zip(count(24, 28), rows.items(), ("#e69f00", "#777", "#0072b2", "#b35900")):
        means, most = np.add.reduceat(np.array(values, float), edges[:-1]) / np.diff(edges), max([1, *values])
        steps = "".join(f"V{y - 22 * m / most:.1f}h{w * _step(result):.2f}" for m, w in zip(means, np.diff(edges)))
        shapes.append(f'<text x="0" y="{y}">{name}</text><path d="M{LEFT} {y}{steps}V{y}Z" fill="{paint}"/>')
        shapes.append(f'<text x="{WIDTH - 52}" y="{y}">{"share" if values is two else f"max {max(values)}"}</text>')
    told = f"{len(every)} iterations in {result.span_s:.1f} simulated seconds: two batches in {np.mean(two):.0%}"
    shapes.append('<path d="M@x 0V112" stroke="#000" stroke-width="2"/>')
    return _svg(f"{told}, {sum(bool(p.forced) for p in plans)} forced.", 114, shapes)


def _step(result: SimResult) -> float:
    """The width of an iteration in the strip."""
    return (WIDTH - LEFT - 60) / len(result.iterations)


def compare(results: Mapping[str, SimResult | NeoLiteError]) -> str:
    """Policies on the same arrivals; of one that refuses them the reason."""
    rows: list[Sequence[object]] = [HEAD]
    for name, result in results.items():
        if isinstance(result, NeoLiteError):
            rows.append((name, result))
            continue
        m, two = result.summary(), sum(i.kind.startswith("two") for i in result.iterations) / len(result.iterations)
        rates = f"{m['requests_per_s']:.2f}", f"{m['per_token_latency_s']:.3f}", f"{m['ttft_p50_s']:.2f}"
        rows.append((name, *rates, f"{two:.0%}", m["swaps"], m["recomputes"]))
    return _paper("<p><b>The same arrivals under each policy, simulated</b></p>", _table(*rows))


# ---- Under sliders ----


class Explorer:
    """Sliders over a scene: `root` is what a notebook shows, `controls` has the inputs by the names in `SCENE`."""

    def __init__(self, **changes: Any) -> None:
        try:
            import ipywidgets as w
        except ImportError:
            raise NeoLiteError("the sliders need ipywidgets: pip install 'ipywidgets>=7.7,<9'") from None
        start = scene(**changes)
        _, tokens, _, gb_per_s = of_machine(start.machine, start.model)
        start.gpu_kv_tokens, start.cpu_gb_per_s = start.gpu_kv_tokens or tokens, start.cpu_gb_per_s or gb_per_s
        self.controls = {
            name: getattr(w, kind)(value=getattr(start, name), description=label, **LOOK, **about)
            for name, (label, kind, _, about) in SCENE.items()
        }
        self.strip, self.view, self.table, self.link = (w.HTML() for _ in range(4))
        self.at = w.IntSlider(description="iteration", max=0, layout={"width": f"{WIDTH}px"})
        self.play, self.bar = w.Play(max=0, interval=250), w.IntProgress(description="progress")
        w.jslink((self.play, "value"), (self.at, "value"))
        self.simulate, self.export = (
            w.Button(description="simulate a run"),
            w.Button(description="export the trace", disabled=True),
        )
        c, row = [*self.controls.values()], {"flex_flow": "row wrap"}
        columns = w.Box([w.VBox(c[:5]), w.VBox(c[5:11]), w.VBox(c[11:])], layout=row)
        played = (self.simulate, self.bar, w.Label("play the run:"), self.play, self.export, self.link)
        self.root = w.VBox([columns, w.Box(played, layout=row), self.at, self.strip, self.view, self.table])
        for name, control in self.controls.items():
            control.observe(self._guard(self._machine if name in ("machine", "model") else self._by_hand), "value")
        self.at.observe(self._guard(self._iteration), "value")
        self.simulate.on_click(self._guard(self._run))
        self.export.on_click(self._guard(self._export))
        self._guard(self._by_hand)()

    def _guard(self, draw: Callable[[], str]) -> Callable[..., None]:
        """Shows what `draw` returns, or the reason why it cannot: never a traceback."""

        def shown(change: object = None) -> None:
            try:
                self.view.value = draw()
            except Exception as error:  # a NeoLiteError is the reader's to mend, any other is ours
                told = str(error) if isinstance(error, NeoLiteError) else f"{type(error).__name__}: {error}"
                self.view.value = _paper(f'<p role="alert" class="neo-decision"><b>{escape(told)}</b></p>')

        return shown

    def _values(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    def _by_hand(self) -> str:
        """The queues as the sliders set them."""
        return panel(decide(**self._values()))

    def _machine(self) -> str:
        """Another machine or model: its own KV and bandwidth first."""
        names = self.controls["machine"].value, self.controls["model"].value
        _, self.controls["gpu_kv_tokens"].value, _, self.controls["cpu_gb_per_s"].value = of_machine(*names)
        return self._by_hand()

    def _run(self) -> str:
        """Every policy on the same arrivals, and the run of the chosen one to step through."""
        values, results = self._values(), dict[str, SimResult | NeoLiteError]()
        names = list(dict.fromkeys((*COMPARED, values["policy"])))
        self.bar.max = len(names) * values["requests"]
        for before, name in zip(count(0, values["requests"]), names):
            try:
                results[name] = run(partial(self._progress, before), **{**values, "policy": name})
            except NeoLiteError as error:
                results[name] = error
        self.table.value, chosen = compare(results), results[values["policy"]]
        if isinstance(chosen, NeoLiteError):
            raise chosen
        self.result, self.config, self.drawn = chosen, build(scene(**values))[2], strip(chosen)
        self.at.max = self.play.max = len(chosen.iterations) - 1
        self.at.value, self.export.disabled = 0, False
        return self._iteration()

    def _progress(self, before: int, finished: int) -> None:
        self.bar.value = before + finished

    def _iteration(self) -> str:
        """An iteration of the run, and the cursor on it."""
        x = LEFT + (self.at.value + 0.5) * _step(self.result)
        self.strip.value = _paper(self.drawn.replace("@x", f"{x:.1f}"))
        return panel(view_at(self.result, self.config, self.at.value))

    def _export(self) -> str:
        """Eight iterations from this one on, every layer, as a file to download: no path on whatever machine this runs."""
        trace = self.result.timeline(self.at.value, self.at.value + 8).chrome_trace()
        data = base64.b64encode(json.dumps(trace).encode()).decode()
        name = f"neo_lite_iteration_{self.at.value}.json"
        self.link.value = (
            f'<a download="{name}" href="data:application/json;base64,{data}">{name}</a> (ui.perfetto.dev)'
        )
        return self.view.value
