"""The kernel benchmark: what it prints, and that it notices an impossible figure. No speed is asserted."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from neo_lite import kernel_bench
from neo_lite.__main__ import add_kernel_bench_arguments
from neo_lite.config import ModelConfig, NeoLiteError
from neo_lite.quality import TEXT

SMALL = ModelConfig("small", 2, 64, 6, 2, 64, 128, 256)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes: one short case, small buffers, a small model under the name of a large one."""
    monkeypatch.setattr(kernel_bench, "CASES", ((3, 50),))
    monkeypatch.setattr(kernel_bench, "SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr(kernel_bench, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(kernel_bench, "MODELS", {"smollm2": SMALL})


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_kernel_bench_arguments(parser)
    return parser.parse_args(["--shape", "smollm2", "--threads", "1", "--rounds", "2", *words])


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_json_has_every_rung_with_its_share_and_error(small: None, dtype: str, capsys: pytest.CaptureFixture) -> None:
    kernel_bench.main(arguments("--json", "--dtype", dtype))  # on buffers that a cache holds, a share may be anything
    result = json.loads(capsys.readouterr().out)
    assert result["threads"] == 1 and result["read_gbps"] > 0 and result["stamp"]
    assert {row["name"] for row in result["kernels"]} == {"scalar", "openmp", "simd", "flash", "torch sdpa"}
    for row in result["kernels"]:
        assert row["gbps"] > 0 and row["fraction"] > 0 and row["max_rel_err"] < 2e-3


def test_a_share_above_the_roofline_fails(small: None, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    row = dict(name="flash", case="3 x 50", gbps=11.0, read_gbps=10.0, tokens_per_s=1.0, max_rel_err=0.0)
    for fraction, status in ((1.1, 1), (1.01, 0)):
        monkeypatch.setattr(kernel_bench, "bench_case", lambda *_, f=fraction: [row | dict(fraction=f)])
        assert kernel_bench.main(arguments()) == status
    assert "flash (3 x 50)" in capsys.readouterr().err


@pytest.mark.slow
def test_what_int8_costs_is_printed_beside_its_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    row = dict(name="flash", case="3 x 50", gbps=11.0, fraction=0.9, tokens_per_s=1.0, max_rel_err=0.0, read_gbps=12.0)
    monkeypatch.setattr(kernel_bench, "bench_case", lambda *_: [row])
    monkeypatch.setattr("neo_lite.quality.TEXT", TEXT[:200])
    assert kernel_bench.main(arguments("--dtype", "int8", "--quality")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    exact, rounded = (float(last.split(word)[1].split()[0].rstrip(",")) for word in ("instead of", "perplexity"))
    assert (
        last.startswith("int8 on smollm2") and 5 < exact < 100 and exact != rounded and abs(rounded / exact - 1) < 0.02
    )


def test_layers_are_more_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr(kernel_bench, "last_level_cache_bytes", lambda: 1 << 20)
    pool = kernel_bench.Pool(SMALL, 2, 100, "float16")
    assert pool.kv.nbytes >= 4 << 20
    assert torch.equal(pool.table.flatten().sort().values, torch.arange(14, dtype=torch.int32))


def test_bad_numbers_are_named() -> None:
    with pytest.raises(NeoLiteError, match="--threads -1"):
        kernel_bench.main(arguments("--threads", "-1"))
