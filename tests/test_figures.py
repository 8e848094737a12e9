"""The paper's figures: their data have a source, a key and a schema; every figure draws; bad input is refused in one line."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from neo_lite import figures, machine, sweep
from neo_lite.__main__ import main, parser
from neo_lite.config import NeoLiteError
from neo_lite.sweep import Recorded, Run, run
from neo_lite.timeline import LANES

COMMITTED = sweep.read(sweep.SIMULATED)
BASE = run("t4-g4dn.4xlarge", "gpu-only", "osc", requests=5)


# The paper's points


def test_every_number_of_the_paper_belongs_to_a_figure_and_has_a_method():
    text = (ROOT / "data/paper/points.csv").read_text().splitlines()
    assert text[0] == "figure,curve,x,y,method,what" and len(text) > 40
    rows = [line.split(",")[:5] for line in text[1:]]
    assert {row[0] for row in rows} <= set(figures.NAMES) and {row[4] for row in rows} == {"reported", "digitised"}
    assert all(float(row[3]) > 0 for row in rows)
    assert sum(row[0] == "10a" and row[4] == "digitised" for row in rows) == 20


# Simulated points: a key, and nothing mixed


def test_the_key_sees_code_and_neither_comments_nor_docstrings():
    source = '"""Module."""\n\ndef f(x):\n    """What it does."""\n    return x + 1  # one more\n'
    same = 'def f(x):\n    # a remark\n\n    """Told otherwise,\n    at length."""\n    return x + 1\n'
    assert sweep.code(source) == sweep.code(same)
    assert sweep.code(source) != sweep.code(source.replace("+ 1", "+ 2"))


def test_committed_points_are_those_of_this_code_and_no_more():
    made_by, rows = COMMITTED
    assert made_by == sweep.key(), "run `python -m neo_lite figures --fresh`"
    assert set(rows) == set(figures.all_runs())


def test_a_constant_is_part_of_the_key_and_its_source_is_not(tmp_path, monkeypatch):
    text = (sweep.DATA_DIR / "hardware.json").read_text()
    keys = []
    for change in (
        ("", ""),
        ('245e9, "', '245e9, "so they say: '),
        ("245e9", "246e9"),
        ('["t4", "colab"]', '["t4", "x"]'),
    ):
        assert change[0] in text
        (tmp_path / "hardware.json").write_text(text.replace(*change) if change[0] else text)
        monkeypatch.setattr(sweep, "DATA_DIR", tmp_path)
        keys.append(sweep.key.__wrapped__())
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "r",
    [
        run("t4-g4dn.4xlarge", "neo-released", "osc", 3.5),
        run("a10g-g5.16xlarge", "neo", "synthetic:1000,50"),
        run("2xh100", "gpu-only", "azure-code", 3.4),
    ],
    ids=str,
)
def test_a_point_computed_again_gives_the_same_bytes(r: Run):
    lines = sweep.SIMULATED.read_text().splitlines()
    assert json.dumps(sweep.simulate(r)) in lines


def test_a_stale_key_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("NEO_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(sweep, "key", lambda: "0123456789ab")
    rows = sweep.results([BASE])
    assert re.fullmatch(
        r"simulated points are stale, made by code \w+, now 0123456789ab: `.*--fresh` [^\n]*\n", capsys.readouterr().err
    )
    assert rows == COMMITTED[1]


def test_missing_points_are_counted(capsys: pytest.CaptureFixture[str]):
    sweep.results([BASE, next(iter(COMMITTED[1]))])
    assert "1 of 2 simulated points are missing" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_stopped_and_mixes_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One result is there, half of a second one; a third lies under another key."""
    monkeypatch.setenv("NEO_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(sweep, "SIMULATED", tmp_path / "kept.jsonl")
    first, second, third = (BASE._replace(mode=mode) for mode in ("gpu-only", "gpu-only-unchunked", "neo"))
    made = {"run": list(first), "requests_per_s": 123.0}
    head = json.dumps({"key": sweep.key(), "source": "simulated"})
    sweep.cached().parent.mkdir(parents=True)
    sweep.cached().write_text(f"{head}\n{json.dumps(made)}\n" + json.dumps({"run": list(second)})[:20])
    other = sweep.cached().with_name("ffffffffffff.jsonl")
    other.write_text(f'{{"key": "ffffffffffff"}}\n{json.dumps({**made, "run": list(third)})}\n')
    sweep.compute([first, second], every=[first, second, third])
    key, rows = sweep.read(sweep.cached())
    assert key == sweep.key() and set(rows) == {first, second}
    assert rows[first] == made and 0 < rows[second]["requests_per_s"] < 10
    assert not sweep.SIMULATED.exists(), "not every point is there yet"
    sweep.compute([third], every=[first, second, third])
    assert set(sweep.read(sweep.SIMULATED)[1]) == {first, second, third}
    assert other.read_text().startswith('{"key": "ffffffffffff"}')


# Figures


@pytest.mark.slow
@pytest.mark.parametrize("source", ["simulated", "recorded"])
def test_every_figure_is_drawn_with_its_table(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["figures", "--source", source, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for name in figures.NAMES:
        svg, png = (tmp_path / f"11_fig{name}.{kind}" for kind in ("svg", "png"))
        assert re.search(r"source: (code|paper|simulated|recorded|measured)( \+ \w+)*<", svg.read_text())
        assert png.read_bytes()[:4] == b"\x89PNG" and 10_000 < png.stat().st_size < 300_000 > svg.stat().st_size
        width = int.from_bytes(png.read_bytes()[16:20], "big") / 250
        assert 2.8 < width < 3.7, f"figure {name} is {width:.2f} inches wide, a column is 3.4"
    assert said.out.count("sim.-paper") == len(figures.NAMES) - 2
    assert source == "recorded" or "recorded" not in said.out


def test_a_table_tells_a_difference_and_leaves_out_what_is_unknown():
    rows = [figures.Row("a point", 1.25, 1.5), figures.Row("another", simulated=2.0, measured=2.5, alike=2.25)]
    lines = figures.table(rows).splitlines()
    assert lines[0].split() == ["paper", "simulated", "real", "run", "sim.", "alike", "sim.-paper", "run-sim."]
    assert lines[1].split() == ["a", "point", "1.25", "1.5", "0.25"]
    assert lines[2].split() == ["another", "2", "2.5", "2.25", "0.25"], "held against the simulation of the same run"


def test_a_load_is_read_off_between_two_points():
    assert figures.crossing([(1.0, 0.5), (2.0, 0.7), (3.0, 1.7)], 1.0) == pytest.approx(2.3)
    assert figures.crossing([(1.0, 0.5), (2.0, 0.7)], 1.0) != figures.crossing([(1.0, 0.5), (2.0, 0.7)], 1.0)  # nan


GUESSED = (
    r"argument --source: invalid choice: 'guessed' \(choose from '?simulated'?, '?recorded'?, '?measured'?\) \(see .*\)"
)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["6d"], "figure '6d' is unknown: choose from 1, 2, 3, 4, 5, 6a, 6b, 6c, 7, 8a, 8b, 9a, 9b, 9c, 10a, 10b"),
        (["6c", "--source", "guessed"], GUESSED),
        (["6c", "--fresh", "--source", "guessed"], GUESSED),
        (["6c", "--source", "measured"], "--source measured: no CUDA GPU here; choose recorded: .*H200"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(machine, "gpu", lambda partition=None: None)
    assert main(["figures", *arguments, "--out", str(tmp_path)]) == 1
    assert re.fullmatch(f"neo_lite: {complaint}\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


# What is asked of the simulation

EXPLAINED = {"10a: machines in the published order"}  # notebook 11 says why


def test_every_claim_of_fidelity_holds_but_those_that_are_explained():
    claims = figures.fidelity(COMMITTED[1])
    assert len(claims) == 12
    assert {claim.text for claim in claims if not claim.holds} == EXPLAINED, claims


def test_claims_can_fail():
    """With GPU-only in NEO's place none of its gains is there."""
    claims = figures.fidelity(COMMITTED[1], mode="gpu-only-unchunked")
    assert sum(claim.holds for claim in claims) <= 7
    assert not next(claim for claim in claims if "published order" in claim.text).holds


# Recorded runs: schema, stamp, command

STAMP = {"gpu", "cpu", "usable_cores", "ram_bytes", "platform", "python", "torch", "neo_lite", "date"}
NO_COMMAND = "kernel_variants_"  # variants that were tried and not kept: each file says what they were
FIELDS = {"bench_": figures.FIELDS, "peer_": figures.PEER_FIELDS}


def problems(path: Path) -> list[str]:
    """What is wrong with a recorded file; nothing, if it is as it should be."""
    found: list[str] = []
    for kind in (kind for kind in FIELDS if path.name.startswith(kind)):
        try:
            figures.checked(path, FIELDS[kind])
        except NeoLiteError as error:
            found.append(str(error))
    for line in sweep.lines_of(path):
        stamp = line.get("stamp", {})
        if missing := STAMP - set(stamp):
            found.append(f"its stamp lacks {sorted(missing)}")
        elif not re.match(r"\d{4}-\d\d-\d\dT", stamp["date"]) or not isinstance(stamp["usable_cores"], int):
            found.append("its stamp is malformed")
        if line.get("source") not in ("recorded", "measured"):
            found.append(f"its source is {line.get('source')!r}")
        if not path.name.startswith(NO_COMMAND):
            found += command_problems(line.get("command", ""))
        for part in (line, *line.get("cases", {}).values()):
            if bad := [e for e in part.get("events", ()) if e[0] not in LANES or not 0 <= e[2] <= e[3]]:
                found.append(f"{len(bad)} events are malformed")
    return found


def command_problems(command: str) -> list[str]:
    """The command is parsed, not run: a sub-command and options that exist, or a script that knows its options."""
    command = re.sub(r"^(\w+=\S+ )+", "", command)  # variables
    words = shlex.split(command)
    if re.match(r"python -m (torch\.distributed\.run --nproc-per-node \d+ -m )?neo_lite ", command):
        try:
            parser().parse_args(words[words.index("neo_lite") + 1 :])
        except NeoLiteError as error:
            return [f"its command does not exist: {error}"]
        return []
    script = ROOT / words[1] if words[:1] == ["python"] and len(words) > 1 else ROOT
    if not script.is_file():
        return [f"its command {command!r} does not exist"]
    return [
        f"{script.name} has no option {word}"
        for word in words[2:]
        if word.startswith("--") and word not in options(script)
    ]


def options(script: Path) -> set[str]:
    """What a script and the scripts beside it that it imports add to their parsers."""
    tree = ast.parse(script.read_text())
    nodes = [*ast.walk(tree)]
    imports = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")]
    found = {arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)}
    beside = [path for name in imports if (path := script.with_name(f"{name}.py")).is_file()]
    return found.union(*(options(path) for path in beside))


def test_every_command_that_is_written_down_exists():
    text = (ROOT / "REPRODUCING.md").read_text()
    found = re.findall(r"`(python [^`\n]+)`", text) + re.findall(r"^ *(python .+)$", text, re.MULTILINE)
    assert len(found) > 15
    assert {command: problem for command in found if (problem := command_problems(command.strip()))} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "data/recorded").iterdir()), ids=lambda path: path.name)
