"""The explorer's drawings against plans worked out by hand, every request explained, and its widgets without a browser."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html import unescape
from xml.etree import ElementTree

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_lite import explorer
from neo_lite.blocks import Blocks
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cost_model import Candidate, Profile, Stages
from neo_lite.neo import POLICIES

# Of what ipywidgets 7.7 (Colab's) and 8 both have.
SHARED = {
    "Box", "BoundedIntText", "Button", "Checkbox", "Dropdown", "FloatSlider", "HTML", "IntProgress", "IntSlider", "Label",
    "Play", "VBox",
}  # fmt: skip
# Milliseconds that one can add up: linear 4 up to 4 tokens, then 1 a token; prefill attention 0.1 a token, GPU decode
# attention 0.01 and CPU decode attention 0.1 a KV token.
BY_HAND = Profile(
    1, [(1, 4e-3), (4, 4e-3), (100, 0.1)], [(1, 1e-4), (100, 1e-2)], [(1, 1e-5), (1000, 1e-2)], [(1, 1e-4), (1000, 0.1)],
    [(1, 0.0)],
)  # fmt: skip
SMALL = {"requests": 12, "rate_per_s": 20.0, "gpu_kv_tokens": 4000, "output_tokens": 30}


def by_hand(on_gpu, on_cpu, waiting, policy="neo", pools=(100, 1000), **changes) -> explorer.View:
    """The next plan for these lengths, in blocks of 10 tokens."""
    config = EngineConfig(policy, block_size=10, gpu_kv_tokens=pools[0], cpu_kv_tokens=pools[1], **changes)
    scheduler = POLICIES[policy](config, Blocks(config.num_gpu_blocks, config.num_cpu_blocks, 10), BY_HAND)
    explorer.fill(scheduler, on_gpu, on_cpu, waiting, more=9)
    return explorer.View(scheduler.plan(0.0), config, tuple(scheduler.waiting))


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall("<svg.*?</svg>", page)]


def boxes(svg: ElementTree.Element) -> dict[float, list[tuple[str, float]]]:
    """By row: the title and the width of each box."""
    rows: dict[float, list[tuple[str, float]]] = {}
    for box in svg.iter("rect"):
        rows.setdefault(float(box.get("y")), []).append((box.findtext("title"), float(box.get("width"))))
    return rows


# Drawings


def test_a_schedule_is_drawn_to_scale_with_its_bubble():
    """Tl0 4, Tga0 1, Tl1 3 ms on the GPU; Tca1 6, Tca0 4 on the CPU: a layer takes 10 ms and the GPU waits for 2."""
    s = Stages(l0=4e-3, ga0=1e-3, ca0=4e-3, l1=3e-3, ca1=6e-3)
    c = Candidate("two batches", (), s, 9, 10e-3)
    text = explorer.schedule(c, s.layer, 2 * s.layer, chosen=True, layers=1)
    gpu, cpu = boxes(svgs(text)[0]).values()
    ms = (explorer.WIDTH - explorer.LEFT) / 20
    wanted = [("l0 4.00 ms", 4), ("ga0 1.00 ms", 1), ("bubble 2.00 ms", 2), ("l1 3.00 ms", 3)]
    assert gpu == [(title, pytest.approx(n * ms, abs=0.1)) for title, n in wanted]
    assert cpu == [("ca1 6.00 ms", pytest.approx(6 * ms, abs=0.1)), ("ca0 4.00 ms", pytest.approx(4 * ms, abs=0.1))]
    assert "two batches (chosen): a layer takes 10.00 ms (GPU 8.00, bubble 2.00; CPU 10.00)" in text
    assert "9 requests in 10.0 ms (900 tokens/s)" in text


def test_the_cpu_waits_for_the_linear_stage_before_batch_0s_attention():
    s = Stages(l0=4e-3, ca0=3e-3, l1=3e-3, ca1=1e-3)
    c = Candidate("two batches", (), s, 1, 7e-3)
    _, cpu = boxes(svgs(explorer.schedule(c, s.layer, s.layer, layers=1))[0]).values()
    assert [title for title, _ in cpu] == ["ca1 1.00 ms", "idle 3.00 ms", "ca0 3.00 ms"]


def test_inequalities_say_which_one_is_broken_and_by_how_much():
    text = explorer.inequalities(Stages(l0=4e-3, ga0=1e-3, pref0=1e-3, ca0=9e-3, l1=3e-3, ca1=1e-3))
    assert "Tca1 <= Tl0 holds: 3.00 ms to spare; Tca0 <= Tl1 + Tga0 is broken: -4.00 ms to spare." in unescape(text)
    rows = list(boxes(svgs(text)[0]).values())
    assert [[title for title, _ in row] for row in rows] == [
        ["ca1 1.00 ms"], ["l0 4.00 ms"], ["ca0 9.00 ms"], ["l1 3.00 ms", "pref0 1.00 ms", "ga0 1.00 ms"],
    ]  # fmt: skip


@given(
    waiting=st.integers(0, 30), on_gpu=st.integers(0, 30), on_cpu=st.integers(0, 30), tokens=st.integers(10, 4000),
    policy=st.sampled_from(["neo", "neo-released", "fastdecode+", "asymmetric"]), gb=st.floats(0.5, 200),
)  # fmt: skip
@settings(max_examples=60)
def test_every_request_has_a_reason_and_every_drawing_its_text(waiting, on_gpu, on_cpu, tokens, policy, gb):
    scene = dict(waiting=waiting, on_gpu=on_gpu, on_cpu=on_cpu, prompt_tokens=tokens, policy=policy, cpu_gb_per_s=gb)
    try:
        view = explorer.decide(**scene)
    except NeoLiteError as error:
        assert "\n" not in str(error)
        return
    assert set(explorer.reasons(view)) == set(range(waiting + on_gpu + on_cpu))
    page = explorer.panel(view)
    labels = [svg.get("aria-label") for svg in svgs(page)]
    assert all(svg.get("role") == "img" for svg in svgs(page))
    assert all(unescape(page).count(label) == 2 for label in labels), "as aria-label, and as a line beneath"
    assert explorer.decision(view) in unescape(page)


# In words


def test_the_case_worked_out_by_hand_in_words():
    """That of test_neo: two batches, 7 requests in 17.78 ms against 3 in 13.78; r7 taken back in step 5."""
    view = by_hand([39, 39], [30, 20, 35, 30], [10, 10])
    rates = "7 requests in 17.8 ms (394 tokens/s) against 3 requests in 13.8 ms (218 tokens/s)"
    assert explorer.decision(view) == f"Two batches: the higher x/T. {rates}."
    why = explorer.reasons(view)
    assert why[0] == why[1] == "batch-0: its KV is on the GPU" and why[6] == "batch-0: prefill, KV to the cpu pool"
    assert why[2] == why[5] == "batch-1: CPU decode within its inequality"
    assert why[7] == "waits: taken back in step 5, down to the floor"
    assert "<td" in explorer.placement(view) and ">r2-r5<" in explorer.placement(view)


@pytest.mark.parametrize(
    ("queues", "changes", "said"),
    [
        (([39, 39], [], []), {}, "GPU only: no CPU decode can be hidden. 2 requests"),
        (([39], [500], []), {}, "GPU only: no CPU decode can be hidden. 1 requests"),
        (([], [], []), {}, "Nothing to run."),
        (([39, 39], [10], []), {}, "GPU only: the higher x/T. 2 requests in 4.8 ms"),
        (([39, 39], [10], []), {"policy": "asymmetric"}, "Two batches: asymmetric does not weigh."),
        (([], [300], []), {"pools": (50, 1000)}, "Two batches: forced, nothing is left for the GPU, and neither"),
    ],
)
def test_a_decision_says_why(queues, changes, said):
    assert explorer.decision(by_hand(*queues, **changes)).startswith(said)


@pytest.mark.parametrize(
    ("queues", "changes", "waits"),
    [
        (([39, 39], [], [10] * 3), {"max_batched_tokens": 16}, "an iteration takes 16 tokens; 4 are left, it has 10"),
        (([49, 49], [], [10] * 3), {"pools": (100, 20)}, "no pool has room for its 10 tokens beside those that run"),
        (([50, 51], [], [10] * 3), {"pools": (100, 20)}, "somebody has just been dropped for want of room, so nobody"),
    ],
)  # fmt: skip
def test_the_first_who_waits_says_where_step_3_stopped_and_the_others_wait_behind(queues, changes, waits):
    view = by_hand(*queues, **changes)
    texts = explorer.reasons(view)
    first, *others = [r.id for r in view.waiting if r.id not in view.plan.reasons]
    assert texts[first].startswith(f"waits: {waits}")
    assert others and {texts[i] for i in others} == {f"waits behind r{first}: first come, first served"}


@pytest.mark.parametrize(
    ("scene", "complaint"),
    [
        ({"cpu_gb_per_s": 0}, "the CPU reads 0 GB/s: give a number above 0"),
        ({"model": "llama-3.1-70b"}, "needs 131.4 GiB .*: choose a larger card or a smaller model"),
        ({"model": "llama-2-7b", "prompt_tokens": 5000}, "exceeds the model's 4096 positions: shorten one of them"),
        ({"on_gpu": 64}, "the gpu pool of 26,400 KV tokens is full at request 24: take fewer, shorten"),
        ({"gpu_kv_tokens": 0}, "gpu_kv_tokens is 0: give a whole number from 1 to 1073741824"),
        ({"machine": "abacus"}, "hardware 'abacus' is unknown: choose"),
        ({"model": "gpt-2"}, "model 'gpt-2' is unknown: choose one of tiny"),
        ({"policy": "gpu-only"}, "policy 'gpu-only' weighs nothing: choose from asymmetric"),
        ({"waiting": 2.5}, "waiting is 2.5: give a whole number from 0 on"),
        ({"prompt_tokens": float("nan")}, "prompt_tokens is nan: give a whole number from 10 on"),
        ({"gpu_kv_tokens": float("inf")}, "gpu_kv_tokens is inf: give a whole number from 0 on"),
        ({"cpu_gb_per_s": float("inf")}, "the CPU reads inf GB/s: give a number above 0"),
        ({"speed": 3}, "the explorer has no 'speed': choose from machine, model"),
    ],
)
def test_what_is_impossible_gets_one_line(scene, complaint):
    with pytest.raises(NeoLiteError, match=complaint) as caught:
        explorer.decide(**scene)
    assert "\n" not in str(caught.value)


def test_rate_0_gets_one_line():
    with pytest.raises(NeoLiteError, match="rate is 0"):
        explorer.run(rate_per_s=0)


# A run


@pytest.fixture(scope="module")
def result():
    return explorer.run(**SMALL)


def test_each_iteration_of_a_run_explains_everybody_who_is_there(result):
    config = explorer.build(explorer.scene(**SMALL))[2]
    kinds = set()
    for k, iteration in enumerate(result.iterations):
        view = explorer.view_at(result, config, k)
        there = [r.id for r in result.requests if r.arrival_s <= iteration.start_s < r.finished_s]
        assert set(explorer.reasons(view)) == set(there), f"iteration {k}"
        one = "One batch with" if iteration.requests[2] else "GPU"
        chosen = "Two" if iteration.kind.startswith("two") else one
        assert explorer.decision(view).startswith(chosen)
        kinds.add(chosen)
    assert kinds >= {"GPU", "Two"}, "the mode flips as the load rises"


def test_the_strip_draws_every_iteration_and_marks_the_cursor(result):
    drawn = explorer.strip(result, columns=7)
    paths = [path.get("d") for path in svgs(drawn)[0].iter("path")]
    assert len(paths) == 5 and paths[-1].startswith("M@x")
    widths = [float(w) for w in re.findall(r"h([\d.]+)", paths[0])]
    assert len(widths) == 7 and sum(widths) == pytest.approx(explorer.WIDTH - explorer.LEFT - 60, abs=0.1)
    two = sum(i.kind.startswith("two") for i in result.iterations) / len(result.iterations)
    assert f"{len(result.iterations)} iterations" in drawn and f"two batches in {two:.0%}" in drawn


def test_a_rising_rate_keeps_the_requests_and_moves_their_arrivals():
    rising, even = (explorer.run(**SMALL, policy="gpu-only", rising=rises).requests for rises in (True, False))
    assert [len(r.prompt) for r in rising] == [len(r.prompt) for r in even]
    last_s = even[-1].arrival_s
    assert [r.arrival_s for r in rising] == pytest.approx([(r.arrival_s * last_s) ** 0.5 for r in even])


def test_policies_are_compared_and_one_that_refuses_says_why(result):
    page = explorer.compare({"neo": result, "gpu-only": NeoLiteError("too small")})
    rates = result.summary()
    assert f">{rates['requests_per_s']:.2f}<" in page and ">too small<" in page


def test_another_cpu_changes_reading_alone():
    one, two = (explorer.build(explorer.scene(cpu_gb_per_s=gb))[1] for gb in (49.0, 98.0))
    least_s = one.cpu_attn.points[0][1]
    assert one.t_cpu_attn(0, 100_000) - least_s == pytest.approx(2 * (two.t_cpu_attn(0, 100_000) - least_s))
    assert one.cpu_request_tokens == pytest.approx(two.cpu_request_tokens / 2)


# Widgets, without a browser


def widgets(root) -> list:
    return [root, *(w for child in getattr(root, "children", ()) for w in widgets(child))]


@pytest.fixture
def explorer_here():
    return explorer.Explorer(**SMALL, on_gpu=3)


def test_only_widgets_that_colab_has_and_each_input_is_labelled(explorer_here):
    every = widgets(explorer_here.root)
    assert {type(w).__name__ for w in every} <= SHARED
    for w in every:
        if type(w).__name__ not in ("Box", "VBox", "HTML", "Play", "Label"):
            assert w.description, w


def test_a_slider_changes_the_decision_and_an_impossible_value_shows_its_reason(explorer_here):
    e = explorer_here
    assert "Two batches: the higher x/T" in e.view.value
    e.controls["on_cpu"].value = 0
    assert "GPU only: no CPU decode can be hidden" in e.view.value
    e.controls["cpu_gb_per_s"].value = 0
    assert "the CPU reads 0.0 GB/s: give a number above 0" in e.view.value and 'role="alert"' in e.view.value
    e.controls["cpu_gb_per_s"].value = 50
    e.controls["model"].value = "llama-3.1-70b"
    assert "choose a larger card or a smaller model" in e.view.value


def test_another_machine_brings_its_own_memory_and_bandwidth(explorer_here):
    e = explorer_here
    e.controls["machine"].value = "a10g-g5.4xlarge"
    _, tokens, _, gb = explorer.of_machine("a10g-g5.4xlarge", "llama-3.1-8b")
    assert (e.controls["gpu_kv_tokens"].value, e.controls["cpu_gb_per_s"].value) == (tokens, gb)


def test_a_run_is_simulated_scrubbed_compared_and_exported(explorer_here):
    e = explorer_here
    assert e.export.disabled
    e.simulate.click()
    assert e.at.max == e.play.max == len(e.result.iterations) - 1 and e.bar.value == e.bar.max
    assert all(f">{name}<" in e.table.value for name in explorer.COMPARED)
    first = e.view.value, e.strip.value
    e.at.value = e.at.max // 2
    assert e.view.value != first[0] and e.strip.value != first[1] and "@x" not in e.strip.value
    e.export.click()
    data = re.search(r"base64,([^\"]+)", e.link.value).group(1)
    events = json.loads(base64.b64decode(data))["traceEvents"]
    linear = [x for x in events if x["name"] == "linear" and x["args"]["batch"] == 0]
    assert len(linear) == 8 * 32, "eight iterations of 32 layers"


def test_a_run_that_cannot_be_shows_the_reason(explorer_here):
    e = explorer_here
    e.controls["rate_per_s"].value = 0
    e.simulate.click()
    assert "rate is 0" in e.view.value and e.export.disabled


def test_a_mistake_of_ours_is_one_line_too(explorer_here, monkeypatch):
    monkeypatch.setattr(explorer, "panel", lambda view: 1 / 0)
    explorer_here.controls["waiting"].value = 3
    assert "ZeroDivisionError: division by zero" in explorer_here.view.value


def test_drawings_need_neither_torch_nor_ipywidgets():
    code = (
        "import sys; sys.modules.update(torch=None, ipywidgets=None)\n"
        "from neo_lite import explorer\nassert '<svg' in explorer.panel(explorer.decide())\n"
        "try: explorer.Explorer()\nexcept explorer.NeoLiteError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "the sliders need ipywidgets: pip install 'ipywidgets>=7.7,<9'\n", done.stderr
