"""What the figures are drawn from: simulations in the paper's settings, kept under a key; its points; recorded runs.

Simulated results lie in data/simulated/, made by `figures --fresh` under a key of all code and constants that they depend
on; the paper's numbers in data/paper/; runs on real devices in data/recorded/. Called by `figures`.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neo_lite import hardware, machine, metrics, simulator, workload
from neo_lite.config import NeoLiteError
from neo_lite.hardware import DATA_DIR

SIMULATED = DATA_DIR / "simulated" / "runs.jsonl"
RECORDED = DATA_DIR / "recorded"
REQUESTS = 2000  # as in the paper
VLLM, SWIFT, NEO = "gpu-only", "gpu-only-unchunked", ("neo-released", "neo")
QUANTILES = tuple(range(0, 101, 5))
REMEDY = "`python -m neo_lite figures --fresh` computes them"


# ---- What is simulated ----


class Run(NamedTuple):
    """One simulation, whole: what it is looked up by, too. `rate` 0: all requests at once."""

    machine: str
    model: str
    mode: str
    workload: str
    rate: float
    requests: int
    gpu_kv_tokens: int
    cpu_kv_gib: float
    max_batched_tokens: int
    max_seqs: int


class Setting(NamedTuple):
    """Where the paper ran. NEO's GPU pool is smaller by one layer's share, in which prompts wait on their way to the CPU."""

    model: str
    max_batched_tokens: int
    max_seqs: int
    gpu_kv_tokens: tuple[int, int]  # the baselines', NEO's; 0: what the card holds (hardware.gpu_kv_tokens)
    cpu_kv_gib: float


_A10G = "llama-3.1-8b", 20480, 1024, (26400, 25600)
SETTINGS = {
    "t4-g4dn.4xlarge": Setting("llama-2-7b", 832, 512, (864, 832), 20),
    # The authors' script gives 120 GiB of CPU pool to the largest host, of 256: the others have the same share.
    "a10g-g5.2xlarge": Setting(*_A10G, 15), "a10g-g5.4xlarge": Setting(*_A10G, 30),
    "a10g-g5.8xlarge": Setting(*_A10G, 60), "a10g-g5.16xlarge": Setting(*_A10G, 120),
    # Not among our facts of the paper: a budget that holds AC's longest prompt (7,437 tokens), the CPU pool of the A10G.
    "2xh100": Setting("llama-3.1-70b", 8192, 1024, (0, 0), 120),
}  # fmt: skip


def run(machine_name: str, mode: str, load: str, rate: float = 0.0, requests: int = 0) -> Run:
    """A simulation in one of the paper's settings. Baselines do not depend on the host: one run serves all g5."""
    s = SETTINGS[machine_name]
    baseline = mode in (VLLM, SWIFT)
    if baseline and machine_name.startswith("a10g"):
        machine_name, s = "a10g-g5.4xlarge", SETTINGS["a10g-g5.4xlarge"]
    return Run(machine_name, s.model, mode, load, rate, requests or REQUESTS, s.gpu_kv_tokens[not baseline], s.cpu_kv_gib,
               s.max_batched_tokens, s.max_seqs)  # fmt: skip


def simulate(r: Run) -> dict[str, Any]:
    """What the figures need of one simulation, rounded so that every machine writes the same bytes."""
    model, costs, config = hardware.setting(
        r.machine, r.model, "float16", r.gpu_kv_tokens, r.cpu_kv_gib,
        mode=r.mode, max_batched_tokens=r.max_batched_tokens, max_seqs=r.max_seqs,
    )  # fmt: skip
    arrivals = workload.parse(r.workload, r.requests, r.rate or float("inf"))
    result = simulator.simulate(model, costs, config, arrivals)
    per_token_s = [metrics.per_token_latency_s(q) for q in result.requests]
    row = {
        "requests_per_s": metrics.request_throughput(result.requests),
        "window_per_s": metrics.window_throughput(result.requests),
        "latency_s": metrics.mean_per_token_latency_s(result.requests),
        "latency_quantiles_s": np.percentile(per_token_s, QUANTILES).tolist(),
        **{f"busy_{name}": value for name, value in result.busy_fractions.items()},
        "two_batches": sum(n for kind, n in result.kinds.items() if kind.startswith("two")) / len(result.iterations),
    }
    short = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.5g}"))
    return {"run": list(r), **short}


