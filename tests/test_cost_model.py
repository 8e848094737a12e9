"""Curves exact at their knots and sane beyond them, the bound of a schedule, profiles in files, the roofline."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neo_lite.config import MODELS, NeoLiteError
from neo_lite.cost_model import Curve, Profile, Stages, machine_in
from neo_lite.hardware import HARDWARE, roofline
from neo_lite.request import Request, SubBatch, Work

MODEL = MODELS["llama-3.1-8b"]
PROFILE = Profile(
    4, [(1, 2.0), (2, 2.0), (10, 10.0)], [(1, 0.1), (10, 1.0), (20, 4.0)], [(1, 0.01), (100, 1.0)], [(1, 0.1), (100, 10.0)],
    [(1, 0.5), (10, 5.0)], cpu_request_tokens=3.0, overhead_s=0.2, model="tiny", dtype="float16", threads=2,
    stamp={"gpu": None, "cpu": "one", "usable_cores": 2},
)  # fmt: skip


def decode(seq_len: int) -> Work:
    return Work(Request(0, (1,) * seq_len), seq_len - 1, 1)


@st.composite
def curves(draw, level: bool = True) -> Curve:
    """Rising points; with `level`, some stretches are."""
    steps = draw(st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 1e-2)), min_size=1, max_size=6))
    xs = accumulate(dx for dx, _ in steps)
    ys = accumulate(0.0 if level and i and draw(st.booleans()) else dy for i, (_, dy) in enumerate(steps))
    return Curve(list(zip(xs, ys)))


# ---- Curves ----


@given(curves(), st.floats(0, 1))
def test_a_curve_is_exact_at_its_points_and_straight_between_them(curve, share):
    for (x0, y0), (x1, y1) in zip(curve.points, curve.points[1:]):
        assert (curve(x0), curve(x1)) == (y0, y1)
        assert curve(x0 + share * (x1 - x0)) == pytest.approx(y0 + share * (y1 - y0), rel=1e-9)


@given(curves(), st.floats(0, 1e5), st.floats(0, 1e5))
def test_a_curve_never_falls_and_goes_on_as_it_ended(curve, a, b):
    assert curve(min(a, b)) <= curve(max(a, b))
    (x1, y1) = curve.points[-1]
    (x0, y0) = curve.points[-2] if len(curve.points) > 1 else (x1 - 1, y1)
    assert curve(x1 + a) == pytest.approx(y1 + a * (y1 - y0) / (x1 - x0), rel=1e-6)
    assert curve(0) == curve(-1) == 0.0 and curve(curve.points[0][0] / 2) == curve.points[0][1]


@given(curves(), st.floats(1e-7, 1.0))
def test_within_is_the_inverse(curve, seconds):
    """What fits takes no longer, and noticeably more takes longer."""
    x = float(curve.within(np.array([seconds]))[0])
    assert curve(x) <= seconds * (1 + 1e-12)
    level = x > 1e11  # the curve ends level: there is no bound
    assert level or curve(x * (1 + 1e-6) + 1e-6) >= seconds * (1 - 1e-6) or seconds < curve.points[0][1]


@given(curves(), st.lists(st.floats(-5, 1e5), min_size=1, max_size=9))
def test_many_at_once_are_the_same(curve, xs):
    assert curve.each(np.array(xs)).tolist() == [curve(x) for x in xs]


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "give at least one point"),
        ([(1,)], "give at least one point"),
        ([(1, 2.0), (1, 3.0)], "x must rise"),
        ([(1, 2.0), (2, 1.0)], "the seconds fall"),
        ([(1, -1.0)], "x must rise"),
        ([(1, float("nan"))], "finite"),
    ],
)
def test_a_curve_that_is_none_is_refused(points, said):
    with pytest.raises(NeoLiteError, match=said):
        Curve(points)


# ---- Stages and iterations ----


def test_a_layer_is_bound_by_the_gpu_the_cpu_or_one_sub_batchs_own_chain():
    gpu_bound = Stages(l0=5, pref0=1, ga0=2, l1=1, ca1=4, ca0=3)
    assert gpu_bound.layer == 9 and gpu_bound.paper_layer == 5 + 4 and gpu_bound.slack == (1, 1)
    assert Stages(l0=5, ca0=3, l1=1, ca1=9).layer == 12, "the CPU"
    assert Stages(l0=5, l1=3, ca1=8).layer == 11, "batch-1: its linear stage, then its attention"
    assert Stages(l0=5, ca0=7).layer == 12, "one sub-batch alone hides nothing"


@given(*[st.floats(0, 10)] * 6)
def test_barriers_never_make_a_layer_faster_and_cost_nothing_within_the_inequalities(l0, pref0, ga0, ca0, l1, ca1):
    stages = Stages(l0, pref0, ga0, ca0, l1, ca1)
    assert stages.gpu <= stages.layer <= stages.paper_layer + 1e-9
    if min(stages.slack) >= 0:
        assert stages.paper_layer == pytest.approx(stages.gpu)


def test_an_iteration_by_hand():
    # Batch-0: a prompt of 6 tokens, a GPU decode of 5, a CPU decode of 4; batch-1: two CPU decodes of 2 and 3.
    first = SubBatch((Work(Request(0, (1,) * 6), 0, 6),), (decode(5),), (decode(4),))
    stages = PROFILE.stages((first, SubBatch(cpu_decodes=(decode(2), decode(3)))))
    # linear 6 + 2 = 8 tokens: 8 s, 2 tokens: 2 s; CPU: (4 + 3) and (2 + 3 + 2 x 3) tokens of 0.1 s
    assert stages == Stages(8.0, pytest.approx(0.6), pytest.approx(0.05), pytest.approx(0.7), 2.0, pytest.approx(1.1))
    assert PROFILE.iteration_s(stages, sampling=5) == pytest.approx(4 * (8 + 0.6 + 0.05 + 2) + 2.5 + 0.2)


def test_chunks_of_a_prompt_cost_what_the_whole_prompt_does():
    request = Request(0, (1,) * 20)
    chunks = [Work(request, 0, 7), Work(request, 7, 6), Work(request, 13, 7)]
    assert PROFILE.t_prefill_attn(chunks) == pytest.approx(PROFILE.t_prefill_attn([Work(request, 0, 20)])) == 4.0


def test_the_ridge_is_where_arithmetic_takes_as_long_as_reading_the_weights():
    assert PROFILE.ridge_tokens == 2
    assert Profile(1, [(1, 3.0)], *[[(1, 0.1)]] * 4).ridge_tokens == 1, "a level line has none"


def test_launches_on_the_cpus_thread_bring_barriers_back():
    batches = SubBatch(gpu_decodes=(decode(50),)), SubBatch(cpu_decodes=(decode(5),))
    released = replace(PROFILE, launch_s=0.3)
    plain, slow = PROFILE.stages(batches), released.stages(batches)
    assert (slow.ca0, slow.ca1) == (plain.ca0 + 0.3, plain.ca1 + 0.3)
    assert released.iteration_s(slow, 2) - PROFILE.iteration_s(slow, 2) == pytest.approx(
        4 * (slow.paper_layer - slow.layer)
    )


# ---- Files ----


def test_a_profile_comes_back_from_its_file_as_it_was(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["linear"] == [[1, 2.0], [2, 2.0], [10, 10.0]]
    again.save(tmp_path / "q.json")
    assert (tmp_path / "q.json").read_bytes() == (tmp_path / "p.json").read_bytes()
    assert again.t_cpu_attn(2, 10) == PROFILE.t_cpu_attn(2, 10) and again.source == "2 cores of one"


def test_a_profile_of_something_else_is_refused_with_the_reason():
    here = dict(PROFILE.stamp)
    card = {"name": "NVIDIA H200", "sms": 132, "partition_sms": 8}
    assert PROFILE.check("tiny", "float16", here, 2) is PROFILE
    for arguments, said in (
        (("smollm2", "float16"), "another model, tiny, not smollm2: measure one here"),
        (("tiny", "float32"), "another dtype, float16, not float32"),
        (
            ("tiny", "float16", {**here, "gpu": card}),
            "another machine, 2 cores of one, not 8 SMs of NVIDIA H200, 2 cores of one",
        ),
        (("tiny", "float16", here, 4), "another number of threads, 2, not 4"),
    ):
        with pytest.raises(NeoLiteError, match=f"^the profile is of {said}"):
            PROFILE.check(*arguments)
    assert machine_in({"gpu": {**card, "partition_sms": None}, "cpu": "x", "usable_cores": 16}).startswith(
        "132 SMs of NVIDIA"
    )
    assert roofline(HARDWARE["h200"], MODEL).check(MODEL.name, "float16", here, 2), (
        "a roofline is of no machine at hand"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "holds no profile"),
        ("[1]", "holds no profile"),
        ('{"num_layers": 2}', "holds no profile .*missing.*make one with python -m neo_lite profile"),
        ('{"num_layers": 2, "linear": [[1, 2], [2, 1]], "prefill_attn": [[1, 1]], "gpu_attn": [[1, 1]], "cpu_attn": [[1, 1]],'
         ' "head": [[1, 1]]}', "the seconds fall"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_profile_is_refused_in_one_line(text, said, tmp_path):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NeoLiteError, match=said) as error:
        Profile.load(path)
    assert "\n" not in str(error.value) and "p.json" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_layers", 0, "num_layers is 0: give a whole number from 1 on"),
        ("num_layers", 1.5, "num_layers is 1.5"),
        ("num_layers", "x", "num_layers is 'x'"),
        ("overhead_s", float("nan"), "overhead_s is nan: give a number from 0 on"),
        ("overhead_s", -1.0, "overhead_s is -1.0"),
        ("cpu_request_tokens", "a", "cpu_request_tokens is 'a'"),
        ("threads", None, "threads is None"),
        ("stamp", [1], "holds no profile"),
        ("stamp", {"gpu": 5}, "holds no profile"),
        ("stamp", {"gpu": {"name": "T4"}}, "holds no profile"),
    ],
)
def test_a_profile_with_a_value_that_no_machine_has_is_refused_when_it_is_loaded(tmp_path, field, value, said):
    PROFILE.save(tmp_path / "p.json")
    row = {**json.loads((tmp_path / "p.json").read_text()), field: value}
    (tmp_path / "p.json").write_text(json.dumps(row))
    with pytest.raises(NeoLiteError, match=said) as error:
        Profile.load(tmp_path / "p.json")
    assert "\n" not in str(error.value) and "p.json holds no profile" in str(error.value)


# ---- Rooflines ----


def test_a_roofline_reads_the_weights_for_one_token_and_computes_for_many():
    spec = replace(HARDWARE["a10g-g5.4xlarge"], sharpness=60.0)  # nearly the textbook's max(bytes, FLOPs)
    costs, weights = roofline(spec, MODEL), MODEL.layer_parameters
    assert costs.t_linear(1) == pytest.approx(2 * weights / spec.gpu_bytes_per_s, rel=0.02)
    assert costs.t_linear(4096) == pytest.approx(2 * weights * 4096 / spec.gpu_flops_per_s, rel=0.02)
    ridge = spec.gpu_flops_per_s / spec.gpu_bytes_per_s  # FLOPs a byte; a weight of two bytes takes two FLOPs a token
    assert costs.ridge_tokens == pytest.approx(ridge, rel=0.02)
    kv_bytes = 4096
    assert costs.t_gpu_attn(10_000) - costs.t_gpu_attn(0.5) == pytest.approx(
        10_000 * kv_bytes / spec.gpu_attn_bytes_per_s, rel=1e-3
    )
    assert costs.t_transfer(spec.link_bytes_per_s) == pytest.approx(1.0)
    assert costs.t_prefill_attn([Work(Request(0, (1,) * 4096), 0, 4096)]) == pytest.approx(
        2 * 4096 * 4096**2 / spec.gpu_flops_per_s + spec.kernel_s, rel=0.01
    )  # causal: half of 2 x 2 x width x n^2


def test_a_cpu_decode_costs_its_kv_and_the_way_of_its_vectors_over_the_link():
    spec = HARDWARE["a10g-g5.4xlarge"]
    costs = roofline(spec, MODEL)
    more = costs.t_cpu_attn(33, 64_000) - costs.t_cpu_attn(1, 64_000)
    assert more == pytest.approx(32 * 2 * 2 * 4096 / spec.link_bytes_per_s, rel=1e-3)  # q and the output, fp16
    slow = roofline(replace(spec, cpu_bytes_per_s=spec.cpu_bytes_per_s / 2), MODEL)
    read_s = slow.t_cpu_attn(0, 64_000) - spec.cpu_dispatch_s
    assert read_s == pytest.approx(2 * (costs.t_cpu_attn(0, 64_000) - spec.cpu_dispatch_s), rel=1e-6)


def test_two_ranks_halve_the_gpus_work_share_the_cpus_memory_and_pay_for_all_reduces():
    spec = HARDWARE["2xh100"]
    one, two = roofline(spec, MODEL, ranks=1), roofline(spec, MODEL)
    assert two.linear(4096) == pytest.approx(one.linear(4096) / 2)
    assert two.t_gpu_attn(10**5) - spec.kernel_s == pytest.approx((one.t_gpu_attn(10**5) - spec.kernel_s) / 2)
    assert two.t_cpu_attn(8, 10**5) == pytest.approx(one.t_cpu_attn(8, 10**5), rel=0.01)
    assert two.t_linear(64) - two.linear(64) > 2 * spec.all_reduce_s and one.t_linear(64) == one.linear(64)
    assert two.t_transfer(1e9) == pytest.approx(one.t_transfer(1e9) / 2), "each rank has a link of its own"


def test_a_prompts_attention_goes_on_along_a_parabola_where_its_curve_ends():
    costs = Profile(1, [(1, 1.0)], [(10, 1.0), (20, 4.0)], [(1, 1.0)], [(1, 1.0)], [(1, 1.0)])

    def part(start: int, length: int) -> float:
        return costs.t_prefill_attn([Work(Request(0, (1,) * 80), start, length)])

    assert part(0, 20) == 4.0 and part(0, 40) == 16.0 and part(0, 80) == 64.0
    assert part(20, 20) == 12.0 and part(0, 20) + part(20, 60) == part(0, 80)
