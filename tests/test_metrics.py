"""The definitions, on requests whose times are written by hand."""

from __future__ import annotations

import math

import pytest

from neo_lite import metrics
from neo_lite.request import Request


def done(arrival: float, times: list[float]) -> Request:
    return Request(
        0,
        (1,),
        arrival_s=arrival,
        output=[0] * len(times),
        token_times_s=times,
        finished_s=times[-1],
        finish_reason="length",
    )


def test_latencies():
    request = done(1.0, [3.0, 4.0, 6.0])
    assert metrics.ttft_s(request) == 2.0
    assert metrics.tpot_s(request) == 1.5
    assert metrics.itl_s(request).tolist() == [1.0, 2.0]
    assert metrics.per_token_latency_s(request) == pytest.approx(5 / 3)
    assert math.isnan(metrics.tpot_s(done(0.0, [1.0])))


def test_the_first_quarter_is_dropped_by_arrival():
    requests = [done(float(i), [float(i + (100 if i == 0 else 2))]) for i in (3, 1, 0, 2)]
    assert metrics.mean_per_token_latency_s(requests) == 2.0


def test_throughputs():
    requests = [done(0.0, [float(t)]) for t in range(1, 12)]
    assert metrics.request_throughput(requests) == 1.0
    assert metrics.token_throughput(requests) == 1.0
    assert metrics.window_throughput(requests) == 1.0
    assert math.isnan(metrics.window_throughput([done(0.0, [1.0])] * 3))


def test_summary_of_nothing_and_of_single_tokens():
    assert metrics.summary([]) == {"requests": 0}
    row = metrics.summary([done(0.0, [2.0])])
    assert row["ttft_p50_s"] == 2.0 and math.isnan(row["tpot_p50_s"])
