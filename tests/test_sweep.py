"""Simulated points: what is kept is whole or says what is wrong with it; computing goes on, or starts anew."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neo_lite import sweep
from neo_lite.__main__ import main
from neo_lite.config import NeoLiteError
from neo_lite.sweep import run

FIRST, SECOND = (run("t4-g4dn.4xlarge", mode, "osc", requests=3) for mode in ("gpu-only", "gpu-only-unchunked"))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a data/simulated/ of their own, both empty."""
    monkeypatch.setenv("NEO_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sweep, "SIMULATED", path := tmp_path / "runs.jsonl")
    sweep.say_once.cache_clear()
    return path


def spoil(path: Path) -> None:
    """Every number of the file becomes 123."""
    head, *rows = path.read_text().splitlines()
    spoiled = [json.dumps({**json.loads(row), "requests_per_s": 123.0}) for row in rows]
    path.write_text("\n".join([head, *spoiled]) + "\n")


@pytest.mark.slow
def test_a_second_fresh_run_computes_everything_anew_and_gives_the_same_bytes(kept: Path):
    sweep.compute([FIRST, SECOND], every=[FIRST, SECOND])
    once = kept.read_bytes()
    spoil(sweep.cached())
    spoil(kept)
    assert kept.read_bytes() != once
    sweep.compute([FIRST, SECOND], every=[FIRST, SECOND])
    assert kept.read_bytes() == once


@pytest.mark.slow
def test_a_run_of_some_leaves_the_others_alone_and_the_next_goes_on_with_both(kept: Path):
    sweep.compute([FIRST], every=[FIRST, SECOND])
    spoil(sweep.cached())
    sweep.compute([SECOND], every=[FIRST, SECOND])
    assert sweep.read(kept)[1][FIRST]["requests_per_s"] == 123.0 != sweep.read(kept)[1][SECOND]["requests_per_s"]


def test_no_points_at_all_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["figures", "6c", "--source", "simulated", "--out", str(tmp_path / "out")]) == 1
    assert re.fullmatch(
        r"neo_lite: no simulated points in \S+: `python -m neo_lite figures --fresh` [^\n]*\n", capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("garbage\n", 1),
        ("[]\n", 1),
        ('{"source": "simulated"}\n', 1),
        ('{"key": "a"}\n{"run": [1, 2]}\n', 2),
        ('{"key": "a"}\nnot JSON\n', 2),
    ],
)
def test_a_damaged_file_is_an_error_of_one_line(text: str, line: int, kept: Path):
    kept.write_text(text)
    with pytest.raises(NeoLiteError, match=rf"runs.jsonl, line {line}, is no simulated point: delete the file[^\n]*$"):
        sweep.results([FIRST])


def test_stale_points_say_so_once_in_a_process(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sweep.write(kept, [{"run": list(FIRST)}])
    assert not sweep.stale([FIRST]) and capsys.readouterr().err == ""
    monkeypatch.setattr(sweep, "key", lambda: "0123456789ab")
    for wanted in ([FIRST], [SECOND], [FIRST, SECOND]):
        sweep.results(wanted)
        assert sweep.stale(wanted)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_fresh_points_of_this_code_are_not_stale(kept: Path, monkeypatch: pytest.MonkeyPatch):
    sweep.write(kept, [{"run": list(FIRST)}])
    monkeypatch.setattr(sweep, "key", lambda: "0123456789ab")
    sweep.write(sweep.cached(), [{"run": list(FIRST)}])
    assert not sweep.stale([FIRST]) and sweep.stale([SECOND])