Results = Mapping[Run, Mapping[str, Any]]


def get(results: Results, r: Run | None, field: str) -> float:
    """nan if it was not simulated."""
    return results[r][field] if r and r in results else float("nan")


def ratio(results: Results, r: Run | None, field: str = "window_per_s", base: str = SWIFT) -> float:
    """A run's throughput over its baseline's: of the 30-70 % window, as the paper's, or of the whole run."""
    if r is None:
        return float("nan")
    other = run(r.machine, base, r.workload, requests=r.requests) if r.machine in SETTINGS else r._replace(mode=base)
    return get(results, r, field) / get(results, other, field)


# ---- Kept results, and what they were made by ----


@lru_cache
def key() -> str:
    """Of all code (comments and docstrings free) and constants that a simulation depends on."""
    modules = ("config", "hardware", "request", "blocks", "workload", "metrics", "cost_model", "scheduler", "neo",
               "engine", "simulator")  # fmt: skip
    folders = [DATA_DIR / "workloads", DATA_DIR / "profiles"]
    data = [DATA_DIR / "hardware.json", *(path for folder in folders for path in sorted(folder.glob("*.json")))]
    parts = [code(Path(__file__).with_name(f"{name}.py").read_text()) for name in modules]
    # a constant's source is a comment
    parts += [re.sub(r'(\[[^"\]]*, )"[^"]*"(?=\])', r'\1""', path.read_text()) for path in data]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def code(source: str) -> str:
    """Lines of a module that do something: the same in every version of Python, unlike a dump of its tree."""
    free: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            free |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    rows = ((i, re.sub(r"\s+#\s.*", "", row).strip()) for i, row in enumerate(source.splitlines(), 1))
    return "\n".join(row for i, row in rows if row and i not in free and not row.startswith("#"))


