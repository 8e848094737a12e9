"""Makes the fits in data/workloads/ from the real files: a joint histogram of lengths, and arrivals in short intervals.

    NEO_LITE_DATA=folder-with-the-files python tools/fit_workloads.py

What a fit's file says of its source (address, sha256, licence) stays as it is; the numbers are made anew. Without
NEO_LITE_DATA the files are downloaded.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from neo_lite import workload

QUANTILES = np.concatenate([np.linspace(0, 1, 41), [0.01, 0.99]])
ATOM = 0.01  # of all requests: a single length as frequent as this gets a bin of its own
TAIL_RATIO = 1.25  # beyond the 90th percentile no bin is wider than this, so that uniform inside it is near the truth
INTERVAL_S = 2.0


def bin_edges(lengths: np.ndarray) -> list[int]:
    """Bin i holds edges[i] to edges[i + 1] - 1: quantiles, frequent lengths, and a geometric ladder over the tail."""
    quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    values, counts = np.unique(lengths, return_counts=True)
    atoms = values[counts >= ATOM * len(lengths)]
    top, longest = np.quantile(lengths, 0.9), lengths.max()
    ladder = top * TAIL_RATIO ** np.arange(1, np.log(longest / top) / np.log(TAIL_RATIO))
    return sorted({int(edge) for part in (quantiles, atoms, atoms + 1, ladder, [longest + 1]) for edge in part})


def fit(trace: workload.Trace) -> dict[str, Any]:
    """The numbers of a fit, plain values for JSON."""
    lengths = trace.prompt_tokens, trace.output_tokens
    edges = [bin_edges(column) for column in lengths]
    cells = np.histogram2d(*lengths, bins=edges)[0].astype(int)  # [prompt bins, output bins]
    made: dict[str, Any] = {
        "requests": len(lengths[0]), "prompt_edges": edges[0], "output_edges": edges[1],
        "requests_in_bins": cells.tolist(),
    }  # fmt: skip
    if trace.times_s is not None:
        intervals = np.bincount((trace.times_s // INTERVAL_S).astype(int))
        made |= {"interval_s": INTERVAL_S, "arrivals_in_intervals": intervals.tolist()}
    return made


def main() -> None:
    for name in workload.NAMES:
        facts = workload.read_fit(name) | fit(workload.load_trace(name, download=True))
        rows = (
            f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}"
            for key, value in facts.items()
        )
        path = workload.FITS_DIR / f"{name}.json"
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
        print(f"{path.name}: {facts['requests']} requests, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
