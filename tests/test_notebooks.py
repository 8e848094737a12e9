"""The notebooks: source and executed pair agree, cells are short, everything runs, every exercise's check works.

How they are made: notebooks/README.md. The machinery itself is tested on a small notebook made here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import publish_notebooks
import run_notebooks

FOLDER = ROOT / "notebooks"
SOURCES = run_notebooks.notebook_sources(FOLDER, [])
FIRST_CELL = (ROOT / "tools" / "first_cell.py").read_text().strip()
MAX_NOTEBOOK_BYTES = 1_000_000
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def size(cell: nbformat.NotebookNode) -> int:
    """Lines that are read: the formatter's blank ones are not."""
    return sum(bool(line.strip()) for line in cell.source.splitlines())


# What is committed


def test_the_course_is_complete() -> None:
    planned = {"00_tour", "01_prefill_and_decode", "02_paged_kv_cache", "03_gpu_memory_crisis"}
    planned |= {"04_cpu_attention_kernel", "05_simple_offloading"}
    assert planned <= {source.stem for source in SOURCES}
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {source.stem for source in SOURCES}


@each_notebook
def test_source_and_executed_notebook_are_the_same_cells(source: Path) -> None:
    wanted = [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in run_notebooks.read_source(source).cells]
    found = [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in executed(source).cells]
    assert found == wanted, "run `make publish`"


@each_notebook
def test_committed_notebook_was_executed_to_its_end_without_an_error(source: Path) -> None:
    cells = code_cells(executed(source))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert sum(bool(cell.outputs) for cell in cells) >= 3


@each_notebook
def test_committed_notebook_is_small_and_of_no_one_machine(source: Path) -> None:
    path = source.with_suffix(".ipynb")
    text = path.read_text()
    assert path.stat().st_size < MAX_NOTEBOOK_BYTES
    assert set(json.loads(text)["metadata"]) == {"kernelspec", "language_info"}
    assert not re.search(r"widget-(view|state)|iopub\.", text)
    assert not re.search(r"(?<![\w.])/(root|work|home|tmp|opt|usr/local)/", text)


@each_notebook
def test_first_code_cell_is_the_shared_one(source: Path) -> None:
    assert code_cells(run_notebooks.read_source(source))[0].source.strip() == FIRST_CELL


def test_first_cell_is_short_and_idle_where_the_package_is_installed(tmp_path: Path) -> None:
    assert len(FIRST_CELL.splitlines()) <= 12
    code = f"import subprocess\nsubprocess.check_call = None\n{FIRST_CELL}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout and not list(tmp_path.iterdir())


@each_notebook
def test_cells_are_short(source: Path) -> None:
    sizes = sorted(size(cell) for cell in code_cells(run_notebooks.read_source(source))[1:])
    assert statistics.median(sizes) <= 6, sizes
    assert sizes[int(0.9 * (len(sizes) - 1))] <= 20, sizes
    assert sizes[-1] <= 30, sizes


@each_notebook
def test_prose_stands_before_every_code_cell(source: Path) -> None:
    cells = run_notebooks.read_source(source).cells
    bare = [b.source for a, b in zip(cells, cells[1:], strict=False) if (a.cell_type, b.cell_type) == ("code", "code")]
    assert cells[0].cell_type == "markdown"
    assert not bare


@each_notebook
def test_notebook_ends_with_exercises_that_have_hidden_solutions(source: Path) -> None:
    cells = run_notebooks.read_source(source).cells
    blanks = [index for index, cell in enumerate(cells) if run_notebooks.tagged(cell, "exercise")]
    checks = [index for index, cell in enumerate(cells) if run_notebooks.tagged(cell, "check")]
    assert 2 <= len(blanks) <= 3 and len(checks) == len(blanks)
    names = [re.search(r'@exercise\.check\("(.+)"\)', cells[index].source) for index in checks]
    assert all(names) and len({name.group(1) for name in names if name}) == len(names)
    for blank in blanks:
        assert "..." in cells[blank].source
        assert run_notebooks.solution_after(cells, blank)
    for cell in cells:
        if run_notebooks.tagged(cell, "solution"):
            assert cell.cell_type == "markdown" and cell.source.startswith("<details>")