def read(path: Path) -> tuple[str, dict[Run, dict[str, Any]]]:
    """The key in the first line, and the results; a line that an interruption tore is left out. Raises NeoLiteError."""
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    made_by, rows = "", dict[Run, dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if number == 1:
                made_by = str(row["key"])
            else:
                rows[Run(*row["run"])] = row
        except (ValueError, KeyError, TypeError) as error:
            raise NeoLiteError(
                f"{path}, line {number}, is no simulated point: delete the file, then {REMEDY}"
            ) from error
    return made_by, rows


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """All at once or not at all, in an order of their own."""
    head = {"key": key(), "source": "simulated"}
    lines = [json.dumps(row) for row in (head, *sorted(rows, key=lambda r: str(r["run"])))]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text("\n".join(lines) + "\n")
    os.replace(part, path)


def cached() -> Path:
    """Where fresh results gather: one file a key, so that they never mix."""
    return machine.cache_folder() / "simulated" / f"{key()}.jsonl"


def compute(wanted: Sequence[Run], every: Sequence[Run]) -> None:
    """Simulates what this key has not simulated yet, so that an interrupted run goes on; if nothing is missing, all anew.

    Once `every` simulation is there, they replace data/simulated/.
    """
    from tqdm import tqdm

    rows = read(path := cached())[1]
    if set(wanted) <= set(rows):  # an earlier run came to its end: this one is another
        rows = {r: row for r, row in rows.items() if r not in set(wanted)}
    write(path, rows.values())
    missing = [r for r in dict.fromkeys(wanted) if r not in rows]
    workers = max(1, min(machine.usable_cores(), len(missing)))
    with get_context("spawn").Pool(workers, _worker) as pool, path.open("a") as file:
        done, what = pool.imap_unordered(simulate, missing), "simulating (Ctrl-C keeps what is done)"
        for row in tqdm(done, what, len(missing), unit=" runs", disable=not missing):
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows[Run(*row["run"])] = row
    if set(every) <= set(rows) and os.access(DATA_DIR, os.W_OK):
        write(SIMULATED, (rows[r] for r in every))


def _worker() -> None:
    """The fits, whatever files there are; and Ctrl-C belongs to the parent."""
    os.environ.pop("NEO_LITE_DATA", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def results(wanted: Sequence[Run]) -> dict[Run, dict[str, Any]]:
    """Kept results: data/simulated/, or fresh ones that are not all there yet. Says so where they are stale or missing.

    Raises NeoLiteError if there are none at all.
    """
    made_by, rows = read(SIMULATED)
    if made_by != key() and set(wanted) <= set(own := read(cached())[1]):
        return own
    if not rows:
        raise NeoLiteError(f"no simulated points in {SIMULATED}: {REMEDY}")
    if made_by != key():
        say_once(f"simulated points are stale, made by code {made_by or 'unknown'}, now {key()}: {REMEDY}")
    elif missing := set(wanted) - set(rows):
        say_once(f"{len(missing)} of {len(wanted)} simulated points are missing: {REMEDY}")
    return rows


def stale(wanted: Sequence[Run]) -> bool:
    """Whether `results` of these gives points that other code or other constants made."""
    return read(SIMULATED)[0] != key() and not set(wanted) <= set(read(cached())[1])


@lru_cache
def say_once(text: str) -> None:
    """On stderr, once in a process however many figures it concerns."""
    print(text, file=sys.stderr)


# ---- The paper's and recorded points ----


class Point(NamedTuple):
    """A number of the paper's; x is nan where it belongs to a whole curve."""

    curve: str
    x: float
    y: float
    what: str


def paper(figure: str, method: str = "digitised") -> list[Point]:
    """Numbers that the paper prints (`reported`), or points read off its plots."""
    with (DATA_DIR / "paper" / "points.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["figure"], r["method"]) == (figure, method)]
    return [Point(r["curve"], float(r["x"] or "nan"), float(r["y"]), r["what"]) for r in rows]


def curve_of(figure: str, curve: str) -> dict[float, float]:
    """A digitised curve: x -> y."""
    return {p.x: p.y for p in paper(figure) if p.curve == curve}


class Recorded(NamedTuple):
    """A run on real devices over the baseline of the same command."""

    source: str  # recorded: elsewhere; measured: here
    ran_on: str
    model: str
    mode: str
    workload: str
    requests: int
    per_s: float
    base: str  # its baseline's mode; "" without one
    ratio: float  # of the whole run, over its baseline's
    rate: float  # requests a second; 0: all at once
    latency_s: float  # mean per-token latency, as figure 6 has it; nan in older lines
    like: Run | None  # the simulation of the same run, where there is a preset of the machine

    @property
    def place(self) -> str:
        return self.like.machine if self.like else ""


def recorded(folder: Path) -> list[Recorded]:
    """Lines of `bench --json` in a folder's bench_*.json. A ratio stays inside one command and one stamp."""
    found, source = [], "recorded" if folder == RECORDED else "measured"
    for path in sorted(folder.glob("bench_*.json")):
        lines = lines_of(path)
        for line in lines:
            same = [b for b in lines if b["mode"] in (VLLM, SWIFT) and identity(b) == identity(line)]
            base, base_per_s = (same[0]["mode"], same[0]["requests_per_s"]) if same else ("", float("nan"))
            name, per_s = line["model"].removeprefix("random:"), line["requests_per_s"]
            found.append(Recorded(source, line["ran_on"], name, line["mode"], line["workload"], line["requests"], per_s,
                                  base, per_s / base_per_s, line.get("rate_per_s") or 0.0,
                                  line.get("mean_per_token_latency_s", float("nan")), _like(line)))  # fmt: skip
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    """One JSON object, a list of them, or one a line."""
    text = path.read_text().strip()
    try:
        data = json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines()]
    return data if isinstance(data, list) else [data]


def identity(line: Mapping[str, Any]) -> str:
    """What two runs must share to be compared: the command but for its mode, the machine and the code (not the date)."""
    stamp = {k: v for k, v in line["stamp"].items() if k != "date"}
    return json.dumps(
        [re.sub(r"--mode \S+", "", line["command"]), line["workload"], line["requests"], stamp], sort_keys=True
    )


def _like(line: Mapping[str, Any]) -> Run | None:
    option = dict(re.findall(r"--([\w-]+) (\S+)", line["command"]))
    preset = f"h200-{option.get('num-sms')}sm-{option.get('cpu-threads')}t"
    if preset not in hardware.HARDWARE:
        return None
    return Run(preset, line["model"].removeprefix("random:"), line["mode"], line["workload"],
               line.get("rate_per_s") or 0.0, line["requests"],
               line["gpu_kv_tokens"], line["cpu_kv_gib"], int(option.get("max-batched-tokens", 2048)), 512)  # fmt: skip
