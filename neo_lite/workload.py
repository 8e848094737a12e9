"""What arrives: lengths and arrival times of requests, seeded. Called by the bench, the simulator, figures and notebooks.

A workload is named by a string, and `parse` turns it into a list of arrivals:

    synthetic:1000,200   lengths uniform within 10 % of these means (the paper's figures 9 and 10)
    osc                  OpenAI summarization comparisons, Llama-2's tokens: short requests (figure 6c)
    azure-code           Azure's code trace of 2023, the paper's AC: long prompts, short outputs (figures 6a, 6b, 7, 8a)
    azure-conv           Azure's conversation trace of 2023: longer outputs (not in the paper)
    trace:FILE.csv       your own file, in the columns of Azure's: TIMESTAMP,ContextTokens,GeneratedTokens

Arrivals are Poisson, as in the paper, unless `@trace` follows the name (azure-code@trace): then they come as recorded,
bursts and all. The real files are used where $NEO_LITE_DATA names a folder that holds them; everywhere else requests
are drawn from the compact fits in data/workloads/, and `source` says which of the two it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from neo_lite.config import NeoLiteError, is_int
from neo_lite.machine import cache_folder

NAMES = ("osc", "azure-code", "azure-conv")  # each has a file in data/workloads/: its fit, its address, its checksum
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
RECORDED = "@trace"
_HERE = Path(__file__).parent
FITS_DIR = (_HERE if (_HERE / "data").is_dir() else _HERE.parent) / "data" / "workloads"
MAX_COUNT = 10_000_000
MAX_TOKENS = 2**31
MIN_RATE_PER_S = 1e-6


@dataclass(frozen=True)
class Arrival:
    """One request to come: when, how long its prompt is, how many tokens it will generate."""

    time_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in the order of a file, or drawn from a fit."""

    source: str  # what a result states
    prompt_tokens: np.ndarray  # [requests]
    output_tokens: np.ndarray  # [requests]
    times_s: np.ndarray | None = None  # [requests], from 0 on, never falling; None where none were recorded

    def arrivals(self, count: int, rate_per_s: float = inf, seed: int = 0, recorded: bool = False) -> list[Arrival]:
        """The first `count` requests. They arrive by a Poisson process (all at time 0 if the rate is infinite) or, if
        `recorded`, at the trace's times, stretched to a mean gap of 1 / rate if a rate is given."""
        _check(count, rate_per_s, seed)
        if count > len(self.prompt_tokens):
            raise NeoLiteError(f"{count} requests asked, {self.source} has {len(self.prompt_tokens)}: ask for fewer")
        if not recorded:
            times_s = poisson(np.random.default_rng((seed, 1)), rate_per_s, count)
        elif self.times_s is None:
            raise NeoLiteError(f"{self.source} has no recorded arrivals: leave {RECORDED} out")
        else:
            times_s = _stretched(self.times_s[:count], rate_per_s)
        columns = times_s, self.prompt_tokens[:count], self.output_tokens[:count]
        return list(map(Arrival, *(column.tolist() for column in columns)))  # plain numbers, not numpy's


def parse(text: str, count: int, rate_per_s: float = inf, seed: int = 0) -> list[Arrival]:
    """`count` requests of the workload `text`, all at time 0 if the rate is infinite (`@trace`: at the trace's pace).

    A real file gives its first `count` rows in its order, which is the paper's order of OSC; the seed then moves only the
    Poisson arrivals. With one seed, lengths are the same at every rate. Raises NeoLiteError.
    """
    _check(count, rate_per_s, seed)
    name = text.removesuffix(RECORDED)
    return _requests(name, count, seed).arrivals(count, rate_per_s, seed, recorded=name != text)


def source(text: str) -> str:
    """Where the requests of this workload come from, here and now, in one line for a result to state."""
    return _requests(text.removesuffix(RECORDED), 1, 0).source


def _requests(name: str, count: int, seed: int) -> Trace:
    """From the file that the name or $NEO_LITE_DATA points to, else drawn from the fit."""
    if match := re.fullmatch(r"synthetic:([0-9]{1,9}),([0-9]{1,9})", name):
        return _uniform(count, int(match[1]), int(match[2]), 0.1, seed)
    if name.startswith("trace:"):
        return _read(Path(os.path.expanduser(name.removeprefix("trace:"))), limit=count)
    if os.environ.get("NEO_LITE_DATA"):
        return load_trace(name)
    return draw(name, count, seed)


def _check(count: int, rate_per_s: float, seed: int) -> None:
    if not is_int(count) or not 1 <= count <= MAX_COUNT:
        raise NeoLiteError(f"count is {count!r}: give a whole number of requests from 1 to {MAX_COUNT}")
    if not rate_per_s >= MIN_RATE_PER_S:  # nan, too
        raise NeoLiteError(f"rate is {rate_per_s!r}: give requests per second from {MIN_RATE_PER_S} on, or inf")
    if not is_int(seed) or seed < 0:
        raise NeoLiteError(f"seed is {seed!r}: give a whole number from 0 on")


