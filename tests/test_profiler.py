"""What is measured, how points are held out, and that a profile drives an engine, a simulation, and nothing else's."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from neo_lite import build_engine, load_model, profiler
from neo_lite.__main__ import main
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cost_model import Profile
from neo_lite.pipeline import Pipeline
from neo_lite.request import SamplingParams
from neo_lite.timeline import Timeline

SIZES = dict(block_size=16, gpu_kv_tokens=2048, cpu_kv_tokens=4096, max_batched_tokens=64)


@pytest.fixture(scope="module")
def model():
    return load_model("random:tiny", "cpu")


@pytest.fixture(scope="module")
def pipeline(model):
    return Pipeline(model, EngineConfig(**SIZES), Timeline())


@pytest.fixture(scope="module")
def profile(pipeline):
    return profiler.measure(pipeline, thorough=True)


# ---- Points ----


def test_every_second_point_is_held_out_and_the_largest_is_a_knot():
    assert profiler._between((1, 8, 32, 64), 64) == [1, 3, 8, 16, 32, 45, 64]
    assert profiler._between((1, 8, 32, 64), 40) == [1, 3, 8, 18, 40], "32 is too near 40"
    assert profiler._between((1, 8, 32, 64), 1) == [1]
    for most in range(1, 3000, 7):
        points = profiler._between(profiler.TOKENS, most)
        assert points == sorted(set(points)) and points[-1] == most and len(points) % 2 == 1


def test_points_take_turns_and_slow_ones_run_once(monkeypatch):
    now, calls = [0.0], list[int]()
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work_of(n: int):
        def work() -> float:
            calls.append(n)
            now[0] += 2 * profiler.POINT_S if n == 3 else 0.001
            return float(n * 10 + (calls.count(n) == 1) * 1000)  # the first run warms up

        return work

    assert profiler._points((1, 2, 3), work_of, 5) == [(1, 10.0), (2, 20.0), (3, 30.0)]
    assert calls == [1, 2, 3] * 2 + [1, 2] * 4


def test_what_falls_is_levelled_from_both_sides():
    assert profiler._rising([(1, 1.0), (2, 5.0), (3, 3.0), (4, 6.0)]) == [(1, 1.0), (2, 4.0), (3, 4.0), (4, 6.0)]


def test_the_held_out_error_is_that_of_interpolating():
    straight = [(n, 2.0 * n + 1) for n in (1, 3, 9, 20, 40)]
    bent = [(1, 10.0), (2, 30.0), (3, 20.0)]  # interpolated: 15 where 30 was measured
    errors = profiler.held_out({"straight": straight, "bent": bent})
    assert errors["straight"] == pytest.approx(0.0) and errors["bent"] == pytest.approx(0.5)
    assert errors["all"] == pytest.approx(0.0), "the median of 0, 0 and 0.5"


def test_a_requests_own_cost_is_told_from_that_of_its_kv(pipeline, monkeypatch):
    """100 us, 0.1 us a KV token and 5 us a request: 47.7 tokens a request, the curve's own requests reckoned in."""

    def cpu_decode(_, tokens: int, seq_len: int = profiler.SEQ_LEN):
        return lambda: 1e-4 + 1e-7 * tokens + 5e-6 * -(-tokens // seq_len)

    monkeypatch.setattr(profiler, "_cpu_decode", cpu_decode)
    made = profiler.measure(pipeline)
    assert "held_out" not in made.stamp, "an engine's own measurement is short"
    assert made.cpu_request_tokens == pytest.approx(5e-6 / (1e-7 + 5e-6 / profiler.SEQ_LEN), rel=0.05)
    for tokens, seq_len in ((2048, 1024), (4096, 1024), (4096, 64)):
        requests = tokens // seq_len
        assert made.t_cpu_attn(requests, tokens) == pytest.approx(cpu_decode(None, tokens, seq_len)(), rel=0.05)


# ---- A profile of this machine ----


def test_a_profile_says_what_it_is_of_and_covers_what_can_run(profile, model):
    assert (profile.model, profile.dtype, profile.num_layers) == ("tiny", "float32", 2)
    assert profile.threads >= 1 and profile.stamp["cpu"] and profile.stamp["gpu"] is None
    ends = {n: getattr(profile, n).points[-1][0] for n in ("linear", "prefill_attn", "gpu_attn", "head", "transfer")}
    kv_bytes = model.config.kv_bytes_per_token("float32")
    assert ends == {"linear": 64, "prefill_attn": 63, "gpu_attn": 2048, "head": 256, "transfer": 2048 * kv_bytes}
    assert profile.cpu_attn.points[-1][0] >= 4096
    assert {"linear", "cpu_attn", "transfer", "all"} <= set(profile.stamp["held_out"])
    assert profile.overhead_s >= 0 and profile.t_transfer(10**6) > 0 and profile.launch_s == 0


def test_it_is_for_this_machine_and_drives_an_engine_that_says_what_gpu_only_says(profile, model, tmp_path):
    profile.save(tmp_path / "tiny.json")
    costs = Profile.load(tmp_path / "tiny.json").check("tiny", "float32", profile.stamp, profile.threads)
    outputs = []
    for mode in ("gpu-only", "neo"):
        engine = build_engine(model, EngineConfig(mode=mode, gpu_kv_tokens=64, cpu_kv_tokens=512), costs=costs)
        requests = [engine.add([7 + i] * 20, SamplingParams(12, ignore_eos=True)) for i in range(4)]
        engine.run()
        outputs.append([r.output for r in requests])
        assert engine.costs is costs
    assert outputs[0] == outputs[1]


def test_measuring_leaves_the_timeline_as_it_was(pipeline, profile):
    assert pipeline.timeline.enabled and not pipeline.timeline.events


# ---- From a shell ----


def test_a_profile_is_measured_from_a_shell_and_simulated_with(tmp_path, capsys):
    path = str(tmp_path / "tiny.json")
    small = ["--gpu-kv-tokens", "2048", "--cpu-kv-tokens", "2048", "--max-batched-tokens", "32"]
    assert main(["profile", "--model", "random:tiny", "--device", "cpu", "--out", path, *small]) == 0
    said = capsys.readouterr().out
    assert "tiny in float32 on" in said and "median error at points held out" in said
    assert json.loads((tmp_path / "tiny.json").read_text())["model"] == "tiny"
    run = ["simulate", "--hardware", path, "--model", "tiny", "--dtype", "float32", "--workload", "synthetic:20,5"]
    assert main([*run, "--requests", "6", "--gpu-kv-tokens", "64", "--cpu-kv-gib", "0.01"]) == 0
    assert "cores of" in capsys.readouterr().out
    assert main([*run, "--model", "smollm2", "--gpu-kv-tokens", "64", "--cpu-kv-gib", "0.01"]) == 1
    assert "another model, tiny, not smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "no/such/folder/x.json"], "--out no/such/folder/x.json cannot be written"),
        (["--out", ""], "--out . cannot be written"),
        (["--out", "x.json", "--model", "random:nothing"], "random:nothing"),
        (["--out", "x.json", "--max-batched-tokens", "0"], "max_batched_tokens is 0"),
        (["--model", "random:tiny"], "--out"),
    ],
)
def test_a_mistake_gets_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_part_of_a_gpu_needs_a_gpu(capsys, tmp_path):
    assert main(["profile", "--num-sms", "8", "--out", str(tmp_path / "x.json")]) == 1
    assert "--num-sms 8 needs a CUDA GPU" in capsys.readouterr().err


def test_costs_of_something_else_are_refused_by_an_engine(profile, model):
    for other, said in (
        (replace(profile, model="smollm2"), "model, smollm2, not tiny"),
        (replace(profile, stamp={**profile.stamp, "cpu": "abacus"}), "machine, [0-9]+ cores of abacus, not"),
        (replace(profile, threads=999), "number of threads, 999, not"),
    ):
        with pytest.raises(NeoLiteError, match=f"^the profile is of another {said}"):
            build_engine(model, EngineConfig(mode="neo"), costs=other)
