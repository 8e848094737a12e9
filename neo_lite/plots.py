"""How every figure is saved: one style, a stamp that says where its data come from, one folder. Notebooks call it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from neo_lite.config import NeoLiteError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCES = ("measured", "recorded", "simulated", "paper", "code")  # code: a diagram of the package's own objects
COLORS = {"gpu": "#2f6db5", "cpu": "#d9822b", "link": "#5a9e5a", "idle": "#d0d0d0", "paper": "#555555"}
STYLE: Any = {
    "figure.figsize": (6.4, 3.6), "figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "legend.frameon": False,
}  # fmt: skip
SVG: Any = {
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "neo-lite",  # the same figure gives the same bytes
}


def use_style() -> None:
    """Sets the style for the figures of this process."""
    matplotlib.rcParams.update(STYLE)


def save_figure(fig: Figure, name: str, source: str, note: str = "", folder: str = "") -> Path:
    """Stamps `source` (one of SOURCES; several joined by " + ") and `note`, such as the hardware, and saves the figure.

    It goes to `folder`, else to $NEO_LITE_FIGURES, else to figures/ as `name`.svg, or as .png if the name says so: dense plots.
    """
    unknown = [part for part in source.split(" + ") if part not in SOURCES]
    if unknown:
        raise NeoLiteError(f"figure source {unknown[0]!r} is unknown: choose from {', '.join(SOURCES)}")
    stamp = f"source: {source}" + (f" ({note})" if note else "")
    fig.text(0.995, 0.005, stamp, ha="right", va="bottom", fontsize=7, color="#777777")
    path = Path(folder or os.environ.get("NEO_LITE_FIGURES", "figures")) / name
    path = path if path.suffix == ".png" else path.with_name(f"{path.name}.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SVG):
        fig.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else {})
    return path