# ---- Synthetic lengths, arrival times ----


def synthetic(
    count: int, prompt_tokens: int, output_tokens: int, rate_per_s: float = inf, spread: float = 0.1, seed: int = 0
) -> list[Arrival]:
    """`count` requests, lengths uniform in mean x (1 +- spread); all at time 0 if the rate is infinite."""
    _check(count, rate_per_s, seed)
    return _uniform(count, prompt_tokens, output_tokens, spread, seed).arrivals(count, rate_per_s, seed)


def _uniform(count: int, prompt_tokens: int, output_tokens: int, spread: float, seed: int) -> Trace:
    rng, lengths = np.random.default_rng(seed), []
    for name, mean in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if mean < 1:
            raise NeoLiteError(f"{name} is {mean}: a workload needs at least 1")
        low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
        lengths.append(rng.integers(max(1, low), max(1, high) + 1, count))
    return Trace(f"synthetic: {prompt_tokens} and {output_tokens} tokens, uniform within {spread:.0%}", *lengths)


def poisson(rng: np.random.Generator, rate_per_s: float, count: int) -> np.ndarray:
    """Arrival times of a Poisson process: exponential gaps with mean 1 / rate."""
    return np.cumsum(rng.exponential(1 / rate_per_s, count))


def _stretched(times_s: np.ndarray, rate_per_s: float) -> np.ndarray:
    """Recorded times at a rate: the mean gap becomes 1 / rate, the bursts stay. An infinite rate leaves them alone."""
    if rate_per_s == inf or len(times_s) == 1:
        return times_s
    if not times_s[-1]:
        raise NeoLiteError(f"the first {len(times_s)} requests of the trace arrive at one time: leave the rate out")
    return times_s * ((len(times_s) - 1) / rate_per_s / times_s[-1])


# ---- Fits ----


def read_fit(name: str) -> dict[str, Any]:
    """What data/workloads/ knows of a workload: its fit, and the file that it is a fit of (address, sha256, licence)."""
    if name not in NAMES:
        known = f"synthetic:PROMPT,OUTPUT (synthetic:1000,200), {', '.join(NAMES)} or trace:FILE.csv"
        raise NeoLiteError(f"workload {name!r:.200} is unknown: choose {known}; {RECORDED} after it: recorded arrivals")
    return json.loads((FITS_DIR / f"{name}.json").read_text(encoding="utf-8"))


def draw(name: str, count: int, seed: int = 0) -> Trace:
    """Requests from a fit: a cell of the joint histogram of (prompt, output), then uniform inside it, so that the
    correlation of the two survives as far as the bins are fine."""
    fit, rng = read_fit(name), np.random.default_rng(seed)
    cells = np.array(fit["requests_in_bins"])  # [prompt bins, output bins]
    bins = np.divmod(rng.choice(cells.size, count, p=cells.ravel() / cells.sum()), cells.shape[1])
    edges = [np.array(fit[key]) for key in ("prompt_edges", "output_edges")]  # bin i: edges[i] to edges[i + 1] - 1
    prompts, outputs = (rng.integers(edge[i], edge[i + 1]) for i, edge in zip(bins, edges))
    return Trace(fit["source"], prompts, outputs, _draw_times(fit, rng, count))


def _draw_times(fit: dict[str, Any], rng: np.random.Generator, count: int) -> np.ndarray | None:
    """A Poisson process whose rate follows the trace's arrivals in short intervals, over and over if it is too short: a
    process of rate 1, its time mapped by the inverse of the arrivals expected so far."""
    if "arrivals_in_intervals" not in fit:
        return None
    expected = np.concatenate([[0], np.cumsum(fit["arrivals_in_intervals"])])  # [intervals + 1] at their ends
    ends_s = np.arange(len(expected)) * fit["interval_s"]
    laps, within = np.divmod(poisson(rng, 1.0, count), expected[-1])
    times_s = laps * ends_s[-1] + np.interp(within, expected, ends_s)
    return times_s - times_s[0]


# ---- Real files ----


def load_trace(name: str, download: bool = False) -> Trace:
    """The real file of osc, azure-code or azure-conv, its sha256 checked: from $NEO_LITE_DATA, else from the folder
    workloads/ in the cache, where `download` puts it from its public address. `parse` uses it if NEO_LITE_DATA names it."""
    fit, folder = read_fit(name), os.environ.get("NEO_LITE_DATA")
    path = (Path(os.path.expanduser(folder)) if folder else cache_folder() / "workloads") / fit["file"]
    if download and not folder:
        _fetch(fit, path)
    return _read(path, fit["sha256"])


