"""How long the stages of one layer take, so that a scheduler can weigh plans before it runs them. Torch-free.

Two sources, one object: a `Profile` measured on one machine for one model (`profiler` makes it), or `hardware.roofline`, the
same curves from a `HardwareSpec`: bytes over bandwidth, FLOPs over rate. Seconds, of one layer unless the name says otherwise.
The scheduler weighs candidates with it, the simulator advances its clock by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neo_lite.config import NeoLiteError, is_int, is_number
from neo_lite.request import SubBatch, Work

Points = Sequence[tuple[float, float]]  # (x, seconds), x rising, seconds never falling
NOTHING = SubBatch()


class Curve:
    """Linear between its points and exact at them; beyond the last along the last segment, 0 at and below 0.

    Below the first point it stays at the first value: the work of one token is that of reading all weights.
    """

    def __init__(self, points: Points) -> None:
        if not points or any(len(p) != 2 for p in points):
            raise NeoLiteError(f"a curve is {points!r}: give at least one point (x, seconds)")
        xs, ys = (np.array(values, dtype=float) for values in zip(*points, strict=True))
        if not (np.isfinite(xs).all() and np.isfinite(ys).all() and (np.diff(xs) > 0).all() and ys[0] >= 0):
            raise NeoLiteError(f"a curve is {list(points)}: x must rise, and both numbers be finite")
        if (np.diff(ys) < 0).any():
            raise NeoLiteError(f"a curve is {list(points)}: the seconds fall, and a cost cannot")
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
        self.points, far = [(float(x), float(y)) for x, y in points], xs[-1] + 1e12
        first, xs, ys = np.interp(0.0, xs, ys), np.append(xs, far), np.append(ys, ys[-1] + slope * 1e12)
        self._inverse = ys + np.arange(len(ys)) * 1e-18, xs  # on a level stretch the last x counts
        # Above 0 it is at once at its first value.
        self._xs, self._ys = np.append([0.0, 1e-300], xs[xs > 1e-300]), np.append([0.0, first], ys[xs > 1e-300])
        self._known: dict[float, float] = {}  # a scheduler asks for the same widths again and again

    def __call__(self, x: float) -> float:
        if (seconds := self._known.get(x)) is None:
            if len(self._known) > 1 << 16:
                self._known.clear()
            seconds = self._known[x] = float(np.interp(x, self._xs, self._ys))
        return seconds

    def each(self, x: np.ndarray) -> np.ndarray:
        """Many at once."""
        return np.interp(x, self._xs, self._ys)

    def within(self, seconds: np.ndarray) -> np.ndarray:
        """The largest x that takes no longer than each of `seconds`; 0 where not even the first point does."""
        return np.interp(seconds, *self._inverse, left=0.0)


class Stages(NamedTuple):
    """One layer of an iteration: linear stages `l`, prefill attention, GPU and CPU decode attention of both sub-batches."""

    l0: float = 0.0
    pref0: float = 0.0
    ga0: float = 0.0
    ca0: float = 0.0
    l1: float = 0.0
    ca1: float = 0.0

    @property
    def gpu(self) -> float:
        return self.l0 + self.pref0 + self.ga0 + self.l1

    @property
    def layer(self) -> float:
        """What a layer takes without barriers: the GPU's work, the CPU's work, or one sub-batch's own chain."""
        return max(self.gpu, self.ca0 + self.ca1, self.ca0 + self.l0, self.ca1 + self.l1)

    @property
    def paper_layer(self) -> float:
        """The paper's estimate, a barrier after each of two stages: an upper bound of `layer`."""
        return max(self.l0, self.ca1) + max(self.l1 + self.ga0 + self.pref0, self.ca0)

    @property
    def slack(self) -> tuple[float, float]:
        """What is left of both inequalities, Tca1 <= Tl0 and Tca0 <= Tl1 + Tga0; none may be negative."""
        return self.l0 - self.ca1, self.l1 + self.pref0 + self.ga0 - self.ca0

    @property
    def holds(self) -> bool:
        """Both inequalities, up to rounding."""
        spare = min(self.slack)
        return spare >= 0 or spare >= -1e-9 * self.layer


