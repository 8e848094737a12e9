"""The benchmark: what it reports, and how it refuses a part of a GPU that is none."""

from __future__ import annotations

import json
import types

import pytest
import torch

from neo_lite import bench
from neo_lite.__main__ import main
from neo_lite.config import NeoLiteError

SMALL = ["bench", "--model", "random:tiny", "--device", "cpu", "--requests", "6", "--workload", "synthetic:40,10",
         "--gpu-kv-tokens", "200", "--cpu-kv-gib", "0.001", "--max-batched-tokens", "128"]  # fmt: skip


@pytest.mark.parametrize("mode", ["gpu-only", "asymmetric"])
def test_json_says_how_fast_and_on_what(mode, compiler, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    assert main([*SMALL, "--mode", mode, "--json", "--trace", str(trace)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] == 6 and result["requests_per_s"] > 0 and result["tpot_p50_s"] > 0
    assert "threads" in result["ran_on"] and result["stamp"]["cpu"]
    assert 0 < result["recorded_iterations"] < sum(result["iterations"].values())
    assert set(result["iteration_s"]) | set(result["recorded_iteration_s"]) == set(result["iterations"])
    assert 0 < result["busy_fractions"]["gpu"] <= 1
    assert {e["name"] for e in json.loads(trace.read_text())["traceEvents"]} >= {"pre", "post", "plan"}


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
