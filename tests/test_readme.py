"""The README never lies: the commands that it shows are run, its links lead somewhere, its targets and variables exist.

In ```console blocks a line after `$ ` is a command and what follows is its output, where `...` stands for anything.
Commands of the package are run here. Of `make`, target and variables are checked: what they do is run elsewhere.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_repository import project

DOCUMENTS = ["README.md", "REPRODUCING.md", "notebooks/README.md"]
PYTHON = ".venv/bin/python -m neo_lite "
NOT_RUN = ("git clone ", "conda env create ")


def console_blocks(text: str) -> list[str]:
    return re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(document: str) -> list[tuple[str, str]]:
    """(command, the output shown beneath it) of every console block."""
    found = []
    for block in console_blocks((ROOT / document).read_text()):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command.split("  #")[0].strip(), output))
    return found


ALL = [(document, *pair) for document in DOCUMENTS for pair in commands(document)]
RUN = [(command, output) for _, command, output in ALL if command.startswith(PYTHON)]
MAKE = [command for _, command, _ in ALL if command.startswith("make ")]


def shown(output: str) -> re.Pattern[str]:
    """A pattern of the output as the document shows it."""
    return re.compile(".*".join(re.escape(part) for part in output.strip("\n").split("...")), re.DOTALL)


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    known = (PYTHON, "make ", *NOT_RUN)
    assert [command for _, command, _ in ALL if not command.startswith(known)] == []
    assert len(RUN) >= 3 and len(MAKE) >= 4


@pytest.mark.slow
def test_the_python_that_it_shows_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    exec(code, {})
    assert (
        capsys.readouterr().out
        == " a fundamental concept in physics that describes the curvature of spacetime caused by the presence of"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("command", "output"), RUN, ids=[command.removeprefix(PYTHON)[:40] for command, _ in RUN])
def test_command_prints_what_the_document_shows(command: str, output: str) -> None:
    arguments = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert shown(output).fullmatch(done.stdout.strip("\n")), done.stdout


def test_the_pattern_of_an_output_can_refuse() -> None:
    assert shown("a...\nb\n").fullmatch("a, then\nmore\nb")
    assert not shown("a...\nb\n").fullmatch("a\nc")


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_target_and_variables(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in shlex.split(command)[1:]:
        name = word.split("=")[0]
        pattern = rf"^(export )?{name} \?=" if "=" in word else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), word


def test_documented_variables_exist() -> None:
    rows = re.findall(r"^\| (`.*`) \|", (ROOT / "REPRODUCING.md").read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([A-Z_]+)[=`]", row)]
    makefile = (ROOT / "Makefile").read_text()
    assert len(names) >= 8
    assert [name for name in names if not re.search(rf"^(export )?{name} \?=", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    assert [link for link in links if not ((ROOT / document).parent / link).exists()] == []


def test_map_names_every_notebook_with_its_colab_link() -> None:
    text = (ROOT / "README.md").read_text()
    repository = project()["urls"]["Repository"].removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{repository}/blob/v{project()['version']}/notebooks"
    for source in sorted(Path(ROOT / "notebooks").glob("[0-9][0-9]_*.py")):
        assert f"[{source.stem}](notebooks/{source.stem}.ipynb)" in text
        assert f"({colab}/{source.stem}.ipynb)" in text


def test_readme_clones_the_one_address() -> None:
    assert f"git clone {project()['urls']['Repository']} && cd neo-lite" in (ROOT / "README.md").read_text()
