"""The engine on a virtual clock: the same `Engine` and scheduler, and an executor that costs time instead of computing.

An iteration takes what the cost model says; tokens are dummies, so no weights are needed and a run of hours takes
seconds. Its figures are simulated, and say so. Called by `python -m neo_lite simulate`, the notebooks, the explorer.

One layer as it is charged and drawn, `layer` seconds long (`Stages.layer`; 0, 1: the sub-batches):

    gpu   | l0 | pref0 | ga0 | (bubble) | l1 |        l: linear stages, ga: attention of the GPU decodes
    cpu   | ca1 |        | ca0 |                      ca1 began after the last layer's l1, ca0 begins after l0
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from neo_lite import metrics
from neo_lite.config import EngineConfig, ModelConfig, NeoLiteError
from neo_lite.cost_model import Profile, Stages
from neo_lite.engine import Engine, check_sampling
from neo_lite.request import IterationPlan, Request, SamplingParams
from neo_lite.timeline import Timeline
from neo_lite.workload import Arrival

DUMMY = 1  # the token that every iteration samples
WINDOW_REQUESTS = 2000


class Iteration(NamedTuple):
    """What one iteration took, and why: enough to draw it again."""

    start_s: float
    end_s: float
    kind: str
    stages: Stages  # of one layer
    layer_s: float
    head_s: float
    transfer_s: float  # KV over the link, of all layers
    tokens: int  # in the linear stages
    requests: tuple[int, int, int]  # prefills, GPU decodes, CPU decodes
    waiting: int  # requests that no pool has room for, after planning
    swaps: int
    forced: bool  # against the policy's own rule, since somebody waited too long or nothing else could run


class VirtualDevices:
    """An executor, and the clock that it moves."""

    def __init__(self, model: ModelConfig, costs: Profile, config: EngineConfig, keep_plans: bool = False) -> None:
        self.costs, self.config, self.now_s = costs, config, 0.0
        self.kv_bytes = model.kv_bytes_per_token(costs.dtype or "float16")
        self.iterations: list[Iteration] = []
        self.plans: list[IterationPlan] | None = [] if keep_plans else None
        self.queue: Sequence[Request] = ()  # the scheduler's, to record its length

    def clock(self) -> float:
        return self.now_s

    def run(self, plan: IterationPlan) -> dict[int, int]:
        """Moves the clock to the iteration's end and samples a dummy for each request whose tokens are all computed."""
        costs, start_s = self.costs, self.now_s
        tokens = {w.request.id: DUMMY for b in plan.batches for works in (b.gpu_decodes, b.cpu_decodes) for w in works}
        tokens.update({w.request.id: DUMMY for b in plan.batches for w in b.prefills if w.samples})
        stages = costs.stages(plan.batches)
        layer_s = stages.paper_layer if costs.launch_s else stages.layer
        head_s, transfer_s = costs.t_head(len(tokens)), costs.t_transfer(self._link_bytes(plan))
        self.now_s = start_s + overlapped(costs.num_layers, layer_s, transfer_s) + head_s + costs.overhead(stages)
        self.iterations.append(
            Iteration(
                start_s, self.now_s, kind_of(plan), stages, layer_s, head_s, transfer_s,
                sum(b.num_tokens for b in plan.batches), count(plan), len(self.queue), len(plan.moves),
                bool(plan.forced),
            )
        )  # fmt: skip
        if self.plans is not None:
            self.plans.append(plan)
        return tokens

    def _link_bytes(self, plan: IterationPlan) -> int:
        """KV that changes pools: swapped requests by whole blocks, and prefills whose KV belongs on the CPU."""
        blocks = sum(len(move.source_blocks) for move in plan.moves)
        leaving = sum(w.length for b in plan.batches for w in b.prefills if w.request.device == "cpu")
        return (blocks * self.config.block_size + leaving) * self.kv_bytes


def overlapped(num_layers: int, layer_s: float, transfer_s: float) -> float:
    """All layers beside their KV's copies, layer by layer: the slower of the two, and one layer of the other.

    A swap-in's first layer has to arrive before the first layer computes, the last layer of a prefill's KV leaves
    after the last layer has computed it; in between both go on.
    """
    copy_s = transfer_s / num_layers
    return num_layers * max(layer_s, copy_s) + min(layer_s, copy_s)


def kind_of(plan: IterationPlan) -> str:
    """One or two sub-batches, with or without prefills."""
    size = "two batches" if len(plan.batches) == 2 else "one batch"
    return size + (", with prefills" if any(b.prefills for b in plan.batches) else ", decodes only")


def count(plan: IterationPlan) -> tuple[int, int, int]:
    """Requests by kind: prefills, GPU decodes, CPU decodes."""
    sizes = [(len(b.prefills), len(b.gpu_decodes), len(b.cpu_decodes)) for b in plan.batches]
    return sum([p for p, _, _ in sizes]), sum([g for _, g, _ in sizes]), sum([c for _, _, c in sizes])


