"""What the figures look like, where a test can tell: nothing is stamped that is not drawn, no curve hides another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import colors
from matplotlib import pyplot as plt
from test_figures import GOOD

from neo_lite import figures
from neo_lite.config import NeoLiteError
from neo_lite.timeline import COLOURS


@pytest.fixture(autouse=True)
def close_all():
    yield
    plt.close("all")


def texts(fig: Any) -> list[str]:
    return [text.get_text() for text in fig.findobj(plt.Text)]


@pytest.mark.parametrize(("name", "gain"), [("6a", 1.143), ("6b", 1.064)])
def test_a_gain_of_the_papers_is_a_bracket_from_the_baseline_on(name: str, gain: float):
    fig, _, source = figures.draw(name, "simulated")
    assert source == "paper + simulated"
    (text,) = (text for text in texts(fig) if text.startswith("paper"))
    assert f"{gain - 1:+.1%}, reported" in text
    (bracket,) = (a for a in fig.axes[0].texts if a.get_text() == "")
    assert bracket.xy[0] == pytest.approx(gain * bracket.xyann[0]) and bracket.xy[1] == bracket.xyann[1] == 2.0


@pytest.mark.parametrize(
    ("name", "source"), [("1", "code"), ("2", "code"), ("4", "simulated"), ("7", "simulated"), ("8a", "simulated")]
)
def test_nothing_is_stamped_that_is_not_drawn(name: str, source: str):
    assert figures.draw(name, "simulated")[2] == source


def peer(folder: Path, **change: Any) -> Path:
    line = {
        **GOOD,
        "mode": "gpu-only-unchunked",
        "peers_per_s": {"another engine": 2.0},
        "requests_per_s": 3.0,
        **change,
    }
    (path := folder / "peer_x.json").write_text(json.dumps(line))
    return path


def test_peers_are_drawn_from_the_folder_that_was_asked_for(tmp_path: Path):
    peer(tmp_path)
    fig, table, source = figures.draw("10b", "recorded", tmp_path)
    assert source == "paper + simulated + recorded" and "gpu-only-unchunked / another engine" in table
    fig, table, source = figures.draw("10b", "simulated", tmp_path)
    assert source == "paper + simulated" and "another engine" not in table + " ".join(texts(fig))


@pytest.mark.parametrize("per_s", [{}, {"another engine": "slow"}, {"another engine": 0}, None])
def test_a_broken_peer_is_named(per_s: Any, tmp_path: Path):
    path = peer(tmp_path, peers_per_s=per_s)
    with pytest.raises(NeoLiteError, match=f"{path}: its peers_per_s "):
        figures.draw("10b", "recorded", tmp_path)


@pytest.mark.parametrize("name", ["3", "4", "5"])
@pytest.mark.parametrize("source", ["simulated", "recorded"])
def test_a_timelines_lanes_are_whole_and_the_empty_ones_say_why(name: str, source: str):
    (ax,) = figures.draw(name, source)[0].axes
    lanes = [label.get_text() for label in ax.get_yticklabels()]
    assert lanes == ["gpu", "d2h", "cpu", "h2d"] and ax.get_ylim() == (3.5, -0.5) and ax.get_axisbelow() is True
    empty = [text for text in texts(ax.figure) if text == "not simulated"]
    assert len(empty) == (2 if source == "simulated" else 0)


def test_stages_are_told_apart_by_lightness_and_sub_batches_by_a_hatch():
    (ax,) = figures.draw("5", "recorded")[0].axes
    shown = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert shown == [*(stage for stage in figures.STAGES if stage in shown), "hatched: sub-batch 1"]
    assert {"linear", "prefill_attn", "gpu_attn", "cpu_attn", "transfer", "store"} < set(shown)
    assert len({COLOURS[stage] for stage in figures.STAGES}) == len(figures.STAGES)
    hatched = [bars for bars in ax.collections if bars.get_hatch()]
    assert hatched and len(hatched) < len(ax.collections)
    for lane in (("linear", "prefill_attn", "gpu_attn"), ("transfer", "store")):  # side by side
        light = sorted(sum(w * c for w, c in zip((0.2, 0.7, 0.1), colors.to_rgb(COLOURS[s]))) for s in lane)
        assert all(b - a > 0.15 for a, b in zip(light, light[1:])), lane


@pytest.mark.parametrize("name", ["6b", "7", "8a", "9b"])
def test_curves_differ_in_line_style_and_in_marker(name: str):
    (ax, *_) = figures.draw(name, "simulated")[0].axes
    curves = [line for line in ax.lines if line.get_label().startswith("simulated")]
    assert len({line.get_marker() for line in curves}) == len({line.get_color() for line in curves}) == len(curves) > 1
    neo = [line.get_linestyle() for line in curves if "NEO" in line.get_label()]
    assert len(set(neo)) == 2, "where they coincide, the lower one shows between the upper one's dashes"


def test_8bs_lines_of_the_papers_have_their_modes_colour_and_name():
    (ax,) = figures.draw("8b", "simulated")[0].axes
    found = {text.get_text(): text.get_color() for text in ax.texts}
    assert found == {
        "paper: NEO at least: 1": figures.LOOK["neo-released"][1],
        "paper: FastDecode+ below (long outputs): 0.6": figures.LOOK["fastdecode+"][1],
    }


@pytest.mark.parametrize("name", ["6a", "6b", "6c", "7", "8a", "8b", "9a", "9b", "9c", "10a"])
def test_a_figure_names_its_model_and_its_machine(name: str):
    fig = figures.draw(name, "simulated")[0]
    assert any(
        text.startswith("Llama-") and (" T4" in text or " A10G" in text or "H100" in text) for text in texts(fig)
    )
    if name in figures.RATIOS:
        assert "SwiftLLM's scheduling" in fig.get_supylabel()


def test_10as_fastest_host_does_not_flatten_the_others():
    tops = [ax.get_ylim()[1] for ax in figures.draw("10a", "simulated")[0].axes]
    assert tops[3] > 2 > 1.6 > max(tops[:3])


def test_architecture_leads_each_queue_to_its_step_and_each_sub_batch_to_its_pool():
    (ax,) = figures.draw("2")[0].axes
    boxes = {t.get_text().split("\n")[0].split(":")[0]: t.get_position() for t in ax.texts if t.get_text()}
    assert "step 1 empty batches" in boxes and {"waiting", "running", "parked"} < set(boxes)
    ends = [(a.xyann, a.xy) for a in ax.texts if not a.get_text()]

    def joined(start: str, end: str) -> bool:
        """An arrow begins and ends beside both boxes; a box is 0.8 high."""
        (x0, y0), (x1, y1) = boxes[start], boxes[end]
        return any(abs(a[1] - y0) < 0.7 and abs(b[1] - y1) < 0.7 and abs(a[0] - x0) < 3.2 and abs(b[0] - x1) < 1.9
                   for a, b in ends)  # fmt: skip

    assert joined("running", "step 2 GPU decodes") and joined("parked", "step 2 GPU decodes")
    assert joined("waiting", "step 3 prefills") and not joined("waiting", "step 2 GPU decodes")
    assert joined("0", "GPU pool") and joined("1", "CPU pool") and not joined("1", "GPU pool")
