"""Presets: no number without a source, the paper's GPU-only facts, impossible machines, the machine at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from conftest import ROOT

from neo_lite import hardware, metrics
from neo_lite.config import MODELS, EngineConfig, HardwareSpec, NeoLiteError
from neo_lite.hardware import HARDWARE
from neo_lite.simulator import simulate
from neo_lite.workload import parse

NUMBERS = [f.name for f in fields(HardwareSpec) if f.name not in ("name", "sources")]


def without_source(spec: HardwareSpec) -> list[str]:
    return [name for name in NUMBERS if len(spec.sources.get(name, "")) < 10]


@pytest.mark.parametrize("name", [*HARDWARE, pytest.param("here", marks=pytest.mark.slow)])
def test_every_number_has_a_source(name):
    assert without_source(hardware.find(name)) == []


def test_a_number_without_a_source_is_found():
    spec = HARDWARE["t4-colab"]
    bare = replace(spec, sources={k: v for k, v in spec.sources.items() if k != "link_bytes_per_s"})
    assert without_source(bare) == ["link_bytes_per_s"]


def test_the_file_of_presets_names_only_parts_that_exist_and_uses_all():
    file = json.loads((hardware.DATA_DIR / "hardware.json").read_text())
    used = {part for parts in file["presets"].values() for part in parts}
    assert used == set(file["parts"]) - {"common"} and set(file["presets"]) == set(HARDWARE)
    known = {key for part in file["parts"].values() for key in part}
    assert known == set(NUMBERS)
    wanted = (
        "t4-g4dn.4xlarge t4-colab a10g-g5.2xlarge a10g-g5.4xlarge a10g-g5.8xlarge a10g-g5.16xlarge h100 2xh100 h200"
    )
    assert set(wanted.split()) <= set(HARDWARE)
    assert {f"h200-{sms}sm-{t}t" for sms in (8, 16) for t in (4, 8, 14)} <= set(HARDWARE)


# ---- The paper's GPU-only facts ----


@pytest.mark.parametrize(
    ("name", "model", "budget", "tokens"),
    [("t4-g4dn.4xlarge", "llama-2-7b", 832, 864), ("a10g-g5.4xlarge", "llama-3.1-8b", 20480, 26400)],
)
def test_a_card_holds_the_kv_tokens_that_the_paper_had(name, model, budget, tokens):
    assert hardware.gpu_kv_tokens(HARDWARE[name], MODELS[model], "float16", budget) == pytest.approx(tokens, rel=0.04)


@pytest.mark.slow
def test_gpu_only_on_a_t4_meets_figure_6cs_vllm_curve():
    """0.08 and 0.14 s a token at 0.2 and 0.4 requests a second; saturated a little above 0.5."""
    model, costs, config = hardware.setting("t4-g4dn.4xlarge", "llama-2-7b", gpu_kv=864, max_batched_tokens=832)
    config = replace(config, mode="gpu-only")
    for rate, latency_s in ((0.2, 0.08), (0.4, 0.14)):
        run = simulate(model, costs, config, parse("osc", 2000, rate))
        assert metrics.mean_per_token_latency_s(run.requests) == pytest.approx(latency_s, rel=0.12)
    at_once = simulate(model, costs, config, parse("osc", 300))
    assert 0.5 < metrics.request_throughput(at_once.requests) < 0.55


# ---- What cannot be ----


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), None])
def test_an_impossible_machine_is_refused(value):
    with pytest.raises(NeoLiteError, match="^t4-colab: cpu_bytes_per_s is .*: give a number above 0$"):
        replace(HARDWARE["t4-colab"], cpu_bytes_per_s=value)


def test_a_model_larger_than_the_card_is_refused_with_both_sizes():
    spec, model = HARDWARE["t4-colab"], MODELS["llama-3.1-8b"]
    with pytest.raises(NeoLiteError, match="^t4-colab holds 14.8 GiB and llama-3.1-8b in float16 needs 15.0 GiB"):
        hardware.gpu_kv_tokens(spec, model, "float16", 2048)
    assert hardware.gpu_kv_tokens(HARDWARE["2xh100"], MODELS["llama-3.1-70b"], "float16", 8192) > 20_000
    with pytest.raises(NeoLiteError, match="^h100 holds 79.6 GiB and llama-3.1-70b"):
        hardware.gpu_kv_tokens(HARDWARE["h100"], MODELS["llama-3.1-70b"], "float16", 8192)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(NeoLiteError) as error:
        hardware.find("a100")
    assert all(name in str(error.value) for name in ("'a100'", "here", *HARDWARE))


# ---- Profiles, settings ----


def test_a_shipped_profile_is_taken_before_a_roofline():
    model = MODELS["llama-3.1-8b"]
    for path in hardware.DATA_DIR.glob("profiles/*.json"):
        machine, shape, dtype = path.stem.split("_")
        costs = hardware.costs_of(HARDWARE[machine], MODELS[shape], dtype)
        assert costs.stamp["gpu"]["name"] and costs.threads == HARDWARE[machine].cpu_threads
        assert costs.check(shape, dtype).num_layers == MODELS[shape].num_layers
    assert "hardware" not in hardware.costs_of(HARDWARE["h200-8sm-14t"], model).stamp
    assert "hardware" in hardware.costs_of(HARDWARE["h200-8sm-14t"], model, "bfloat16").stamp


@pytest.mark.parametrize("threads", [4, 8, 14])
def test_the_roofline_of_8_sms_is_near_what_was_measured_there(threads):
    model, spec = MODELS["llama-3.1-8b"], HARDWARE[f"h200-8sm-{threads}t"]
    measured, computed = hardware.costs_of(spec, model), hardware.roofline(spec, model)
    for tokens in (1, 32, 96, 128, 512, 1024, 2048):
        assert computed.t_linear(tokens) == pytest.approx(measured.t_linear(tokens), rel=0.07)
    for tokens in (16384, 25600):
        assert computed.t_gpu_attn(tokens) == pytest.approx(measured.t_gpu_attn(tokens), rel=0.06)
    for tokens in (33290, 66580, 97068, 141484):
        assert computed.t_cpu_attn(tokens / 1024, tokens) == pytest.approx(
            measured.t_cpu_attn(tokens / 1024, tokens), rel=0.08
        )
    assert computed.t_transfer(2e9) == pytest.approx(measured.t_transfer(2e9), rel=0.05)


def test_settings_come_from_names():
    model, costs, config = hardware.setting("h200-8sm-8t", "random:llama-3.1-8b", mode="simple", max_seqs=7)
    assert model is MODELS["llama-3.1-8b"] and costs.threads == 8
    assert config == EngineConfig(
        mode="simple", max_seqs=7, gpu_kv_tokens=hardware.gpu_kv_tokens(HARDWARE["h200-8sm-8t"], model, "float16", 2048),
        cpu_kv_tokens=int(HARDWARE["h200-8sm-8t"].cpu_memory_bytes / 2 / 131072),
    )  # fmt: skip


@pytest.mark.slow
def test_the_machine_at_hand_is_measured_without_torch_too():
    code = (
        "import sys; sys.modules.update(torch=None); from neo_lite import hardware; spec = hardware.find('here');"
        "print(spec.cpu_bytes_per_s, spec.gpu_flops_per_s, spec.cpu_threads)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, flops, threads = map(float, done.stdout.split())
    assert 1e8 < read < 1e12 and 1e8 < flops < 1e14 and threads >= 1