class SimResult(NamedTuple):
    """A run on the virtual clock: requests in order of arrival, every iteration, and the plans if they were kept."""

    costs: Profile
    requests: list[Request]
    iterations: list[Iteration]
    plans: list[IterationPlan] | None = None

    @property
    def kinds(self) -> dict[str, int]:
        """Iterations by kind."""
        return dict(sorted(Counter(i.kind for i in self.iterations).items()))

    @property
    def span_s(self) -> float:
        """From the first arrival to the last iteration's end."""
        return self.iterations[-1].end_s - min(r.arrival_s for r in self.requests)

    @property
    def busy_fractions(self) -> dict[str, float]:
        """Of the whole run: how much of it the GPU and the CPU's attention were at work."""
        layers, every = self.costs.num_layers, self.iterations
        gpu_s = sum(layers * i.stages.gpu + i.head_s for i in every)
        cpu_s = sum(layers * (i.stages.ca0 + i.stages.ca1) for i in every)
        return {"gpu": gpu_s / self.span_s, "cpu": cpu_s / self.span_s}

    def summary(self) -> dict[str, Any]:
        """Throughput, latencies, iterations by kind, busy fractions: plain values for JSON.

        Figure 10a's window only from 2,000 requests on: with fewer it reads more than the GPU could do.
        """
        window = {"requests_per_s_30_70": metrics.window_throughput(self.requests)}
        return {
            "seconds": self.span_s, **metrics.summary(self.requests),
            **(window if len(self.requests) >= WINDOW_REQUESTS else {}), "iterations": self.kinds,
            "forced_share": sum(i.forced for i in self.iterations) / len(self.iterations),
            "swaps": sum(r.num_swaps for r in self.requests),
            "recomputes": sum(r.num_recomputes for r in self.requests),
            "busy_fractions": {name: round(value, 4) for name, value in self.busy_fractions.items()},
        }  # fmt: skip

    def timeline(self, first: int = 0, last: int | None = None) -> Timeline:
        """The stages of iterations `first` to `last` (excluded), layer by layer, for the three renderers."""
        timeline = Timeline()
        for iteration in self.iterations[first:last]:
            draw(timeline, iteration, self.costs)
        return timeline


def simulate(
    model: ModelConfig, costs: Profile, config: EngineConfig, arrivals: Sequence[Arrival], keep_plans: bool = False,
    progress: Callable[[int], object] = lambda finished: None,
) -> SimResult:  # fmt: skip
    """Serves `arrivals` to the last answer. `progress` is told, after each iteration, how many have finished."""
    devices = VirtualDevices(model, costs, config, keep_plans)
    engine = Engine(config, model, devices, clock=devices.clock, costs=costs)
    devices.queue = engine.scheduler.waiting
    pending, requests = deque(sorted(arrivals, key=lambda a: a.time_s)), list[Request]()
    if not pending:
        raise NeoLiteError("the workload is empty: give at least one request")
    while pending or engine.scheduler.unfinished:
        if not engine.scheduler.unfinished:  # idle: nothing happens until the next arrival
            devices.now_s = max(devices.now_s, pending[0].time_s)
        while pending and pending[0].time_s <= devices.now_s:
            requests.append(_add(engine, pending.popleft(), len(requests)))
        before = engine.iterations
        engine.step()
        if engine.iterations == before:
            if not pending:
                raise NeoLiteError(
                    f"{engine.scheduler.unfinished} requests wait and no plan serves them: enlarge the pools"
                )
            devices.now_s = max(devices.now_s, pending[0].time_s)
        progress(len(requests) - engine.scheduler.unfinished)
    return SimResult(costs, requests, devices.iterations, devices.plans)


def _add(engine: Engine, arrival: Arrival, index: int) -> Request:
    """Queues a request as of its arrival, which may lie within the iteration that has just ended."""
    sampling = SamplingParams(arrival.output_tokens, ignore_eos=True)
    try:
        check_sampling(sampling, arrival.prompt_tokens, engine.model)  # before a prompt of that length is made
        request = engine.add(_prompt(arrival.prompt_tokens), sampling)
    except NeoLiteError as error:
        raise NeoLiteError(f"request {index} of the workload: {error}") from None
    request.arrival_s = arrival.time_s
    return request


def _prompt(length: int) -> tuple[int, ...]:
    return (DUMMY,) * length


def draw(timeline: Timeline, i: Iteration, costs: Profile) -> None:
    """One iteration's events: what comes once, then each layer as the module's picture shows it, then the head."""
    overhead_s = costs.overhead(i.stages)
    start_s = i.start_s + overhead_s
    copy_s = i.transfer_s / costs.num_layers
    stride_s, first_s = max(i.layer_s, copy_s), start_s + copy_s
    _event(timeline, "scheduler", "overhead", i.start_s, overhead_s)
    for layer in range(costs.num_layers):
        _event(timeline, "h2d" if i.swaps else "d2h", "swap", start_s + layer * stride_s, copy_s, layer=layer)
        _draw_layer(timeline, i, first_s + layer * stride_s, layer)
    _event(timeline, "gpu", "head", i.end_s - i.head_s, i.head_s)


def _draw_layer(timeline: Timeline, i: Iteration, base_s: float, layer: int) -> None:
    s = i.stages
    _event(timeline, "gpu", "linear", base_s, s.l0, layer=layer, batch=0)
    _event(timeline, "gpu", "prefill_attn", base_s + s.l0, s.pref0, layer=layer, batch=0)
    _event(timeline, "gpu", "gpu_attn", base_s + s.l0 + s.pref0, s.ga0, layer=layer, batch=0)
    _event(timeline, "gpu", "linear", base_s + i.layer_s - s.l1, s.l1, layer=layer, batch=1)
    _event(timeline, "cpu", "cpu_attn", base_s, s.ca1, layer=layer, batch=1)
    _event(timeline, "cpu", "cpu_attn", base_s + max(s.l0, s.ca1), s.ca0, layer=layer, batch=0)


def _event(timeline: Timeline, lane: str, name: str, start_s: float, seconds: float, **args: Any) -> None:
    if seconds > 0:
        timeline.record(lane, name, start_s, start_s + seconds, **args)
