"""Seeded, within bounds, Poisson or as recorded; fits as the files that they are fits of; a clear line for bad input."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from neo_lite import workload
from neo_lite.config import NeoLiteError
from neo_lite.workload import Arrival, clip, draw, load_trace, parse, random_prompt, source, synthetic

sys.path.insert(0, str(ROOT / "tools"))
import fit_workloads

DATA = Path(os.environ.get("NEO_LITE_DATA") or ROOT.parent / "shared" / "data")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture(autouse=True)
def no_data_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEO_LITE_DATA", raising=False)


@pytest.fixture
def real_files(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (DATA / "osc_lengths_llama2.json").is_file():
        pytest.skip("the real workload files are not here: name their folder with NEO_LITE_DATA")
    monkeypatch.setenv("NEO_LITE_DATA", str(DATA))


def gaps(arrivals: list[Arrival]) -> np.ndarray:
    return np.diff([a.time_s for a in arrivals])


def variation(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


def figures(lengths: np.ndarray) -> list[float]:
    """p10, p50, p90, p99 and the mean."""
    return [*np.percentile(lengths, [10, 50, 90, 99]), lengths.mean()]


def rank_correlation(trace: workload.Trace) -> float:
    """Spearman's; ties share their mean rank."""
    ranks = []
    for column in (trace.prompt_tokens, trace.output_tokens):
        _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(*ranks)[0, 1])


# Synthetic


def test_lengths_arrivals_and_seed():
    a = synthetic(2000, 1000, 200, rate_per_s=4.0, seed=3)
    assert a == synthetic(2000, 1000, 200, rate_per_s=4.0, seed=3) != synthetic(2000, 1000, 200, rate_per_s=4.0, seed=4)
    assert {900, 1100} == {min(x.prompt_tokens for x in a), max(x.prompt_tokens for x in a)}
    assert {180, 220} == {min(x.output_tokens for x in a), max(x.output_tokens for x in a)}
    assert gaps(a).mean() == pytest.approx(0.25, rel=0.1) and variation(gaps(a)) == pytest.approx(1.0, rel=0.1)
    assert parse("synthetic:1000,200", 2000, 4.0, seed=3) == a


def test_all_at_once_by_default():
    assert {x.time_s for x in synthetic(5, 10, 10)} == {0.0}
    assert {x.time_s for name in workload.NAMES for x in parse(name, 5)} == {0.0}


def test_tiny_lengths_stay_positive():
    assert all(x.prompt_tokens >= 1 and x.output_tokens >= 1 for x in synthetic(50, 1, 1, spread=0.9))


def test_prompts_are_of_the_length_and_in_the_vocabulary():
    prompt = random_prompt(synthetic(1, 40, 1)[0], vocab_size=50, seed=1)
    assert prompt == random_prompt(synthetic(1, 40, 1)[0], vocab_size=50, seed=1)
    assert min(prompt) >= 3 and max(prompt) < 50


# Fits against the real files


@pytest.mark.parametrize("name", workload.NAMES)
def test_fit_has_the_quantiles_means_and_rank_correlation_of_the_file(name: str, real_files: None) -> None:
    real, drawn = load_trace(name), draw(name, 200_000, seed=1)
    for column in ("prompt_tokens", "output_tokens"):
        assert figures(getattr(drawn, column)) == pytest.approx(figures(getattr(real, column)), rel=0.05), column
    assert rank_correlation(drawn) == pytest.approx(rank_correlation(real), abs=0.02)


@pytest.mark.parametrize("name", workload.NAMES)
def test_fit_has_the_outputs_of_short_and_of_long_prompts(name: str, real_files: None) -> None:
    """A joint fit, not two: the rank correlations are small (0.11, -0.02, 0.07) and would not tell."""
    real, drawn = load_trace(name), draw(name, 200_000, seed=2)
    quartiles = [0, *np.percentile(real.prompt_tokens, [25, 50, 75]), math.inf]
    for low, high in zip(quartiles, quartiles[1:]):
        means = [t.output_tokens[(low < t.prompt_tokens) & (t.prompt_tokens <= high)].mean() for t in (drawn, real)]
        assert means[0] == pytest.approx(means[1], rel=0.05), (low, high)


