"""The only definitions of what is measured about requests. Called by the engine's users and by every figure.

Several definitions of per-token latency are in circulation; the paper's figure 6 divides by *output* tokens, and so
does this module. Times in seconds; each function takes finished requests and returns one number for each, or one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neo_lite.request import Request


def ttft_s(request: Request) -> float:
    """Time to first token: from arrival to the first output token."""
    return request.token_times_s[0] - request.arrival_s


def tpot_s(request: Request) -> float:
    """Time per output token after the first; nan for a single token."""
    times = request.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else float("nan")


def itl_s(request: Request) -> np.ndarray:
    """Inter-token latencies: the gaps between one output token and the next."""
    return np.diff(request.token_times_s)


def per_token_latency_s(request: Request) -> float:
    """The paper's figure 6: end-to-end time over output tokens, waiting in the queue included."""
    assert request.finished_s is not None
    return (request.finished_s - request.arrival_s) / len(request.output)


def mean_per_token_latency_s(requests: Sequence[Request], drop: float = 0.25) -> float:
    """Figure 6's y: the mean over requests in order of arrival, the first quarter dropped as warm-up."""
    ordered = sorted(requests, key=lambda r: r.arrival_s)
    return float(np.mean([per_token_latency_s(r) for r in ordered[int(drop * len(ordered)) :]]))


def request_throughput(requests: Sequence[Request]) -> float:
    """Requests a second, from the first arrival to the last completion."""
    end = max(r.finished_s or 0.0 for r in requests)
    return len(requests) / (end - min(r.arrival_s for r in requests))


def token_throughput(requests: Sequence[Request]) -> float:
    """Output tokens a second over the same time."""
    return request_throughput(requests) * sum(len(r.output) for r in requests) / len(requests)


def window_throughput(requests: Sequence[Request], low: float = 0.3, high: float = 0.7) -> float:
    """Figure 10a's rate: completions a second between 30 % and 70 % of all completions (wants many requests)."""
    done = sorted(r.finished_s or 0.0 for r in requests)
    first, last = int(low * (len(done) - 1)), int(high * (len(done) - 1))
    span = done[last] - done[first]
    return (last - first) / span if span > 0 else float("nan")


def summary(requests: Sequence[Request]) -> dict[str, float]:
    """Throughput and latency quantiles of finished requests, as the command line and the notebooks print them."""
    done = [r for r in requests if r.finish_reason in ("stop", "length")]
    if not done:
        return {"requests": 0}
    row = {
        "requests": len(done),
        "requests_per_s": request_throughput(done),
        "output_tokens_per_s": token_throughput(done),
        "per_token_latency_s": float(np.mean([per_token_latency_s(r) for r in done])),
    }
    for name, values in (("ttft", [ttft_s(r) for r in done]), ("tpot", [tpot_s(r) for r in done])):
        for q in (50, 90, 99):
            finite = [v for v in values if v == v]
            row[f"{name}_p{q}_s"] = float(np.percentile(finite, q)) if finite else float("nan")
    return row