def test_every_committed_figure_belongs_to_a_notebook() -> None:
    figures = sorted((ROOT / "figures").glob("*"))
    assert {path.name[:3] for path in figures} <= {source.name[:3] for source in SOURCES}
    assert all(path.suffix in {".svg", ".png"} and path.stat().st_size < 300_000 for path in figures)


# Running them


@pytest.mark.slow
@each_notebook
def test_notebook_runs_and_its_checks_refuse_the_blank_and_accept_the_solution(source: Path, tmp_path: Path) -> None:
    run = run_notebooks.execute(source, tmp_path, exercises=True)
    assert run.problems == []
    assert run.exercises >= 2 and run.peak_bytes > 0


# The machinery, on a notebook of our own

SAMPLE = """\
# %% [markdown]
# # A sample

# %%
import matplotlib.pyplot as plt
from neo_lite import exercise, plots

# %% [markdown]
# A figure:

# %%
fig, axes = plt.subplots()
axes.plot([1, 2, 3])
plots.save_figure(fig, "99_line", "simulated")
print("a path:", plots.__file__, object())

# %% [markdown]
# **Exercise.** What is 6 x 7?

# %% tags=["exercise"]
answer = ...  # your answer

# %% [markdown]
# The check:

# %% tags=["check"]
@exercise.check("6 x 7")
def solved():
    assert answer == 42, "Six times seven."

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# answer = 42
# ```
#
# </details>
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "notebooks" / "99_sample.py"
    path.parent.mkdir()
    path.write_text(SAMPLE)
    return path


@pytest.mark.slow
def test_a_run_counts_figures_memory_and_exercises(sample: Path, tmp_path: Path) -> None:
    stale = tmp_path / "out/figures/99_old.svg"
    stale.parent.mkdir(parents=True)
    stale.touch()
    run = run_notebooks.execute(sample, tmp_path / "out", exercises=True)
    assert (run.problems, run.figures, run.exercises) == ([], 1, 1)
    assert not stale.exists()
    assert run.peak_bytes > 20 * 2**20 and run.seconds > 0
    assert (tmp_path / "out/figures/99_line.svg").stat().st_size < 50_000
    result = nbformat.read(tmp_path / "out/notebooks/99_sample.ipynb", as_version=4)
    assert "6 x 7: not yet. Six times seven." in code_cells(result)[3].outputs[0].text
    assert len(result.cells) == 9
    assert [output.output_type for output in code_cells(result)[1].outputs] == ["stream", "display_data"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("assert answer == 42", "assert answer is not None", "accepts the blank"),
        ("# answer = 42", "# answer = 41", "refuses the hidden solution: 6 x 7: not yet. Six times seven."),
        ("# answer = 42", "# raise ValueError('bad')", "ValueError: bad"),
        ("# ```python", "# ```text", "no hidden solution"),
        ("axes.plot([1, 2, 3])", "axes.plot([1, 2, 3]); 1 / 0", "'fig, axes = plt.subplots()'): ZeroDivisionError"),
        ("axes.plot([1, 2, 3])", "import os; os._exit(1)", "DeadKernelError"),
    ],
)
def test_a_run_finds_what_is_wrong(sample: Path, tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in SAMPLE
    sample.write_text(SAMPLE.replace(old, new))
    run = run_notebooks.execute(sample, tmp_path / "out", exercises=True)
    assert any(complaint in problem for problem in run.problems), run.problems


@pytest.mark.slow
def test_one_broken_notebook_does_not_stop_the_others(sample: Path, tmp_path: Path) -> None:
    (sample.parent / "98_broken.py").write_text("# %%\nraise RuntimeError('no luck')\n")
    command = [sys.executable, str(ROOT / "tools/run_notebooks.py"), "--folder", str(sample.parent), "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"98_broken +[\d.]+ +[\d.]+ GiB +0 +FAILED: cell 0 .*RuntimeError: no luck", done.stdout)
    assert re.search(r"99_sample +[\d.]+ +[\d.]+ GiB +1 +ok", done.stdout)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_the_table_of_what_was_done(sample: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    (sample.parent / "97_done.py").write_text("# %%\n1\n")
    (sample.parent / "98_long.py").write_text(f"# %%\nimport time; open({str(started)!r}, 'w'); time.sleep(600)\n")
    command = [sys.executable, str(ROOT / "tools/run_notebooks.py"), "--folder", str(sample.parent), "--out", "out"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as run:
        deadline_s = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does, to all of them
        said = run.communicate(timeout=60)[0]
    assert run.returncode == 130 and "Traceback" not in said, said
    assert "interrupted in 98_long: 1 of 3 notebooks done" in said
    assert re.search(r"97_done +[\d.]+ +[\d.]+ GiB +0 +ok", said)


@pytest.mark.slow
def test_publishing_is_clean_and_repeats_itself(sample: Path, tmp_path: Path) -> None:
    texts, figures = [], []
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "99_no_longer_drawn.svg").touch()
    for number in range(2):
        out = tmp_path / f"out{number}"
        run_notebooks.execute(sample, out)
        written = publish_notebooks.publish(out, sample.parent, tmp_path / "figures")
        assert [path.name for path in written] == ["99_sample.ipynb", "99_line.svg"]
        texts.append(written[0].read_text())
        figures.append(written[1].read_text())
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["99_line.svg"]
    assert texts[0] == texts[1] and figures[0] == figures[1]
    assert str(ROOT) not in texts[0] and "a path: <neo-lite>/neo_lite/plots.py <object object>" in texts[0]
    assert set(json.loads(texts[0])["metadata"]) == {"kernelspec", "language_info"}


def test_publishing_drops_widget_state() -> None:
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider(value=0)"}
    outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="ab"),
        nbformat.v4.new_output("display_data", data=view),
        nbformat.v4.new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "2"}}),
    ]
    cell = nbformat.v4.new_code_cell("x", outputs=outputs, metadata={"execution": {"iopub.status.busy": "now"}})
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    cleaned = publish_notebooks.clean(notebook)
    assert "widgets" not in cleaned.metadata and cleaned.cells[0].metadata == {}
    assert [output.get("text") or output.data for output in cleaned.cells[0].outputs] == [
        "ab",
        {"text/plain": "IntSlider(value=0)"},
    ]


def test_publishing_refuses_a_flood_of_output() -> None:
    flood = nbformat.v4.new_output("stream", name="stdout", text="x" * (publish_notebooks.MAX_OUTPUT_BYTES + 1))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(x)", outputs=[flood])])
    with pytest.raises(SystemExit, match="draw less"):
        publish_notebooks.clean(notebook)


# The helpers that notebooks call


def test_a_check_turns_any_error_of_a_blank_into_not_yet(capsys: pytest.CaptureFixture[str]) -> None:
    from neo_lite import exercise

    def fails() -> None:
        assert ... + 1 == 2  # type: ignore[operator]

    assert exercise.check("sum")(fails) is False
    assert exercise.check("none")(lambda: None) is True
    said = capsys.readouterr().out
    assert "sum: not yet. The check ended in TypeError" in said and "none: solved." in said
    assert exercise.results["sum"] is False and exercise.results["none"] is True


def test_a_figure_says_where_its_data_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    from neo_lite import plots
    from neo_lite.config import NeoLiteError

    monkeypatch.setenv("NEO_LITE_FIGURES", str(tmp_path))
    plots.use_style()
    fig, axes = plt.subplots()
    axes.plot([0, 1])
    path = plots.save_figure(fig, "00_line", "measured + paper", note="2 cores")
    assert path == tmp_path / "00_line.svg" and "source: measured + paper (2 cores)" in path.read_text()
    assert plots.save_figure(fig, "00_line.png", "paper").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(NeoLiteError, match="'guess' is unknown: choose from measured"):
        plots.save_figure(fig, "00_line", "guess")
