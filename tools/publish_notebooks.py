"""Copies a run's notebooks and figures to the committed places, cleaned; called by `make publish`.

What is committed must not change without a reason: no widget state, no timestamps, no paths of one machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
MAX_OUTPUT_BYTES = 200_000  # of one cell: a plot fits, a dump of numbers does not


def replacements() -> list[tuple[str, str]]:
    """Paths of this machine and what stands for them, longest first."""
    pairs = {str(ROOT): "<neo-lite>", sys.prefix: "<python>", sys.base_prefix: "<python>", str(Path.home()): "~"}
    return sorted(((old, new) for old, new in pairs.items() if len(old) > 1), key=lambda pair: -len(pair[0]))


def clean_text(text: str) -> str:
    """Without machine paths and without memory addresses."""
    for old, new in replacements():
        text = text.replace(old, new)
    text = re.sub(r"/tmp/[\w./-]+", "<tmp>", text)
    return re.sub(r" at 0x[0-9a-f]{6,}", "", text)


def clean_output(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if "text" in output:
        output.text = clean_text(output.text)
    for kind, value in output.get("data", {}).items():
        if isinstance(value, str) and kind.startswith("text/"):
            output.data[kind] = clean_text(value)
    output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    output.get("metadata", {}).clear()
    return output


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is committed: see the module's docstring."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": tags} if (tags := cell.metadata.get("tags")) else {})
        if cell.cell_type != "code":
            continue
        outputs = [clean_output(output) for output in cell.outputs]
        cell.outputs = [output for output in outputs if output.get("text") or output.get("data")]
        size = sum(len(str(output)) for output in cell.outputs)
        if size > MAX_OUTPUT_BYTES:
            raise SystemExit(f"the output of the cell {cell.source.splitlines()[0]!r} has {size} bytes: draw less")
    return notebook


def publish(out: Path, notebooks: Path, figures: Path) -> list[Path]:
    """Cleans out/notebooks into `notebooks` and copies their figures into `figures`; returns what it wrote."""
    written = []
    figures.mkdir(exist_ok=True)
    for path in sorted((out / "notebooks").glob("*.ipynb")):
        if not (notebooks / f"{path.stem}.py").exists():
            continue  # a run of a notebook that has since been renamed
        notebook = clean(nbformat.read(path, as_version=4))
        if any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", [])):
            raise SystemExit(f"{path.name} ended in an error: nothing more is published")
        written.append(notebooks / path.name)
        nbformat.write(notebook, written[-1])
        written += publish_figures(path.stem[:2], out / "figures", figures)
    return written


def publish_figures(number: str, drawn: Path, figures: Path) -> list[Path]:
    """A notebook's figures, whose names begin with its number; those that it no longer draws go."""
    for old in figures.glob(f"{number}_*"):
        old.unlink()
    return [shutil.copyfile(path, figures / path.name) for path in sorted(drawn.glob(f"{number}_*"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    options = parser.parse_args()
    for path in publish(options.out.resolve(), ROOT / "notebooks", ROOT / "figures"):
        print(f"published {os.path.relpath(path, ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
