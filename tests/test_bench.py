"""The benchmark: what it reports, and how it refuses a part of a GPU that is none."""

from __future__ import annotations

import json
import re
import sys
import time
import types

import pytest
import torch
from conftest import ROOT

from neo_lite import bench
from neo_lite.__main__ import main
from neo_lite.api import build_engine, load_model
from neo_lite.config import NeoLiteError
from neo_lite.workload import parse

sys.path.insert(0, str(ROOT / "benchmarks"))
import soak

SMALL = ["bench", "--model", "random:tiny", "--device", "cpu", "--requests", "6", "--workload", "synthetic:40,10",
         "--gpu-kv-tokens", "200", "--cpu-kv-gib", "0.001", "--max-batched-tokens", "128"]  # fmt: skip


@pytest.mark.parametrize("mode", ["gpu-only", "asymmetric"])
def test_json_says_how_fast_and_on_what(mode, compiler, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    assert main([*SMALL, "--mode", mode, "--json", "--trace", str(trace)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] == 6 and result["requests_per_s"] > 0 and result["tpot_p50_s"] > 0
    assert "requests_per_s_30_70" not in result, "too few requests for figure 10a's window"
    assert "threads" in result["ran_on"] and result["stamp"]["cpu"]
    assert 0 < result["recorded_iterations"] < sum(result["iterations"].values())
    assert set(result["iteration_s"]) | set(result["recorded_iteration_s"]) == set(result["iterations"])
    assert 0 < result["busy_fractions"]["gpu"] <= 1
    assert {e["name"] for e in json.loads(trace.read_text())["traceEvents"]} >= {"pre", "post", "plan"}


def test_requests_come_at_their_times_and_their_latency_counts_from_then():
    arrivals = parse("synthetic:20,4", 12, rate_per_s=20.0)
    engine = build_engine(load_model("random:tiny", "cpu", "float32"), gpu_kv_tokens=512, cpu_kv_tokens=512)
    before_s = time.perf_counter()
    run = bench.serve(engine, arrivals, 0)
    start_s = run.requests[0].arrival_s - arrivals[0].time_s
    assert [r.arrival_s - start_s for r in run.requests] == pytest.approx([a.time_s for a in arrivals])
    assert start_s >= before_s and run.seconds > arrivals[-1].time_s
    assert all(r.token_times_s[0] > r.arrival_s and len(r.output) == a.output_tokens
               for r, a in zip(run.requests, arrivals))  # fmt: skip
    assert run.requests[0].token_times_s[0] < run.requests[-1].arrival_s, "the first one did not wait for the last"


def test_json_states_the_rate_and_figure_6s_latency(capsys):
    small = [word for word in SMALL if word not in ("--requests", "6")]
    assert main([*small, "--requests", "8", "--rate", "40", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rate_per_s"] == 40 and "--rate 40.0" in result["command"]
    last_s = parse("synthetic:40,10", 8, rate_per_s=40.0)[-1].time_s
    assert result["mean_per_token_latency_s"] > 0 and result["seconds"] > last_s > 0
    assert main([*SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rate_per_s"] is None
    assert main([*SMALL, "--rate", "0"]) == 1
    assert "rate is 0.0: give requests per second" in capsys.readouterr().err


def test_without_a_size_the_cpu_pool_is_what_the_load_can_use(capsys):
    small = SMALL[: SMALL.index("--cpu-kv-gib")]
    assert main([*small, "--mode", "simple", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    tokens = result["cpu_kv_gib"] * 2**30 / 512  # of the tiny model, in fp32
    assert 6 * 45 < tokens < 6 * 80 + 2100, "rounded up to a thousandth of a GiB"
    assert f"--cpu-kv-gib {result['cpu_kv_gib']}" in result["command"]


def test_what_people_read_has_few_digits_and_no_profile(capsys):
    assert main(SMALL) == 0
    said = capsys.readouterr().out
    assert "requests_per_s " in said and "stamp" not in said and "profile" not in said
    assert max(len(digits) for digits in re.findall(r"\d+\.(\d+)", said.split("ran_on")[1])) <= 7


@pytest.mark.parametrize("num_sms", [-8, 7, 133, 136])
def test_a_part_that_the_gpu_cannot_give_is_refused(num_sms, monkeypatch):
    h200 = types.SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    monkeypatch.setattr(torch.cuda, "green_contexts", None, raising=False)
    with pytest.raises(NeoLiteError, match=f"--num-sms {num_sms}: this GPU has 132 multiprocessors, in steps of 8"):
        bench.partition(num_sms)


def test_without_a_gpu_no_part_of_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NeoLiteError, match="--num-sms 8 needs a CUDA GPU"):
        bench.partition(8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asymmetric", "gpu-only"])
def test_seconds_of_random_arrivals_and_cancellations_leave_nothing_behind(mode, compiler):
    model = load_model("random:tiny", "cpu", "float32")
    result = soak.soak(build_engine(model, mode=mode, block_size=8, gpu_kv_tokens=480, cpu_kv_tokens=1600), seconds=2.5)
    assert soak.wrong(result) == []
    assert result["requests"] > 20 and result["ends"]["cancelled"] > 0 and result["swaps"] > 0


def test_the_soak_sees_what_is_wrong():
    sound = dict(ends={"length": 3, "cancelled": 1}, cut_short=0, left_in_queues=0, blocks_leaked={"gpu": 0, "cpu": 0},
                 growth_bytes={"host": 1 << 20})  # fmt: skip
    assert soak.wrong(sound) == []
    faults = soak.wrong(
        {**sound, "ends": {"failed": 1}, "blocks_leaked": {"gpu": 2, "cpu": 0}, "growth_bytes": {"gpu": 1 << 30}}
    )
    assert len(faults) == 3 and "failed" in faults[0] and "2 gpu blocks" in faults[1] and "gpu grew" in faults[2]


def test_a_prompt_beyond_the_context_is_refused_before_it_is_made(capsys):
    assert main(["bench", "--model", "random:tiny", "--device", "cpu", "--workload", "synthetic:999999999,1"]) == 1
    assert "exceeds the model's 2048 positions" in capsys.readouterr().err