@pytest.mark.parametrize(("name", "per_s"), [("azure-code", 2.567), ("azure-conv", 5.53)])
def test_fit_has_the_bursts_of_the_file(name: str, per_s: float, real_files: None) -> None:
    """The coefficient of variation of gaps is 13.2 for code, 1.09 for conversation (a Poisson process has 1)."""
    count = len(load_trace(name).prompt_tokens)
    recorded = gaps(parse(f"{name}@trace", count))
    assert 1 / recorded.mean() == pytest.approx(per_s, rel=0.001)
    for seed in range(3):
        drawn = np.diff(draw(name, count, seed).times_s)
        assert 1 / drawn.mean() == pytest.approx(per_s, rel=0.05)
        assert variation(drawn) == pytest.approx(variation(recorded), rel=0.1)


@pytest.mark.parametrize("name", workload.NAMES)
def test_committed_fit_is_what_the_tool_makes_of_the_file(name: str, real_files: None) -> None:
    committed = workload.read_fit(name)
    made = fit_workloads.fit(load_trace(name))
    assert {key: committed[key] for key in made} == made
    assert {"source", "file", "url", "sha256", "licence", "cite"} == committed.keys() - made.keys() - {"made_by"}


PUBLISHED = {  # p50, p99, mean and longest of prompts and outputs
    "osc": ((371, 555, 372.5, 589), (45, 65, 45.3, 129)),
    "azure-code": ((1469, 7436, 2047.8, 7437), (13, 251.5, 27.9, 1899)),
    "azure-conv": ((1020, 4142, 1154.7, 14050), (129, 601, 211.1, 1000)),
}


@pytest.mark.parametrize("name", workload.NAMES)
def test_fit_has_the_known_figures_where_no_file_is(name: str) -> None:
    drawn = draw(name, 200_000, seed=3)
    for lengths, (p50, p99, mean, longest) in zip((drawn.prompt_tokens, drawn.output_tokens), PUBLISHED[name]):
        assert [*np.percentile(lengths, [50, 99]), lengths.mean()] == pytest.approx([p50, p99, mean], rel=0.05)
        assert lengths.min() >= 1 and longest * 0.8 <= lengths.max() <= longest


# Real files


def test_osc_comes_in_the_order_of_the_file(real_files: None) -> None:
    rows = json.loads((DATA / "osc_lengths_llama2.json").read_text())
    arrivals = parse("osc", 100, rate_per_s=2.0, seed=7)
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [
        (r["prompt"], r["max_tokens"]) for r in rows[:100]
    ]
    others = parse("osc", 100, rate_per_s=2.0, seed=8)  # another seed: the same requests at other times
    assert all(a.prompt_tokens == b.prompt_tokens and a.time_s != b.time_s for a, b in zip(arrivals, others))
    assert source("osc") == "file osc_lengths_llama2.json (sha256 c0fe6ab5da72)"
    with pytest.raises(NeoLiteError, match=r"2001 requests asked, file osc_.* has 2000: ask for fewer"):
        parse("osc", 2001)


def test_recorded_arrivals_are_the_files_and_stretch_to_a_rate(real_files: None) -> None:
    arrivals = parse("azure-code@trace", 3)
    assert [a.time_s for a in arrivals] == pytest.approx([0.0, 0.052, 0.098189], abs=1e-6)
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [(4808, 10), (3180, 8), (110, 27)]
    native, slow = parse("azure-code@trace", 8819), parse("azure-code@trace", 8819, rate_per_s=0.5)
    assert gaps(slow).mean() == pytest.approx(2.0) and variation(gaps(slow)) == pytest.approx(variation(gaps(native)))


