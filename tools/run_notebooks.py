"""Executes the notebooks headless, one at a time, and ends with a table; called by `make reproduce` and the tests.

    python tools/run_notebooks.py [--out out] [--exercises] [NAME ...]

A notebook that fails does not stop the others; the exit code is 1 and the table says which cell failed. With
`--exercises` every exercise is also tried both ways: its check must refuse the blank and accept the hidden solution.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 600
ASK_RESULTS = "import json; from neo_lite import exercise; print(json.dumps(exercise.results))"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Run:
    """What one notebook's execution came to."""

    name: str
    seconds: float = 0.0
    peak_bytes: int = 0
    figures: int = 0
    exercises: int = 0
    problems: list[str] = field(default_factory=list)


def notebook_sources(folder: Path, names: list[str]) -> list[Path]:
    """The py:percent sources in reading order; `names` are stems or their beginnings, such as 03."""
    sources = sorted(folder.glob("[0-9][0-9]_*.py"))
    unknown = [name for name in names if not any(source.stem.startswith(name) for source in sources)]
    if unknown:
        raise SystemExit(
            f"no notebook named {unknown[0]!r} in {folder}: there are {', '.join(s.stem for s in sources)}"
        )
    return [source for source in sources if not names or source.stem.startswith(tuple(names))]


def read_source(path: Path) -> nbformat.NotebookNode:
    """A notebook from its py:percent source, with stable cell ids and the plain kernel name."""
    notebook = jupytext.read(path)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index:03d}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    return notebook


def tagged(cell: nbformat.NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def solution_after(cells: list[nbformat.NotebookNode], index: int) -> str:
    """The code in the first fenced block of the `solution` cell that follows cell `index`."""
    for cell in cells[index + 1 :]:
        if tagged(cell, "exercise"):
            break
        if tagged(cell, "solution"):
            fenced = re.search(r"```python\n(.*?)```", cell.source, re.DOTALL)
            return fenced.group(1) if fenced else ""
    return ""


class Session:
    """One kernel and the notebook that runs in it."""

    def __init__(self, notebook: nbformat.NotebookNode, folder: Path) -> None:
        self.cells = notebook.cells
        self.client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
            record_timing=False, coalesce_streams=True, extra_arguments=["--log-level=40"],
        )  # fmt: skip

    def ask(self, code: str, index: int) -> str:
        """Runs code beside the notebook, whose cells stay as they are; returns what it printed, or its error."""
        cell, kept = nbformat.v4.new_code_cell(code), self.cells[index]
        try:
            self.client.execute_cell(cell, index, store_history=False)
        except CellExecutionError as error:
            return f"{error.ename}: {error.evalue}\n"
        finally:
            self.cells[index] = kept  # the client puts what it runs in this place
        return "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")

    def peak_bytes(self) -> int:
        """The most memory that the kernel's process ever held (not its children's)."""
        provisioner = self.client.km.provisioner if self.client.km else None
        pid: Any = getattr(provisioner, "pid", None)
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            return int(found.group(1)) * 1024 if found else 0
        unit = 1 if sys.platform == "darwin" else 1024
        ask = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        return int(self.ask(ask, 0)) * unit

    def try_both_ways(self, blank: int, check: int) -> list[str]:
        """The check has just refused or accepted the blank in the notebook; now the solution, then the blank again."""
        name = f"exercise in cell {blank} (check in cell {check})"
        problems = []
        first = self._verdicts()
        if not first or list(first.values())[-1]:
            problems.append(f"{name}: its check accepts the blank")
        solution = solution_after(self.cells, blank)
        if not solution:
            return [*problems, f"{name}: no hidden solution (a markdown cell tagged solution with a ```python block)"]
        said = self.ask(solution, blank) + self.ask(self.cells[check].source, check)
        if not self._verdicts().get(next(reversed(first), ""), False):
            problems.append(f"{name}: its check refuses the hidden solution: {said.strip()}")
        self.ask(self.cells[blank].source, blank)
        return problems

    def _verdicts(self) -> dict[str, bool]:
        return json.loads(self.ask(ASK_RESULTS, 0))