class Candidate(NamedTuple):
    """A schedule that was weighed: x requests in T seconds."""

    name: str
    batches: tuple[SubBatch, ...]
    stages: Stages  # of one layer
    requests: int
    seconds: float

    @property
    def rate(self) -> float:
        """x/T, the paper's objective: requests (tokens) a second."""
        return self.requests / max(self.seconds, 1e-12)


@dataclass(frozen=True)
class Profile:
    """Stage times of one model on one machine; curves may be given as lists of points."""

    num_layers: int
    linear: Curve  # tokens -> pre + post projection
    prefill_attn: Curve  # tokens of one prompt -> its attention
    gpu_attn: Curve  # KV tokens read -> decode attention on the GPU
    cpu_attn: Curve  # KV tokens read -> decode attention on the CPU, copies of q, k, v and of the output included
    head: Curve  # requests that sample -> head, once an iteration
    transfer: Curve = Curve([(1, 0.0)])  # bytes of KV -> a copy between the pools
    all_reduce: Curve = Curve([(1, 0.0)])  # tokens -> both all-reduces of a layer, with tensor parallelism
    cpu_request_tokens: float = 0.0  # what a CPU decode costs besides reading, in KV tokens
    overhead_s: float = 0.0  # an iteration beyond its stages: rows, launches, sampling that the GPU waits for
    prefill_overhead_s: float = 0.0  # and with prefills, which no CUDA graph replays
    pair_overhead_s: float = 0.0  # and with CPU decodes, whose attention the GPU joins at every layer
    launch_s: float = 0.0  # a layer's launches while the CPU computes: only where both share a thread (released NEO)
    model: str = ""
    dtype: str = ""
    threads: int = 0
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in ("int", "float") and not (is_number(value) and 0 <= value < np.inf):
                raise NeoLiteError(f"a profile's {f.name} is {value!r}: give a number from 0 on")
            if f.type == "Curve" and not isinstance(value, Curve):
                object.__setattr__(self, f.name, Curve([tuple(p) for p in value]))
        if not is_int(self.num_layers) or not self.num_layers:
            raise NeoLiteError(f"a profile's num_layers is {self.num_layers!r}: give a whole number from 1 on")

    # ---- One stage ----

    def t_linear(self, tokens: float) -> float:
        return self.linear(tokens) + (self.all_reduce(tokens) if self.reduces else 0.0)

    def t_linear_each(self, tokens: np.ndarray) -> np.ndarray:
        return self.linear.each(tokens) + (self.all_reduce.each(tokens) if self.reduces else 0.0)

    @cached_property
    def reduces(self) -> bool:
        """Whether there is anything to all-reduce."""
        return any(seconds for _, seconds in self.all_reduce.points)

    def t_prefill_attn(self, works: Iterable[Work]) -> float:
        """A later chunk costs what the prompt up to its end costs, less what its earlier part did."""
        return sum([self._prompt_attn(s + n) - (self._prompt_attn(s) if s else 0.0) for _, s, n in works])

    def _prompt_attn(self, tokens: float) -> float:
        """Beyond the curve, which ends with the longest chunk, along a parabola: each token attends to all before it."""
        last, last_s = self.prefill_attn.points[-1]
        return self.prefill_attn(tokens) if tokens <= last else last_s * (tokens / last) ** 2

    def t_gpu_attn(self, kv_tokens: float) -> float:
        return self.gpu_attn(kv_tokens)

    def t_cpu_attn(self, requests: float, kv_tokens: float) -> float:
        return self.cpu_attn(kv_tokens + requests * self.cpu_request_tokens)

    def t_transfer(self, num_bytes: float) -> float:
        """Of all layers together: copies run beside the layers."""
        return self.transfer(num_bytes)

    def t_head(self, requests: float) -> float:
        return self.head(requests)

    # ---- An iteration ----

    def stages(self, batches: Sequence[SubBatch], ga0: float | None = None) -> Stages:
        """One layer of one or two sub-batches. `ga0`: the attention of the first one's GPU decodes, where it is known."""
        first, second = [*batches, NOTHING, NOTHING][:2]
        launch_s = self.launch_s if second else 0.0
        return Stages(
            self.t_linear(first.num_tokens), self.t_prefill_attn(first.prefills),
            self.t_gpu_attn(kv_tokens(first.gpu_decodes)) if ga0 is None else ga0,
            self.t_cpu_attn(len(first.cpu_decodes), kv_tokens(first.cpu_decodes)) + launch_s,
            self.t_linear(second.num_tokens),
            self.t_cpu_attn(len(second.cpu_decodes), kv_tokens(second.cpu_decodes)) + launch_s,
        )  # fmt: skip

    def iteration_s(self, stages: Stages, sampling: int) -> float:
        """All layers, the head for `sampling` requests, and what comes once. Launches on the CPU's thread bring barriers."""
        layer_s = stages.paper_layer if self.launch_s else stages.layer
        return self.num_layers * layer_s + self.t_head(sampling) + self.overhead(stages)

    def overhead(self, stages: Stages) -> float:
        """What comes once an iteration."""
        prefill_s = self.prefill_overhead_s if stages.pref0 else 0.0
        return self.overhead_s + prefill_s + (self.pair_overhead_s if stages.l1 or stages.ca0 else 0.0)

    def candidate(self, name: str, batches: Sequence[SubBatch], ga0: float | None = None) -> Candidate:
        """A schedule with its estimate."""
        stages, count = self.stages(batches, ga0), sum([len(b) for b in batches])
        return Candidate(name, tuple([b for b in batches if len(b)]), stages, count, self.iteration_s(stages, count))

    def capacity(self, seconds: np.ndarray) -> np.ndarray:
        """How much CPU attention fits into each of `seconds`: KV tokens + requests x cpu_request_tokens."""
        return self.cpu_attn.within(seconds - self.launch_s)

    @cached_property
    def ridge_tokens(self) -> int:
        """Where the linear stage leaves the memory-bound regime: reading the weights takes as long as the arithmetic."""
        x1, y1 = self.linear.points[-1]
        low = [p for p in self.linear.points if 4 * p[0] <= x1]  # a long stretch: a short one is at the mercy of noise
        x0, y0 = low[-1] if low else self.linear.points[0]
        per_token_s = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
        return max(1, round(self.linear(1) / per_token_s)) if per_token_s > 0 else 1

    # ---- Files ----

    @property
    def source(self) -> str:
        """Where the stage times come from, for people: a machine that was measured, or a roofline."""
        return f"roofline of {self.stamp['hardware']}" if "hardware" in self.stamp else machine_in(self.stamp)

    def check(self, model: str, dtype: str, stamp: Mapping[str, Any] | None = None, threads: int = 0) -> Profile:
        """Itself; raises NeoLiteError unless it is of this model and dtype, and of this machine and threads, if given."""
        pairs: dict[str, tuple[Any, Any]] = {"model": (self.model, model), "dtype": (self.dtype, dtype)}
        if stamp and "gpu" in self.stamp:
            pairs["machine"] = machine_in(self.stamp), machine_in(stamp)
            pairs["number of threads"] = self.threads, threads
        for what, (ours, asked) in pairs.items():
            if ours and asked and ours != asked:
                remedy = "measure one here with python -m neo_lite profile"
                raise NeoLiteError(f"the profile is of another {what}, {ours}, not {asked}: {remedy}")
        return self

    def plain(self) -> dict[str, Any]:
        """Its values for JSON, curves as lists of points."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: v.points if isinstance(v, Curve) else v for n, v in values.items()}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.plain()) + "\n")

    @staticmethod
    def load(path: str | Path) -> Profile:
        try:
            profile = Profile(**json.loads(Path(path).read_text()))
            _ = profile.source  # its stamp can be read
            return profile
        except OSError as error:
            raise NeoLiteError(f"profile {path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise NeoLiteError(f"{path} holds no profile ({error}): make one with python -m neo_lite profile") from None


def machine_in(stamp: Mapping[str, Any]) -> str:
    """What a stamp was made on, as far as it decides stage times: the GPU or the part of it, and the CPU."""
    card, host = stamp.get("gpu"), f"{stamp.get('usable_cores')} cores of {stamp.get('cpu')}"
    return f"{card['partition_sms'] or card['sms']} SMs of {card['name']}, {host}" if card else host


def kv_tokens(works: Iterable[Work]) -> int:
    """KV tokens that their attention reads in each layer."""
    return sum([start + length for _, start, length in works])