def _fetch(fit: dict[str, Any], path: Path) -> None:
    """Into the cache, whole and checked or not at all; nothing is done if it is there."""
    import urllib.request  # slow to import, and needed here only

    try:
        if os.path.isfile(path) and hashlib.sha256(path.read_bytes()).hexdigest() == fit["sha256"]:
            return
        with urllib.request.urlopen(fit["url"], timeout=20.0) as answer:
            raw = answer.read()
        if (digest := hashlib.sha256(raw).hexdigest()) != fit["sha256"]:
            raise OSError(f"its sha256 is {digest:.12}, not {fit['sha256']:.12}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(raw)
        os.replace(part, path)
    except Exception as error:  # urllib's, http's and the disk's own kinds
        remedy = f"get online, set NEO_LITE_DATA to a folder that holds {path.name}, or use the fit"
        raise NeoLiteError(f"{fit['url']} could not be fetched to {path.parent} ({error}): {remedy}") from error


def _read(path: Path, sha256: str = "", limit: int | None = None) -> Trace:
    """One of the files above, or a user's CSV, of which `limit` requests are read."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # not there, no file, not text
        remedy = "get it by load_trace(..., download=True), or unset NEO_LITE_DATA" if sha256 else "name a CSV file"
        raise NeoLiteError(f"trace {path} cannot be read ({error}): {remedy}") from error
    digest = hashlib.sha256(raw).hexdigest()
    if sha256 not in ("", digest):
        raise NeoLiteError(f"{path} has sha256 {digest:.12}, not {sha256:.12}: download it again")
    named = f"file {path.name} (sha256 {digest:.12})"
    if sha256 and path.suffix == ".json":  # OSC: lengths only
        return Trace(named, *(np.array([row[key] for row in json.loads(text)]) for key in ("prompt", "max_tokens")))
    rows = np.array(list(itertools.islice(_csv_rows(path, text), limit))).reshape(-1, 3)
    return Trace(named, rows[:, 1].astype(int), rows[:, 2].astype(int), rows[:, 0] - rows[:1, 0])


def _csv_rows(path: Path, text: str) -> Iterator[tuple[float, int, int]]:
    """(time, prompt, output) of each line; raises NeoLiteError with the line that is malformed and what it holds."""
    rows = ([field.strip(' "') for field in line.split(",")] for line in text.splitlines())
    header, before_s, wanted = next(rows, []), -1e300, ", ".join(COLUMNS)
    if not set(COLUMNS) <= set(header):
        raise NeoLiteError(f"{path}, line 1, holds {','.join(header)!r:.120}: name the columns {wanted}")
    where = [header.index(name) for name in COLUMNS]
    for number, row in enumerate(rows, 2):
        if row == [""]:
            continue
        try:
            time_s, prompt, output = _seconds(row[where[0]]), int(row[where[1]]), int(row[where[2]])
            sound = before_s <= time_s < inf and 0 < prompt < MAX_TOKENS and 0 < output < MAX_TOKENS  # nan is not
        except (ValueError, IndexError):
            sound = False
        if not sound or len(row) != len(header):
            remedy = f"write {wanted}, times in order, tokens from 1 on"
            raise NeoLiteError(f"{path}, line {number}, holds {','.join(row)!r:.120}: {remedy}")
        yield time_s, prompt, output
        before_s = time_s


def _seconds(stamp: str) -> float:
    """A number of seconds, or a date and time of day (UTC), such as 2023-11-16 18:17:03.9799600."""
    if match := re.fullmatch(r"([0-9-]{10}[ T][0-9:]{8})(\.[0-9]+)?(Z|\+00:00)?", stamp):
        return datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc).timestamp() + float(match[2] or 0)
    return float(stamp)


# ---- What callers do with arrivals ----


def clip(arrivals: list[Arrival], max_position: int) -> tuple[list[Arrival], int]:
    """The requests that fit into a model's context with all their output, and how many were dropped.

    Dropped, not shortened, so that those that stay keep the lengths of the workload. The paper never had to choose: it ran
    OSC (at most 652 tokens) on Llama-2-7B and AC (at most 7,841) on Llama-3.1; its released engine refuses longer requests.
    """
    kept = [a for a in arrivals if a.prompt_tokens + a.output_tokens <= max_position]
    if not kept:
        raise NeoLiteError(f"none of {len(arrivals)} requests fits {max_position} positions: choose a longer context")
    return kept, len(arrivals) - len(kept)


def random_prompt(arrival: Arrival, vocab_size: int, seed: int) -> tuple[int, ...]:
    """A prompt of that length with random token ids, for speed measurements (ids from 3 up: not BOS, EOS, padding)."""
    rng = np.random.default_rng(seed)
    return tuple(int(t) for t in rng.integers(min(3, vocab_size - 1), vocab_size, arrival.prompt_tokens))
