"""Busy time, overlap and the three renderers, on events written by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import matplotlib
import pytest

from neo_lite.timeline import Timeline

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def example() -> Timeline:
    timeline = Timeline()
    timeline.record("gpu", "pre", 0.0, 2.0, layer=0)
    timeline.record("gpu", "post", 6.0, 8.0, layer=0)
    timeline.record("gpu", "head", 7.0, 9.0)
    timeline.record("cpu", "cpu_attn", 1.0, 7.0, backend='a"<b>')
    timeline.record("other", "?", 9.0, 10.0)
    return timeline


def test_busy_and_overlap_count_a_moment_once():
    timeline = example()
    assert timeline.span_s == (0.0, 10.0)
    assert timeline.busy_s("gpu") == 5.0 and timeline.busy_fraction("gpu") == 0.5
    assert timeline.overlap_s("gpu", "cpu") == 2.0
    assert timeline.lanes() == ["gpu", "cpu", "other"]
    assert [e.name for e in timeline.between(2.5, 6.5).events] == ["post", "cpu_attn"]


def test_nothing_is_kept_while_disabled():
    timeline = Timeline(enabled=False)
    with timeline.span("gpu", "pre"):
        pass
    assert timeline.events == []


def test_chrome_trace_is_json_in_microseconds():
    events = json.loads(json.dumps(example().chrome_trace()))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 5 and spans[0]["dur"] == 2e6 and {e["args"]["name"] for e in events if e["ph"] == "M"}


def test_svg_is_well_formed_and_draws_each_event():
    root = ET.fromstring(example().svg())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) == 5


def test_matplotlib_draws_each_lane():
    _, ax = plt.subplots()
    example().plot(ax)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["gpu", "cpu", "other"]
    assert sum(len(c.get_paths()) for c in ax.collections) == 5
    plt.close("all")


def test_a_span_that_raises_is_not_recorded_as_done():
    timeline = Timeline()
    with pytest.raises(RuntimeError), timeline.span("gpu", "pre"):
        raise RuntimeError
    assert timeline.events == []