def test_recorded_file_has_its_schema_its_stamp_and_a_command_that_exists(path: Path):
    assert path.suffix == ".json" and problems(path) == []


GOOD: dict[str, Any] = {
    "source": "recorded", "command": "python -m neo_lite bench --model random:llama-3.1-8b --mode gpu-only-unchunked,neo"
    " --num-sms 8 --cpu-threads 14 --max-batched-tokens 20480 --workload synthetic:1000,100 --requests 150",
    "stamp": {**dict.fromkeys(STAMP, ""), "date": "2026-01-01T00:00:00+00:00",
              "gpu": {"name": "NVIDIA H200", "partition_sms": 8}, "usable_cores": 16},
    "ran_on": "8 of the 132 SMs of an NVIDIA H200, 14 of 16 threads of a Xeon",
    "model": "random:llama-3.1-8b", "dtype": "float16", "mode": "neo", "seed": 0,
    "workload": "synthetic:1000,100", "requests": 150, "requests_per_s": 3.0, "gpu_kv_tokens": 25600, "cpu_kv_gib": 40.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"stamp": {**GOOD["stamp"], "date": "yesterday"}}, "its stamp is malformed"),
        ({"stamp": {"gpu": "H200"}}, "its stamp lacks"),
        ({"source": "imagined"}, "its source is 'imagined'"),
        ({"command": "python -m neo_lite measure"}, "its command does not exist"),
        ({"command": "python -m neo_lite bench --sms 8"}, "its command does not exist"),
        ({"command": "python benchmarks/gone.py"}, "'python benchmarks/gone.py' does not exist"),
        ({"command": "python benchmarks/gpu_partition.py --cores 8"}, "gpu_partition.py has no option --cores"),
        ({"command": ""}, "does not exist"),
        ({"events": [["gpu", "pre", 0.2, 0.1, 0]]}, "1 events are malformed"),
        ({"requests_per_s": ...}, "its requests_per_s is None"),
        ({"requests_per_s": "fast"}, "its requests_per_s is 'fast'"),
        ({"requests_per_s": 0.0}, "its requests_per_s is 0.0"),
        ({"requests_per_s": float("nan")}, "its requests_per_s is nan"),
        ({"requests": True}, "its requests is True"),
        ({"cpu_kv_gib": ...}, "its cpu_kv_gib is None"),
        ({"stamp": {**GOOD["stamp"], "gpu": None}}, "its stamp's gpu is None"),
        ({"model": "random:llama-2-7b"}, "its command has --model random:llama-3.1-8b, and it has random:llama-2-7b"),
        ({"mode": "gpu-only"}, "its command has --mode gpu-only-unchunked,neo, and it has gpu-only"),
        ({"requests": 60}, "its command has --requests 150, and it has 60"),
        ({"command": GOOD["command"] + " --rate 3.0"}, "its command has --rate 3, and it has inf"),
        ({"rate_per_s": 3.0}, "its mean_per_token_latency_s is None"),
        ({"stamp": {**GOOD["stamp"], "gpu": {"name": "H200"}}}, "its command has --num-sms 8, and it has 0"),
    ],
)
def test_a_recorded_file_that_is_wrong_fails(change: dict[str, Any], complaint: str, tmp_path: Path):
    path = tmp_path / "bench_x.json"
    path.write_text(json.dumps({k: v for k, v in {**GOOD, **change}.items() if v is not ...}))
    found = problems(path)
    assert any(complaint in problem for problem in found) if complaint else found == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("[]", "it is empty"),
        ("3", "'3' is no JSON object"),
        ("{}", "its command is None"),
        ('{"command": "python', "it is no JSON, or ends amid a line"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD)[:40], "it is no JSON, or ends amid a line"),
    ],
)
def test_a_recorded_file_that_is_broken_is_named_in_one_line(
    text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(figures, "RECORDED", tmp_path)
    (path := tmp_path / "bench_x.json").write_text(text)
    assert main(["figures", "9c", "--source", "recorded", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said == f"neo_lite: {path}: {complaint}: remove the file, or run its command again\n"


def test_recorded_pipelines_that_are_broken_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "PIPELINES", tmp_path / "pipelines.json")
    (tmp_path / "pipelines.json").write_text('{"cases": {"simple": {"events": [["gpu", "pre"]]}}}')
    with pytest.raises(NeoLiteError, match=r"pipelines.json lacks events of 'simple' .*: record them again"):
        figures.draw("3")


def pair(**change: Any) -> list[dict[str, Any]]:
    return [{**GOOD, "mode": "gpu-only-unchunked", "requests_per_s": 2.0}, {**GOOD, **change}]


def recorded(folder: Path, lines: list[dict[str, Any]]) -> Recorded:
    (folder / "bench_x.json").write_text("\n".join(json.dumps(line) for line in lines))
    return sweep.recorded(folder)[1]


def test_a_recorded_ratio_has_its_baseline_in_the_same_command(tmp_path: Path):
    found = recorded(tmp_path, pair())
    assert found.ratio == 1.5 and found.place == "h200-8sm-14t"
    assert found.like == Run(
        "h200-8sm-14t", "llama-3.1-8b", "neo", "synthetic:1000,100", 0.0, 150, 25600, 40.0, 20480, 512
    )


@pytest.mark.parametrize(
    "change",
    [
        {"stamp": {**GOOD["stamp"], "neo_lite": "0.2"}},
        {"command": GOOD["command"].replace("-sms 8", "-sms 16")},
        {"requests": 60},
        {"workload": "synthetic:1000,200"},
    ],
    ids=["another code", "another machine", "other requests", "another workload"],
)
def test_a_ratio_never_crosses_stamps_or_commands(change: dict[str, Any], tmp_path: Path):
    found = recorded(tmp_path, pair(**change))
    assert found.ratio != found.ratio


def test_a_recorded_run_lies_in_its_figure_beside_its_simulation(tmp_path: Path):
    runs = [recorded(tmp_path, pair())]
    assert runs[0].like in figures.wanted("10a", runs) and runs[0].like not in figures.wanted("6c", runs)
    _, rows = figures.draw_ratio("10a", COMMITTED[1], runs)
    assert [row.what for row in rows if row.measured == 1.5] == ["g5.16xlarge, 100 out: neo"]
