"""Runs in the figures: a reader's own are drawn wherever they ran, none is taken twice or from elsewhere, all are labelled."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from test_figures import COMMITTED, GOOD, pair, recorded

from neo_lite import figures, machine, plots, sweep
from neo_lite.config import NeoLiteError
from neo_lite.sweep import NEO, VLLM

# Where measured runs are drawn


def own_runs(
    folder: Path, card: str = "NVIDIA A10G", threads: int = 32, cpu: str = "AMD EPYC 7R32", **change: Any
) -> list[sweep.Recorded]:
    """A pair of runs as `--source measured` leaves it, on a whole card that no preset of ours is named after."""
    stamp = {**GOOD["stamp"], "gpu": {"name": card, "partition_sms": None}, "cpu": cpu, "usable_cores": threads}
    ran_on = f"all of the 80 SMs of an {card}, {threads} of {threads} threads of {cpu}"
    command = GOOD["command"].replace(" --num-sms 8 --cpu-threads 14", " --num-sms 0 --cpu-threads 0")
    own = {"source": "measured", "ran_on": ran_on, "stamp": stamp, "command": command, **change}
    recorded(folder, [{**line, **own} for line in pair()])
    return figures.runs_in(folder)


def panels_with_a_run(name: str, runs: list[sweep.Recorded]) -> list[str]:
    fig, _ = figures.draw_ratio(name, COMMITTED[1], runs)
    found = [ax.get_title() for ax in fig.axes if any(line.get_marker() == "D" for line in ax.lines)]
    plt.close(fig)
    return found


@pytest.mark.parametrize(
    ("card", "threads", "name", "panels"),
    [
        ("NVIDIA A10G", 8, "10a", ["g5.2xlarge"]),
        ("NVIDIA A10G", 32, "10a", ["g5.8xlarge"]),
        ("NVIDIA A10G", 64, "10a", ["g5.16xlarge"]),
        ("NVIDIA A10G", 6, "10a", ["g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.16xlarge"]),
        ("NVIDIA L4", 16, "10a", ["g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.16xlarge"]),
        ("NVIDIA A10G", 16, "9b", ["prompts of 1,000"]),
        ("NVIDIA A10G", 64, "9b", ["prompts of 1,000"]),
        ("NVIDIA A10G", 64, "9c", []),
    ],
)
def test_a_measured_run_lies_in_its_machines_panel_or_in_all(
    card: str, threads: int, name: str, panels: list[str], tmp_path: Path
):
    runs = own_runs(tmp_path, card, threads)
    assert runs[1].source == "measured" and not runs[1].place, "no preset, as on every g5"
    assert panels_with_a_run(name, runs) == panels


def test_a_recorded_run_stays_in_the_panel_that_it_stands_for(tmp_path: Path):
    recorded(tmp_path, pair())
    (run,) = (r._replace(source="recorded") for r in figures.runs_in(tmp_path) if r.mode == "neo")
    assert panels_with_a_run("10a", [run]) == ["g5.16xlarge"] and panels_with_a_run("9b", [run]) == []
    elsewhere = own_runs(tmp_path)[1]._replace(
        source="recorded", ran_on="all of the 58 SMs of an NVIDIA L4, 8 of 8 threads of X"
    )
    assert panels_with_a_run("10a", [elsewhere]) == []


def test_a_measured_run_is_in_the_table_with_its_machine_and_in_the_stamp(tmp_path: Path):
    own_runs(tmp_path, threads=6)
    fig, table, source = figures.draw("10a", "measured", tmp_path)
    plt.close(fig)
    assert source == "paper + simulated + measured"
    labels = " ".join(text.get_text().replace("\n", " ") for text in fig.legends[0].get_texts())
    assert "150 requests, whole run, over gpu-only-unchunked" in labels, "a run's baseline is its own, not the axis's"
    assert table.count("measured, 150 requests: A10G, 6 threads") == 4 and table.count(" 1.5 ") >= 4


def test_a_long_name_of_a_cpu_makes_no_figure_wider_than_a_column(tmp_path: Path):
    cpu = "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz of a kind whose name has no end that a legend could hold"
    osc = {"model": "random:llama-2-7b", "workload": "osc"}
    command = "python -m neo_lite bench --model random:llama-2-7b --mode gpu-only-unchunked,neo --workload osc"
    for name, change in (("10a", {}), ("6c", {**osc, "command": command})):
        own_runs(tmp_path, cpu=cpu, **change)
        fig, _, source = figures.draw(name, "measured", tmp_path)
        path = plots.save_figure(fig, f"{name}.png", source, folder=str(tmp_path))
        width = int.from_bytes(path.read_bytes()[16:20], "big") / fig.dpi
        plt.close(fig)
        assert "measured" in source and 2.8 < width < 3.7, f"figure {name} is {width:.2f} inches wide"


# Figure 6c beside runs of other models


def at_once(folder: Path, model: str) -> None:
    """300 OSC requests, GPU-only and NEO, in two commands."""
    lines = []
    for mode, per_s in ((VLLM, 2.0), ("neo", 6.0)):
        command = (
            f"python -m neo_lite bench --model random:{model} --mode {mode} --num-sms 8 --cpu-threads 14 --workload osc"
        )
        own = {"model": f"random:{model}", "workload": "osc", "requests": 300, "gpu_kv_tokens": 864, "cpu_kv_gib": 24.0}
        lines.append({**GOOD, **own, "command": command, "mode": mode, "requests_per_s": per_s})
    (folder / f"bench_osc_{model}.json").write_text("\n".join(json.dumps(line) for line in lines))


def test_6c_has_rows_for_either_models_shape_each_with_its_own_simulation(tmp_path: Path):
    for model in ("llama-2-7b", "llama-3.1-8b"):
        at_once(tmp_path, model)
    runs = [r._replace(source="recorded") for r in figures.runs_in(tmp_path)]
    likes = {r.like for r in runs if r.like}
    assert len(likes) == 4 and likes <= set(figures.wanted("6c", runs)), "each is simulated as it was run"
    assert not likes & {*figures.wanted("6a", runs), *figures.wanted("10a", runs)}
    results = {**COMMITTED[1], **{like: {"requests_per_s": 3.0 if like.mode == VLLM else 12.0} for like in likes}}
    fig, rows = figures.draw_load("6c", results, runs)
    plt.close(fig)
    found = [(row.what.strip(), row.measured, row.alike) for row in rows if row.measured == row.measured]
    for model in ("llama-2-7b", "llama-3.1-8b"):
        what = f"recorded: {model}, 300 at once"
        assert (what, 2.0, 3.0) in found and (what, 6.0, 12.0) in found
    assert found.count(("over its gpu-only's", 3.0, 4.0)) == 2 and len(found) == 6


def test_a_run_at_a_rate_is_a_point_of_6c_beside_its_own_simulation(tmp_path: Path):
    at_once(tmp_path, "llama-2-7b")
    for path in tmp_path.glob("bench_osc_*"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line |= {"rate_per_s": 3.0, "mean_per_token_latency_s": 0.25, "command": line["command"] + " --rate 3.0"}
        path.write_text("\n".join(map(json.dumps, lines)))
    runs = figures.runs_in(tmp_path)
    assert {r.like.rate for r in runs if r.like} == {3.0}
    (neo,) = (r.like for r in runs if r.mode == "neo")
    fig, rows = figures.draw_load("6c", {**COMMITTED[1], neo: {"latency_s": 0.2}}, runs)
    assert [line.get_marker() for line in fig.axes[0].lines if list(line.get_xdata()) == [3.0] and line.get_ydata()[0] == 0.25] \
        == ["D", "D"]  # fmt: skip
    assert not [line for line in fig.axes[0].lines if list(line.get_xdata()) in ([2.0, 2.0], [6.0, 6.0])], "at once"
    plt.close(fig)
    found = [(row.what.strip(), row.measured, row.alike) for row in rows if row.measured == row.measured]
    assert ("measured: llama-2-7b, 300 at 3/s: latency (s)", 0.25, 0.2) in found and len(found) == 2


def test_the_committed_runs_of_osc_are_in_6cs_table():
    runs = [r for r in figures.runs_in(sweep.RECORDED) if r.workload == "osc"]
    assert runs and {r.like for r in runs} <= set(figures.wanted("6c", runs)) and all(r.like for r in runs)
    fig, table, _ = figures.draw("6c", "recorded")
    plt.close(fig)
    for r in runs:
        assert f"recorded: {r.model}, {r.requests} at once" in table


def test_every_digitised_point_of_6c_has_a_simulated_one():
    rates = figures.LOADS["6c"]
    for who, mode in (("vLLM", VLLM), *(("NEO", mode) for mode in NEO)):
        assert set(sweep.curve_of("6c", who)) <= set(rates.rates_of(mode))


# Measuring

OPTIONS = "--model random:llama-3.1-8b --dtype float16 --mode gpu-only-unchunked,neo --workload synthetic:1000,100 --requests 150"
HERE = {
    **GOOD["stamp"],
    "gpu": {"name": "NVIDIA A10G", "partition_sms": None, "capability": (8, 6)},
    "usable_cores": 16,
}


def lines(options: str = OPTIONS, **change: Any) -> str:
    command = f"python -m neo_lite bench {options}"
    return "\n".join(json.dumps({**line, "stamp": HERE, "command": command, **change}) for line in pair()) + "\n"


class Bench:
    """In place of the sub-process: what it prints, its exit, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        self.stdout, self.returncode, self.interrupted = lines(), 0, False
        monkeypatch.setattr(machine, "gpu", lambda partition=None: HERE["gpu"])
        monkeypatch.setattr(machine, "stamp", lambda partition=None: {**HERE, "date": "now"})
        monkeypatch.setattr(figures, "MEASURES", {"10a": [OPTIONS]})
        monkeypatch.setattr(figures.subprocess, "run", self)

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.interrupted:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, self.returncode, self.stdout)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_what_was_measured_here_is_not_measured_again(bench: Bench, tmp_path: Path):
    folder = figures.measure(["10a"], tmp_path)
    assert len(bench.commands) == 1 and bench.commands[0][-len(OPTIONS.split()) :] == OPTIONS.split()
    assert [path.name for path in folder.iterdir()] == ["bench_10a_0.json"] and folder.parent == tmp_path
    assert figures.measure(["10a"], tmp_path) == folder and len(bench.commands) == 1
    assert figures.runs_in(folder)[1].ratio == 1.5


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ("", "it is empty"),
        ("{}", "its command is None"),
        (lines()[:-30], "it is no JSON, or ends amid a line"),
        (lines().split("\n")[0], "is of another machine, code or command"),
        (lines(stamp={**HERE, "gpu": {"name": "Tesla T4"}}), "is of another machine, code or command"),
        (lines(stamp={**HERE, "usable_cores": 8}), "is of another machine, code or command"),
        (lines(stamp={**HERE, "neo_lite": "0.0"}), "is of another machine, code or command"),
        (lines(OPTIONS.replace("float16", "auto")), "is of another machine, code or command"),
    ],
    ids=["empty", "object", "half a line", "one mode", "other card", "other cores", "other code", "other options"],
)
def test_a_file_that_is_broken_or_from_elsewhere_is_measured_again(
    there: str, why: str, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = figures.measure(["10a"], tmp_path) / "bench_10a_0.json"
    path.write_text(there)
    capsys.readouterr()
    figures.measure(["10a"], tmp_path)
    assert len(bench.commands) == 2 and path.read_text() == lines()
    said = capsys.readouterr().err
    assert why in said and said.startswith("measuring (") and said.count("\n") == 1


def test_another_card_or_code_measures_into_a_folder_of_its_own(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = figures.measure(["10a"], tmp_path)
    other = {**HERE, "neo_lite": "0.2"}
    monkeypatch.setattr(machine, "stamp", lambda partition=None: other)
    bench.stdout = lines(stamp=other)
    assert figures.measure(["10a"], tmp_path) != first and len(bench.commands) == 2
    assert (first / "bench_10a_0.json").read_text() == lines(), "hours of another machine are kept"


@pytest.mark.parametrize("failure", ["exit", "output", "interrupt"])
def test_a_measurement_that_fails_leaves_nothing_that_counts(failure: str, bench: Bench, tmp_path: Path):
    bench.returncode = int(failure == "exit")
    bench.stdout = lines()[:40] if failure == "output" else lines()
    bench.interrupted = failure == "interrupt"
    with pytest.raises(
        KeyboardInterrupt if bench.interrupted else NeoLiteError, match=r"^$|figure 10a could not be measured"
    ):
        figures.measure(["10a"], tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_figures_that_measure_nothing_say_so(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    figures.measure(["7", "9a"], tmp_path)
    assert capsys.readouterr().err == "nothing to measure for 7, 9a: only 10a run here\n" and not bench.commands


def test_every_measurement_is_in_half_precision_and_has_its_baseline():
    for options in (options for some in figures.MEASURES.values() for options in some):
        asked = figures.options_of(options)
        assert asked["dtype"] == "float16", "a card of capability 8 would take bfloat16"
        assert asked["mode"].split(",")[0] in (VLLM, sweep.SWIFT) and asked["mode"].endswith(",neo")