def run_cells(session: Session, run: Run, exercises: bool) -> None:
    """Executes all cells in order; an error ends this notebook and is kept as its problem."""
    blank = -1
    for index, cell in enumerate(session.cells):
        if cell.cell_type != "code":
            continue
        session.client.execute_cell(cell, index)
        if tagged(cell, "exercise"):
            blank = index
        if tagged(cell, "check"):
            run.exercises += 1
            if exercises:
                run.problems += session.try_both_ways(blank, index)


def error_line(cells: list[nbformat.NotebookNode], error: Exception) -> str:
    """Which cell failed, and its last line of error."""
    for index, cell in enumerate(cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                value = ANSI.sub("", output.evalue).strip().splitlines() or [""]
                first = cell.source.strip().splitlines()[0]
                return f"cell {index} ({first!r}): {output.ename}: {value[-1]}"
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def figure_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def execute(source: Path, out: Path, exercises: bool = False) -> Run:
    """Runs one notebook into out/notebooks and its figures into out/figures."""
    run, notebook = Run(source.stem), read_source(source)
    figures = out / "figures"
    inline = "module://matplotlib_inline.backend_inline"
    environment = {**os.environ, "NEO_LITE_FIGURES": str(figures), "MPLBACKEND": inline}
    before, start_s = figure_times(figures), time.monotonic()
    session = Session(notebook, source.parent)
    try:
        with session.client.setup_kernel(env=environment):
            try:
                run_cells(session, run, exercises)
            except KeyboardInterrupt:
                # one that is asked to end amid a cell prints a traceback
                session.client.shutdown_kernel = "immediate"
                raise
            finally:
                run.peak_bytes = session.peak_bytes()
    except (CellExecutionError, DeadKernelError, TimeoutError) as error:
        run.problems.append(error_line(notebook.cells, error))
    run.seconds = time.monotonic() - start_s
    drawn = {path for path, stamp in figure_times(figures).items() if before.get(path) != stamp}
    for old in {*figures.glob(f"{source.stem[:2]}_*")} - drawn:
        old.unlink()  # what this notebook no longer draws must not be published
    run.figures = len(drawn)
    target = out / "notebooks" / f"{source.stem}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return run


def table(runs: list[Run]) -> str:
    width = max((len(run.name) for run in runs), default=8)
    lines = [f"{'notebook':<{width}}  {'seconds':>7}  {'peak memory':>11}  {'figures':>7}  result"]
    for run in runs:
        result = "ok" if not run.problems else "FAILED: " + run.problems[0]
        memory = f"{run.peak_bytes / 2**30:.2f} GiB"
        lines.append(f"{run.name:<{width}}  {run.seconds:>7.1f}  {memory:>11}  {run.figures:>7}  {result}")
    total = sum(run.seconds for run in runs)
    lines.append(f"{'total':<{width}}  {total:>7.1f}  {'':>11}  {sum(run.figures for run in runs):>7}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks to run, by name or number (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    parser.add_argument("--exercises", action="store_true", help="try each exercise's blank and hidden solution too")
    options = parser.parse_args()
    sources, out = notebook_sources(options.folder, options.names), options.out.resolve()
    runs: list[Run] = []
    try:
        for number, source in enumerate(sources, 1):
            print(f"[{number}/{len(sources)}] {source.stem} ...", flush=True)
            runs.append(execute(source, out, options.exercises))
            print(f"    {runs[-1].seconds:.1f} s, {runs[-1].figures} figures", flush=True)
            for problem in runs[-1].problems:
                print(f"    {source.name}: {problem}", flush=True)
    except KeyboardInterrupt:
        print(f"\ninterrupted in {sources[len(runs)].stem}: {len(runs)} of {len(sources)} notebooks done")
    print(f"\n{table(runs)}\nnotebooks in {options.out}/notebooks, figures in {options.out}/figures")
    done = len(runs) == len(sources) and not any(run.problems for run in runs)
    return 0 if done else 130 if len(runs) < len(sources) else 1


if __name__ == "__main__":
    sys.exit(main())