def test_source_says_fit_or_file(tmp_path: Path) -> None:
    assert source("osc").startswith("fit of OSC") and "Apache-2.0" in source("osc")
    assert source("azure-code@trace") == source("azure-code") and "CC-BY-4.0" in source("azure-conv")
    assert source("synthetic:30,20") == "synthetic: 30 and 20 tokens, uniform within 10%"
    file = tmp_path / "my.csv"
    file.write_text(HEADER + "0,1,1\n")
    assert source(f"trace:{file}") == f"file my.csv (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"


# Properties


@given(
    name=st.sampled_from(["synthetic:300,40", *workload.NAMES, "azure-code@trace", "azure-conv@trace"]),
    count=st.integers(1, 300), rate=st.floats(1e-6, 1e6) | st.just(math.inf), seed=st.integers(0, 2**63),
)  # fmt: skip
def test_arrivals_are_seeded_ordered_and_positive(name: str, count: int, rate: float, seed: int) -> None:
    arrivals = parse(name, count, rate, seed)
    times = [a.time_s for a in arrivals]
    assert arrivals == parse(name, count, rate, seed)
    assert len(arrivals) == count and times == sorted(times) and 0 <= times[0] <= times[-1] < math.inf
    assert all(type(n) is int and n >= 1 for a in arrivals for n in (a.prompt_tokens, a.output_tokens))
    assert [a.prompt_tokens for a in arrivals] == [a.prompt_tokens for a in parse(name, count, 3.0, seed)]
    if name.endswith("@trace") and count > 1 and rate < math.inf:
        assert times[-1] == pytest.approx((count - 1) / rate)


TOKENS = st.integers(1, 2**31 - 1)
ROWS = st.lists(st.tuples(st.integers(0, 2**31).map(lambda ms: ms / 1000), TOKENS, TOKENS), min_size=1, max_size=30)


@given(rows=ROWS.map(sorted), end=st.sampled_from(["\n", "\r\n"]), mark=st.sampled_from(["", "\ufeff"]))
def test_a_users_file_comes_back_as_it_was_written(
    rows: list[tuple[float, int, int]], end: str, mark: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("traces") / "a@b, c.csv"
    lines = [f'{prompt},x,"{output}", {time_s}' for time_s, prompt, output in rows]
    text = mark + end.join(["ContextTokens,Note,GeneratedTokens,TIMESTAMP", *lines, ""])
    file.write_bytes(text.encode())
    arrivals = parse(f"trace:{file}@trace", len(rows))
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [row[1:] for row in rows]
    assert [a.time_s for a in arrivals] == pytest.approx([row[0] - rows[0][0] for row in rows], abs=1e-6)
    assert len(parse(f"trace:{file}", 1, rate_per_s=2.0)) == 1


@given(body=st.binary(max_size=60) | st.text("0123456789,.-: \n\r\"'eEnaifx\0", max_size=60).map(str.encode))
def test_any_file_gives_arrivals_or_one_line(body: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("traces") / "trace.csv"
    file.write_bytes(HEADER.encode() + body)
    try:
        assert len(parse(f"trace:{file}@trace", 1, rate_per_s=2.0)) == 1
    except NeoLiteError as error:
        assert len(str(error).splitlines()) == 1 and "trace.csv" in str(error)


def test_times_of_day_have_any_number_of_decimals(tmp_path: Path) -> None:
    stamps = [
        "2023-11-16 23:59:59.9799600",
        "2023-11-17T00:00:00",
        "2023-11-17 00:00:00.5Z",
        "2023-11-17 00:00:01.25+00:00",
    ]
    file = tmp_path / "trace.csv"
    file.write_text(HEADER + "".join(f"{stamp},1,1\n" for stamp in stamps))
    times = [a.time_s for a in parse(f"trace:{file}@trace", 4)]
    assert times == pytest.approx([0, 0.02004, 0.52004, 1.27004], abs=1e-6)


def test_only_the_lines_that_are_asked_for_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(HEADER + "0,5,6\n\n1,7,8\nbroken\n")
    assert parse(f"trace:{file}@trace", 2) == [Arrival(0.0, 5, 6), Arrival(1.0, 7, 8)]


def test_clip_drops_and_counts_what_exceeds_the_context() -> None:
    fits, exact, longer = Arrival(0.0, 10, 10), Arrival(1.0, 60, 40), Arrival(2.0, 60, 41)
    assert clip([fits, longer, exact], 100) == ([fits, exact], 1)
    kept, dropped = clip(parse("azure-code", 5000), 4096)
    assert len(kept) + dropped == 5000 and dropped / 5000 == pytest.approx(1257 / 8819, rel=0.1)
    with pytest.raises(NeoLiteError, match="none of 1 requests fits 100 positions: choose a longer context"):
        clip([longer], 100)


# Bad input


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, -math.inf, 1e-300])
def test_rate_is_refused(rate: float) -> None:
    for name in ("synthetic:10,10", "osc", "azure-code@trace"):
        with pytest.raises(NeoLiteError, match=r"rate is \S+: give requests per second from 1e-06 on, or inf"):
            parse(name, 5, rate)


