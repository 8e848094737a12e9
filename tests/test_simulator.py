"""The virtual clock: runs worked out by hand, drawings, what a run must keep, and the engine's recorded runs."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_lite import hardware, metrics
from neo_lite.__main__ import main, parser
from neo_lite.config import MODELS, MODES, EngineConfig, NeoLiteError
from neo_lite.cost_model import Curve, Profile
from neo_lite.simulator import overlapped, simulate
from neo_lite.sweep import lines_of
from neo_lite.workload import Arrival, parse

ROOT = Path(__file__).resolve().parent.parent
TINY = MODELS["tiny"]  # 2 layers, 256 bytes of KV a token in float16
# Seconds: a layer's linear stage n tokens, but never under 5; attention 0.1 a prompt token, 0.01 a KV token on the GPU and
# 0.05 on the CPU; head 0.5 a request; 1 ms a byte over the link; 0.25 once an iteration.
COSTS = Profile(
    2, [(1, 5.0), (5, 5.0), (100, 100.0)], [(1, 0.1), (100, 10.0)], [(1, 0.01), (1000, 10.0)], [(1, 0.05), (1000, 50.0)],
    [(1, 0.5), (10, 5.0)], transfer=[(1, 0.001), (10_000, 10.0)], overhead_s=0.25,
)  # fmt: skip


def shapes(plan) -> list[tuple[list[tuple[int, int, int]], ...]]:
    """Each sub-batch as prefills, GPU decodes, CPU decodes: (request, start, length)."""
    kinds = ("prefills", "gpu_decodes", "cpu_decodes")
    return [tuple([(w.request.id, w.start, w.length) for w in getattr(b, k)] for k in kinds) for b in plan.batches]


# ---- By hand ----


def test_gpu_only_by_hand():
    # r0: prompt 6, 2 tokens, at 0 s. r1: prompt 8, 1 token, at 3 s, that is amid the first iteration.
    # 1: 6 tokens: linear 6, prefill 0.6: layer 6.6, two of them 13.2, head 0.5, once 0.25: ends at 13.95.
    # 2: r0 decodes token 7, r1 prefills 8: linear 9, prefill 0.8, GPU attention 0.07: layer 9.87, two 19.74, head of two
    #    1.0, once 0.25: 20.99, ends at 34.94. Both are done.
    config = EngineConfig("gpu-only", gpu_kv_tokens=64)
    run = simulate(TINY, COSTS, config, [Arrival(0.0, 6, 2), Arrival(3.0, 8, 1)], keep_plans=True)
    assert [shapes(p) for p in run.plans] == [[([(0, 0, 6)], [], [])], [([(1, 0, 8)], [(0, 6, 1)], [])]]
    assert [i.end_s for i in run.iterations] == pytest.approx([13.95, 34.94])
    assert [r.token_times_s for r in run.requests] == [pytest.approx([13.95, 34.94]), pytest.approx([34.94])]
    assert metrics.per_token_latency_s(run.requests[1]) == pytest.approx(31.94), (
        "from its arrival, not from when it was seen"
    )
    assert run.busy_fractions == pytest.approx({"gpu": (13.2 + 0.5 + 19.74 + 1.0) / 34.94, "cpu": 0.0})


def test_simple_offloading_by_hand():
    # 1: 6 tokens, layer 6.6; their KV leaves: 6 x 256 bytes, 1.536 s, 0.768 a layer, hidden but for one layer's:
    #    13.2 + 0.768 + 0.5 + 0.25 = 14.718.
    # 2: linear 5, then the CPU reads 7 tokens, 0.35: nothing hides it: layer 5.35, two 10.7, + 0.75: ends at 26.168.
    run = simulate(TINY, COSTS, EngineConfig("simple", cpu_kv_tokens=64), [Arrival(0.0, 6, 2)], keep_plans=True)
    assert [shapes(p) for p in run.plans] == [[([(0, 0, 6)], [], [])], [([], [], [(0, 6, 1)])]]
    assert [i.end_s for i in run.iterations] == pytest.approx([14.718, 26.168])
    assert run.busy_fractions["cpu"] == pytest.approx(0.7 / 26.168)


def test_neo_by_hand():
    # The GPU pool has two blocks of 4: r0 (prompt 4, at most 6 tokens) fits, r1 (prompt 8, at most 10) goes to the CPU.
    # 1: both prefills; without r1 4 tokens would be left, under the floor of 5 (where linear leaves its 5 s): kept.
    #    Linear 12, prefill 0.4 + 0.8: layer 13.2, two 26.4; 8 x 256 bytes leave, 2.048 s, 1.024 a layer: 27.424; + 1.25.
    # 2: r0 reads 5 tokens on the GPU: alone 2 x 5.05 + 0.75 = 10.85 s, 0.0922 requests a second. With r1 as batch-1:
    #    linear 5 and 5, 9 tokens on the CPU take 0.45 <= 5: layer 10.05, 20.1 + 1.25 = 21.35 s, 0.0937: taken.
    # 3: the same, a token longer each: layer 10.06, 20.12 + 1.25 = 21.37.
    config = EngineConfig("neo", block_size=4, gpu_kv_tokens=8, cpu_kv_tokens=64)
    run = simulate(TINY, COSTS, config, [Arrival(0.0, 4, 3), Arrival(0.0, 8, 3)], keep_plans=True)
    assert [shapes(p) for p in run.plans] == [
        [([(0, 0, 4), (1, 0, 8)], [], [])],
        [([], [(0, 4, 1)], []), ([], [], [(1, 8, 1)])],
        [([], [(0, 5, 1)], []), ([], [], [(1, 9, 1)])],
    ]
    assert [i.end_s for i in run.iterations] == pytest.approx([28.674, 50.024, 71.394])
    assert [c.rate for c in run.plans[1].candidates] == pytest.approx([2 / 21.35, 1 / 10.85])
    assert run.kinds == {"one batch, with prefills": 1, "two batches, decodes only": 2}


def test_a_swap_takes_the_link_and_one_layer_beside_it():
    assert overlapped(10, layer_s=3.0, transfer_s=20.0) == 10 * 3.0 + 2.0
    assert overlapped(10, layer_s=3.0, transfer_s=40.0) == 10 * 4.0 + 3.0, "the link is slower: it sets the pace"
    assert overlapped(10, layer_s=3.0, transfer_s=0.0) == 30.0
    # gpu-only, five blocks of 4, two requests that grow from 8 to 11 tokens: r1 is parked (3 blocks) and comes back.
    config = EngineConfig("gpu-only", block_size=4, gpu_kv_tokens=20, cpu_kv_tokens=64)
    run = simulate(TINY, COSTS, config, [Arrival(0.0, 8, 4), Arrival(0.0, 8, 4)], keep_plans=True)
    assert sum(r.num_swaps for r in run.requests) == 2
    for plan, i in zip(run.plans, run.iterations):
        blocks = sum(len(m.source_blocks) for m in plan.moves)
        assert i.transfer_s == pytest.approx(blocks * 4 * 256 * 1e-3)
        assert i.end_s - i.start_s == pytest.approx(overlapped(2, i.layer_s, i.transfer_s) + i.head_s + 0.25)


def test_an_idle_clock_jumps_to_the_next_arrival():
    run = simulate(TINY, COSTS, EngineConfig("gpu-only"), [Arrival(100.0, 6, 1), Arrival(7.0, 6, 1)])
    assert [i.start_s for i in run.iterations] == [7.0, 100.0]
    assert [r.arrival_s for r in run.requests] == [7.0, 100.0], "in order of arrival"
    assert run.span_s == pytest.approx(93.0 + 6.6 * 2 + 0.75)


# ---- What holds for every run ----


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.tuples(st.floats(0, 50), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    gpu=st.integers(11, 30), budget=st.integers(8, 64),
)  # fmt: skip
def test_a_run_answers_everybody_and_never_turns_back_the_clock(mode, lengths, gpu, budget):
    config = EngineConfig(
        mode, block_size=4, gpu_kv_tokens=4 * gpu, cpu_kv_tokens=160, max_batched_tokens=budget, max_seqs=4
    )
    run = simulate(TINY, COSTS, config, [Arrival(*a) for a in lengths])
    assert sorted(len(r.output) for r in run.requests) == sorted(tokens for _, _, tokens in lengths)
    assert all(r.finish_reason == "length" and r.token_times_s[0] > r.arrival_s for r in run.requests)
    assert all(a.end_s <= b.start_s for a, b in zip(run.iterations, run.iterations[1:]))
    assert all(0 <= f <= 1 for f in run.busy_fractions.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_drawing_has_every_stage_in_its_iteration_and_no_two_on_one_lane(mode):
    config = EngineConfig(mode, block_size=4, gpu_kv_tokens=40, cpu_kv_tokens=160, max_batched_tokens=40)
    run = simulate(TINY, COSTS, config, [Arrival(0.0, n, 8) for n in (20, 9, 14, 17, 6, 11)])
    for n, i in enumerate(run.iterations):
        timeline = run.timeline(n, n + 1)
        assert i.start_s - 1e-9 <= timeline.span_s[0] and timeline.span_s[1] <= i.end_s + 1e-9
        cpu_s = 2 * (i.stages.ca0 + i.stages.ca1)
        assert sum(e.duration_s for e in timeline.events if e.lane == "gpu") == pytest.approx(
            2 * i.stages.gpu + i.head_s
        )
        assert sum(e.duration_s for e in timeline.events if e.lane == "cpu") == pytest.approx(cpu_s)
        for lane in timeline.lanes():
            events = sorted((e for e in timeline.events if e.lane == lane), key=lambda e: e.start_s)
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in zip(events, events[1:])), (lane, n)
    assert "<svg" in run.timeline().svg() and run.timeline(0, 2).chrome_trace()["traceEvents"]


def test_progress_counts_who_has_finished():
    seen: list[int] = []
    simulate(TINY, COSTS, EngineConfig(), [Arrival(0.0, 4, n) for n in (1, 2, 3)], progress=seen.append)
    assert seen == [1, 2, 3]


def test_nothing_to_do_and_nothing_that_fits_are_refused():
    with pytest.raises(NeoLiteError, match="workload is empty: give at least one"):
        simulate(TINY, COSTS, EngineConfig(), [])
    with pytest.raises(
        NeoLiteError, match=r"request 1 of the workload: .*2100 tokens plus max_tokens 5 .* 2048 positions"
    ):
        simulate(TINY, COSTS, EngineConfig(), [Arrival(0.0, 4, 1), Arrival(1.0, 2100, 5)])
    with pytest.raises(NeoLiteError, match=r"request 0 of the workload: .*may grow to 79 tokens.*raise gpu_kv_tokens"):
        simulate(TINY, COSTS, EngineConfig(gpu_kv_tokens=64), [Arrival(0.0, 70, 10)])


# ---- From a shell ----

SMALL = [
    "simulate",
    "--hardware",
    "a10g-g5.4xlarge",
    "--requests",
    "20",
    "--workload",
    "synthetic:300,30",
    "--seed",
    "3",
]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(capsys):
    outputs = []
    for seed in ("3", "3", "4"):
        assert main([*SMALL[:-1], seed, "--rate", "2", "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    row = json.loads(outputs[0])
    assert (
        row["source"] == "simulated" and row["stage_times"] == "roofline of a10g-g5.4xlarge" and row["requests"] == 20
    )
    assert row["command"].startswith("python -m neo_lite simulate --hardware a10g-g5.4xlarge --model llama-3.1-8b")
    assert main(parser_words(row["command"]) + ["--json"]) == 0
    assert capsys.readouterr().out == outputs[0], "the command it names gives it again"


def parser_words(command: str) -> list[str]:
    words = shlex.split(command)  # a setting of the environment may stand before them
    return words[words.index("neo_lite") + 1 :]


def test_a_trace_of_a_run_opens_in_perfetto(tmp_path, capsys):
    assert main([*SMALL, "--trace", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} >= {"gpu", "scheduler"}
    assert "requests_per_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--hardware", "t5"],
            "hardware 't5' is unknown: choose here, the file of a profile, or t4-g4dn.4xlarge, t4-colab",
        ),
        (["--policy", "neon"], "'neon' is unknown: choose one of gpu-only"),
        (["--workload", "sharegpt"], "workload 'sharegpt' is unknown: choose synthetic:PROMPT,OUTPUT"),
        (["--model", "gpt-2"], "model 'gpt-2' is unknown: choose one of tiny"),
        (["--model", "llama-3.1-70b"], "holds 22.5 GiB and llama-3.1-70b in float16 needs 131.4 GiB"),
        (["--dtype", "int8"], "dtype 'int8' is unknown: choose float16"),
        (["--rate", "0"], "rate is 0.0: give requests per second"),
        (["--requests", "0"], "count is 0"),
        (["--workload", "synthetic:999999999,5"], "exceeds the model's 131072 positions: shorten"),  # at once
        (["--workload", "synthetic:140000,5"], "exceeds the model's 131072 positions: shorten"),
        (["--gpu-kv-tokens", "64", "--policy", "gpu-only"], "raise gpu_kv_tokens"),
        (["--gpu-kv-tokens", "-5"], "gpu_kv_tokens is -5"),
        (["--cpu-kv-gib", "nan"], "cpu_kv_gib is nan"),
        (["--max-batched-tokens", "0"], "max_batched_tokens is 0"),
        (["--trace", "no/such/folder/x.json"], "x.json cannot be written: name a file in a folder that exists"),
        (["--hardware", "data/hardware.json"], "holds no profile"),
        (["--hardware", "PROFILE"], "says nothing of memory: give --gpu-kv-tokens and --cpu-kv-gib"),
        (
            ["--hardware", "PROFILE", "--model", "llama-2-7b"],
            "of another model, llama-3.1-8b, not llama-2-7b: measure one",
        ),
    ],
)
def test_a_mistake_gets_one_line(arguments, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    profile = "data/profiles/h200-8sm-14t_llama-3.1-8b_float16.json"
    assert main([*SMALL, *(profile if a == "PROFILE" else a for a in arguments)]) == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("neo_lite: ") and error.count("\n") == 1


def test_a_profiles_dtype_is_its_own_unless_another_is_asked_for(tmp_path, capsys):
    path, small = tmp_path / "p.json", ["--gpu-kv-tokens", "4096", "--cpu-kv-gib", "1", "--requests", "2", "--json"]
    replace(COSTS, model="tiny", dtype="float32").save(path)
    assert main(["simulate", "--hardware", str(path), "--model", "tiny", *small]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"
    assert main(["simulate", "--hardware", str(path), "--model", "tiny", "--dtype", "float16", *small]) == 1
    assert "of another dtype, float32, not float16" in capsys.readouterr().err
    assert main(["simulate", "--hardware", "h200", "--model", "tiny", *small]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float16"


# ---- Against what others found ----


LINEAR_MS = [  # tokens, ms of a layer: Llama-3.1-8B on 8 SMs of an H200, the released NEO's profiler
    (1, 0.5825), (25, 0.7372), (49, 0.8567), (73, 1.0694), (97, 1.2596), (121, 1.4481), (145, 1.6682),
    (193, 2.0734), (241, 2.5243), (289, 2.9694), (337, 3.3657), (385, 3.8811), (433, 4.1279), (481, 4.5233),
    (512, 4.576), (1024, 8.9982), (2048, 17.8926), (4096, 35.7748), (8192, 71.0669), (20480, 178.4932),
]  # fmt: skip
PREFILL_MS = [  # tokens of a prompt, ms
    (96, 0.0377), (256, 0.0857), (512, 0.202), (768, 0.3618), (1024, 0.5691), (1536, 1.1216), (2048, 1.8576),
    (4096, 6.6545), (8192, 25.1262),
]  # fmt: skip


@pytest.mark.slow
def test_neo_gains_what_an_independent_simulation_of_the_same_stage_times_found():
    """Stage times of 8 SMs of an H200 with a CPU of 100 GB/s, no head, copies or planning, 300 requests at once, 26,400
    tokens of GPU KV, whole run, outputs 100, 200, 400: 1.13, 1.28, 1.37 times a GPU-only baseline with chunked prefill."""
    milli = {"linear": LINEAR_MS, "prefill_attn": PREFILL_MS}
    curves = {name: Curve([(x, ms / 1e3) for x, ms in points]) for name, points in milli.items()}
    for name, rate in (("gpu_attn", 450e9), ("cpu_attn", 100e9)):
        curves[name] = Curve([(1, 4096 / rate), (10**6, 4096e6 / rate)])
    costs, model = Profile(32, **curves, head=Curve([(1, 0.0)])), MODELS["llama-3.1-8b"]
    config = EngineConfig(gpu_kv_tokens=26400, cpu_kv_tokens=10**6, max_batched_tokens=2048, max_seqs=1024)
    for output, ratio in ((100, 1.13), (200, 1.28), (400, 1.37)):
        arrivals = parse(f"synthetic:1000,{output}", 300)
        spans = [simulate(model, costs, replace(config, mode=mode), arrivals).span_s for mode in ("gpu-only", "neo")]
        assert spans[0] / spans[1] == pytest.approx(ratio, rel=0.04)


RECORDED = [
    (path.stem, run) for path in sorted((ROOT / "data" / "recorded").glob("bench_*.json")) for run in lines_of(path)
]


# Of two runs the simulated throughput is 12 and 19 % too high. The shipped profile is of a host whose memory was faster, which
# explains a tenth to a quarter (notebook 10, section 3); the rest wants to be measured on such a machine.
UNEXPLAINED = {"bench_h200_8sm_150_synthetic_1000_200", "bench_h200_8sm_150_synthetic_1000_400"}


def recorded_run(name, run):
    off = name in UNEXPLAINED and run["mode"] == "neo"
    marks = pytest.mark.xfail(strict=True, reason="not explained: notebook 10, section 3") if off else ()
    return pytest.param(name, run, marks=marks, id=f"{name} {run['mode']}")


@pytest.mark.parametrize(("name", "run"), [recorded_run(*pair) for pair in RECORDED])
def test_the_engines_recorded_runs_are_predicted(name, run):
    """Whole-run throughput within 10 %, mean per-token latency within 15 %, at the same requests."""
    args = parser().parse_args(parser_words(run["command"]))
    model = MODELS[args.model.removeprefix("random:")]
    profiles = (fitting(path, model.name, run) for path in sorted(hardware.DATA_DIR.glob("profiles/*.json")))
    costs = next(filter(None, profiles), None)
    if costs is None or args.num_sms == 0 or not run["command"].startswith("python"):  # NEO_LITE_ASSUME: other kernels
        pytest.skip(f"no shipped profile is of {name}'s machine, kernels, model and threads")
    tokens = int(args.cpu_kv_gib * 2**30 / model.kv_bytes_per_token(run["dtype"]))
    config = EngineConfig(
        run["mode"], gpu_kv_tokens=args.gpu_kv_tokens, cpu_kv_tokens=tokens, max_batched_tokens=args.max_batched_tokens,
        max_seqs=512,
    )  # fmt: skip
    simulated = simulate(model, costs, config, parse(args.workload, args.requests, seed=args.seed)).summary()
    assert simulated["requests_per_s"] == pytest.approx(run["requests_per_s"], rel=0.10)
    assert simulated["per_token_latency_s"] == pytest.approx(run["per_token_latency_s"], rel=0.15)


TWO_CARDS = lines_of(ROOT / "data" / "recorded" / "tensor_parallel_2xh200.json")
WITH_GRAPHS = [r for r in TWO_CARDS if r["tensor_parallel"] == 2 and "note" not in r and "8b" in r["model"]]


@pytest.mark.parametrize("run", WITH_GRAPHS, ids=lambda run: run["mode"])
def test_two_cards_are_predicted_from_their_stage_times_all_reduces_included(run):
    """Throughput within 15 %, from the profile that the ranks measured together before the run of mode neo."""
    args, model = parser().parse_args(parser_words(run["command"])), MODELS[run["model"].removeprefix("random:")]
    costs = next(Profile(**r["profile"]) for r in WITH_GRAPHS if "profile" in r)
    tokens = int(args.cpu_kv_gib * 2**30 / model.kv_bytes_per_token(run["dtype"]))
    config = EngineConfig(run["mode"], gpu_kv_tokens=args.gpu_kv_tokens, cpu_kv_tokens=tokens, max_seqs=512)
    simulated = simulate(model, costs, config, parse(args.workload, args.requests, seed=args.seed)).summary()
    assert simulated["requests_per_s"] == pytest.approx(run["requests_per_s"], rel=0.15)


def fitting(path: Path, model: str, run: dict) -> Profile | None:
    threads = parser().parse_args(parser_words(run["command"])).cpu_threads or run["stamp"]["usable_cores"]
    try:
        profile = Profile.load(path).check(model, run["dtype"], run["stamp"], threads)
        return profile if profile.threads == threads else None
    except NeoLiteError:
        return None
