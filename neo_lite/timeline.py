"""What ran when: one event type, one list, three renderers (SVG, matplotlib, Chrome/Perfetto trace).

Times are seconds of one clock (time.perf_counter on the host; the simulator's own). The pipeline records, the
notebooks draw: the paper's figures 3, 4 and 5 are such timelines.
"""

from __future__ import annotations

import html
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LANES = ("scheduler", "gpu", "d2h", "cpu", "h2d")  # top to bottom
COLOURS = {  # after Okabe and Ito: told apart without red and green; side by side in a lane, by lightness as well
    "plan": "#999999", "pre": "#004c77", "post": "#0072b2", "linear": "#0072b2", "embed": "#bbbbbb", "head": "#882255",
    "prefill_attn": "#56b4e9", "gpu_attn": "#f0e442", "cpu_attn": "#e69f00", "transfer": "#000000", "store": "#cc79a7",
    "swap": "#777777",
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One stage of one iteration, on one lane."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)  # layer, backend, requests, bytes

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(eq=False)
class Timeline:
    """A list of events that costs nothing while it is not enabled."""

    enabled: bool = True
    events: list[Event] = field(default_factory=list)

    def record(self, lane: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        if self.enabled:
            self.events.append(Event(lane, name, start_s, end_s, args))

    @contextmanager
    def span(self, lane: str, name: str, **args: Any) -> Iterator[None]:
        """Records the time spent in the block."""
        start_s = time.perf_counter()
        yield
        self.record(lane, name, start_s, time.perf_counter(), **args)

    def between(self, start_s: float, end_s: float) -> Timeline:
        """The events that lie in a window, as a timeline of their own."""
        return Timeline(events=[e for e in self.events if e.end_s > start_s and e.start_s < end_s])

    @property
    def span_s(self) -> tuple[float, float]:
        return min(e.start_s for e in self.events), max(e.end_s for e in self.events)

    def busy_s(self, lane: str) -> float:
        """Seconds in which the lane does something (overlapping events count once)."""
        return sum(end - start for start, end in self._busy(lane))

    def busy_fraction(self, lane: str) -> float:
        """The lane's share of the whole span; 1 minus it is the lane's bubbles."""
        start, end = self.span_s
        return self.busy_s(lane) / (end - start)

    def overlap_s(self, a: str, b: str) -> float:
        """Seconds in which both lanes are busy."""
        pairs = ((x, y) for x in self._busy(a) for y in self._busy(b))
        return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in pairs)

    def _busy(self, lane: str) -> list[tuple[float, float]]:
        merged: list[tuple[float, float]] = []
        for e in sorted((e for e in self.events if e.lane == lane), key=lambda e: e.start_s):
            if merged and e.start_s <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], e.end_s))
            else:
                merged.append((e.start_s, e.end_s))
        return merged

    def lanes(self) -> list[str]:
        """The lanes that have events, top to bottom."""
        names = {e.lane for e in self.events}
        return [*(n for n in LANES if n in names), *sorted(names - set(LANES))]

    def chrome_trace(self) -> dict[str, Any]:
        """The JSON object that chrome://tracing and ui.perfetto.dev open (microseconds)."""
        t0, lanes = self.span_s[0], self.lanes()
        names = [dict(ph="M", name="thread_name", pid=0, tid=i, args={"name": n}) for i, n in enumerate(lanes)]
        spans = [
            dict(ph="X", name=e.name, cat=e.lane, pid=0, tid=lanes.index(e.lane), ts=(e.start_s - t0) * 1e6,
                 dur=e.duration_s * 1e6, args=dict(e.args))
            for e in self.events
        ]  # fmt: skip
        return {"traceEvents": names + spans, "displayTimeUnit": "ms"}

    def svg(self, width: int = 900, row: int = 34) -> str:
        """A drawing for HTML widgets and reports, a tooltip on each event."""
        (start, end), lanes = self.span_s, self.lanes()
        scale = (width - 90) / (end - start)
        height = row * len(lanes)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20}" '
            'font-size="12" font-family="sans-serif">',
            f'<text x="80" y="{height + 14}">0</text>',
            f'<text x="{width - 70}" y="{height + 14}">{(end - start) * 1e3:.1f} ms</text>',
        ]
        for i, lane in enumerate(lanes):
            parts.append(f'<text x="4" y="{i * row + 21}">{html.escape(lane)}</text>')
            for e in (e for e in self.events if e.lane == lane):
                x, w = 80 + (e.start_s - start) * scale, max(0.3, e.duration_s * scale)
                box = f'x="{x:.2f}" y="{i * row + 4}" width="{w:.2f}" height="{row - 8}"'
                tip = html.escape(f"{e.name} {e.duration_s * 1e3:.2f} ms {dict(e.args) or ''}")
                parts.append(f'<rect {box} fill="{COLOURS.get(e.name, "#888")}"><title>{tip}</title></rect>')
        return "".join([*parts, "</svg>"])

    def plot(self, ax: Any, legend: bool = True) -> None:
        """Draws on a matplotlib axis: time in ms, one row a lane; batch-1 is hatched."""
        start, lanes = self.span_s[0], self.lanes()
        bars = defaultdict(list)
        for e in self.events:
            bars[e.lane, e.name, e.args.get("batch") == 1].append(((e.start_s - start) * 1e3, e.duration_s * 1e3))
        for lane, name, second in sorted(bars):
            colour = COLOURS.get(name, "#888")
            look = {"label": name, "facecolors": colour, "edgecolor": colour, "linewidth": 0.6}  # copies of 10 us show
            if second and lane in ("gpu", "cpu"):
                look |= {"hatch": "////", "edgecolor": "white", "linewidth": 0}
            ax.broken_barh(bars[lane, name, second], (lanes.index(lane) - 0.4, 0.8), **look)
        ax.set_yticks(range(len(lanes)), lanes)
        ax.invert_yaxis()
        ax.set_xlabel("ms")
        if legend:
            entries = dict(zip(*reversed(ax.get_legend_handles_labels())))
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25)}
            ax.legend(entries.values(), entries.keys(), ncols=6, frameon=False, **below)