@pytest.mark.parametrize("count", [0, -3, 10**12, 2.5, True])
def test_count_is_refused(count: int) -> None:
    for make in (lambda: parse("osc", count), lambda: synthetic(count, 10, 10)):
        with pytest.raises(NeoLiteError, match=r"count is \S+: give a whole number of requests from 1 to 10000000"):
            make()


def test_a_workload_of_no_tokens_and_a_seed_below_0_are_refused() -> None:
    with pytest.raises(NeoLiteError, match="output_tokens is 0: a workload needs at least 1"):
        parse("synthetic:10,0", 5)
    with pytest.raises(NeoLiteError, match="seed is -1: give a whole number from 0 on"):
        parse("osc", 5, seed=-1)


@pytest.mark.parametrize(
    "text", ["", "OSC", "osc@", "osc@trace@trace", "@trace", "azure", "synthetic:²,1", "synthetic:5", "../x"]
)
def test_unknown_workload_lists_what_there_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("", str(ROOT)):
        monkeypatch.setenv("NEO_LITE_DATA", folder)
        with pytest.raises(
            NeoLiteError, match=r"is unknown: choose synthetic:.*, osc, azure-code, azure-conv or trace:"
        ):
            parse(text, 5)


@pytest.mark.parametrize("text", ["osc@trace", "synthetic:10,10@trace"])
def test_recorded_arrivals_of_what_has_none_are_refused(text: str) -> None:
    with pytest.raises(NeoLiteError, match="has no recorded arrivals: leave @trace out"):
        parse(text, 5)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("0,1,1\n1,none,1\n", "line 3, holds '1,none,1': write TIMESTAMP, ContextTokens, GeneratedTokens, times in order"),
        ("0,1,1\n\n2,1\n", "line 4, holds '2,1': write"), ("0,1,1,1\n", "line 2, holds '0,1,1,1'"),
        ("0,0,1\n", "line 2, holds '0,0,1'"), ("0,1,-5\n", "line 2, holds '0,1,-5'"), ("0,1,1.5\n", "holds '0,1,1.5'"),
        (f"0,1,{10**30}\n", "line 2, holds '0,1,10000"), ("nan,1,1\n", "line 2"),
        ("-inf,1,1\n", "line 2"), ("0,1,1\ninf,1,1\n", "line 3"),
        ("5,1,1\n4,1,1\n", "line 3, holds '4,1,1'"), ("2023-13-16 10:00:00,1,1\n", "line 2, holds '2023-13-16"),
        ("yesterday,1,1\n", "line 2, holds 'yesterday,1,1'"), ("0,1,1\n", r"2 requests asked, file .* has 1"),
        ("", r"2 requests asked, file .* has 0"), ("7,1,1\n7,1,1\n", "2 requests of the trace arrive at one time"),
    ],
)  # fmt: skip
def test_malformed_trace_names_the_line_and_what_it_holds(body: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(HEADER + body)
    with pytest.raises(NeoLiteError, match=complaint) as error:
        parse(f"trace:{file}@trace", 2, rate_per_s=1.0)
    assert str(file) in str(error.value) or "trace" in complaint or "file" in complaint


def test_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    for name in ("empty.csv", "other.csv", "list.json"):
        with pytest.raises(NeoLiteError, match="line 1, holds '.*': name the columns TIMESTAMP,"):
            parse(f"trace:{tmp_path / name}", 2)
    for name in ("picture.csv", "absent.csv", ".", "nul\0.csv"):
        with pytest.raises(NeoLiteError, match=r"cannot be read \(.*\): name a CSV file"):
            parse(f"trace:{tmp_path}/{name}", 2)


def test_data_folder_without_the_file_or_with_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEO_LITE_DATA", str(tmp_path))
    with pytest.raises(
        NeoLiteError, match=r"azure_code_2023.csv cannot be read .*download=True\), or unset NEO_LITE_DATA"
    ):
        parse("azure-code", 5)
    (tmp_path / "azure_code_2023.csv").write_text(HEADER + "0,1,1\n")
    with pytest.raises(
        NeoLiteError, match=r"azure_code_2023.csv has sha256 \w{12}, not 54e9a6d2a4bd: download it again"
    ):
        parse("azure-code", 1)


# Download


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands at azure-code's address, as far as the loader can tell; and a cache of one's own."""
    file, sound = tmp_path / "public.csv", HEADER + "0,11,12\n0.5,21,22\n"
    file.write_text(sound)
    fit = workload.read_fit("azure-code") | {"url": file.as_uri(), "sha256": hashlib.sha256(sound.encode()).hexdigest()}
    monkeypatch.setattr(workload, "read_fit", lambda name: fit)
    monkeypatch.setenv("NEO_LITE_CACHE", str(tmp_path / "cache"))
    return file


def test_download_is_checked_and_kept(address: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = load_trace("azure-code", download=True)
    expected = [Arrival(0.0, 11, 12), Arrival(0.5, 21, 22)]
    assert trace.arrivals(2, recorded=True) == expected and trace.source.startswith("file azure_code_2023.csv (sha256")
    kept = tmp_path / "cache" / "workloads" / "azure_code_2023.csv"
    address.unlink()
    assert load_trace("azure-code", download=True).arrivals(2, recorded=True) == expected
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert parse("azure-code", 2) != expected  # still drawn: what a command gives never depends on the cache
    monkeypatch.setenv("NEO_LITE_DATA", str(kept.parent))
    assert parse("azure-code@trace", 2) == expected


def test_download_replaces_a_broken_file_in_the_cache(address: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "workloads" / "azure_code_2023.csv"
    kept.parent.mkdir(parents=True)
    kept.write_text(HEADER)
    with pytest.raises(NeoLiteError, match="sha256"):
        load_trace("azure-code")
    assert len(load_trace("azure-code", download=True).prompt_tokens) == 2


def test_download_of_another_file_is_refused_and_not_kept(address: Path, tmp_path: Path) -> None:
    address.write_text(HEADER + "0,1,1\n")
    with pytest.raises(
        NeoLiteError, match=r"could not be fetched to .*its sha256 is \w{12}, not \w{12}\): .*or use the fit"
    ):
        load_trace("azure-code", download=True)
    assert not (tmp_path / "cache").exists()


def test_no_network_and_no_room_are_one_line_each(address: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(NeoLiteError, match=r"could not be fetched to .*workloads \(.*irectory.*\): get online"):
        load_trace("azure-code", download=True)
    workload.read_fit("azure-code")["url"] = "http://127.0.0.1:9/azure.csv"  # nothing listens there
    with pytest.raises(
        NeoLiteError, match=r"127.0.0.1:9.* could not be fetched .*refused.*: get online, set NEO_LITE_DATA"
    ):
        load_trace("azure-code", download=True)


def test_addresses_are_public_and_pinned_to_a_commit() -> None:
    for name in workload.NAMES:
        fit = workload.read_fit(name)
        assert fit["url"].startswith("https://raw.githubusercontent.com/") and len(fit["url"].split("/")[5]) == 40
        assert len(fit["sha256"]) == 64
