"""The six steps by hand on small cases, and what must hold of every plan of every policy, whatever the load and machine."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scheduler import CheckingExecutor, assert_all_free

from neo_lite.blocks import Blocks
from neo_lite.config import MODELS, EngineConfig, NeoLiteError
from neo_lite.cost_model import Curve, Profile
from neo_lite.engine import Engine
from neo_lite.hardware import HARDWARE, costs_of
from neo_lite.neo import POLICIES, Neo, NeoReleased
from neo_lite.request import Request, SamplingParams, SubBatch, Work
from neo_lite.simulator import simulate
from neo_lite.workload import parse

CASES = 10_000  # over all policies, in the slow tier

# Milliseconds that one can add up by hand. Linear: 4 ms up to 4 tokens, then 1 ms a token (the ridge is at 4 tokens).
# Prefill attention 0.1 ms a token, GPU decode attention 0.01 and CPU decode attention 0.1 a KV token.
BY_HAND = Profile(
    num_layers=1, linear=[(1, 4.0), (4, 4.0), (100, 100.0)], prefill_attn=[(1, 0.1), (100, 10.0)],
    gpu_attn=[(1, 0.01), (1000, 10.0)], cpu_attn=[(1, 0.1), (1000, 100.0)], head=[(1, 0.0)],
)  # fmt: skip


def scheduler(cls: type[Neo] = Neo, gpu_blocks: int = 10, cpu_blocks: int = 100, **changes: int) -> Neo:
    config = EngineConfig(
        mode="neo", block_size=10, gpu_kv_tokens=gpu_blocks * 10, cpu_kv_tokens=cpu_blocks * 10, **changes
    )
    return cls(config, Blocks(gpu_blocks, cpu_blocks, 10), BY_HAND)


def running(s: Neo, device: str, tokens: int, id: int) -> Request:
    """A request in the middle of its decodes: all but its newest token have their KV in `device`."""
    request = Request(id, (1,) * (tokens - 1), SamplingParams(100), output=[1], device=device)
    request.num_computed = tokens - 1
    assert s.blocks.grow(request, tokens)
    s.running.append(request)
    return request


def ids(works) -> list[int]:
    return [w.request.id for w in works]


def test_the_ridge_is_where_reading_the_weights_takes_as_long_as_computing():
    assert BY_HAND.ridge_tokens == 4 and scheduler().floor == 4


def test_six_steps_on_a_case_worked_out_by_hand():
    """GPU full with r0 and r1; r2 to r5 on the CPU; r6 and r7 wait. Sequence lengths 39, 39 | 30, 20, 35, 30 | 10, 10.

    Step 2: both GPU decodes; 2 of 10 blocks are free, so nobody is swapped in (needs 2 + 2). Step 3: r6 needs 1 block
    and 2 more for the growth of those running: no GPU room, so r6 and then r7 go to the CPU. Step 4: batch-0 has 22
    tokens: Tl0 = 22 ms, room for 220 KV tokens; all four (115 tokens, 11.5 ms) fit into batch-1. Step 5: without r7
    Tl0 = 12 ms >= 11.5 and 12 tokens are above the floor: r7 is taken back. Without r6 Tl0 = 4 ms < 11.5: it stays.
    Step 6: two batches: Tl0 12 + Tpref 1 + Tga 0.78 + Tl1 4 = 17.78 ms for 7 requests; GPU only: floored to no less than
    4 tokens: 12 - 10 = 2 < 4 keeps r6: 13.78 ms for 3. 7 / 17.78 > 3 / 13.78.
    """
    s = scheduler()
    for i, (device, tokens) in enumerate(
        [("gpu", 39), ("gpu", 39), ("cpu", 30), ("cpu", 20), ("cpu", 35), ("cpu", 30)]
    ):
        running(s, device, tokens, i)
    s.waiting.extend(Request(i, (1,) * 10) for i in (6, 7))
    plan = s.plan(0.0)
    first, second = plan.batches
    assert (ids(first.prefills), ids(first.gpu_decodes), ids(first.cpu_decodes)) == ([6], [0, 1], [])
    assert ids(second.cpu_decodes) == [2, 3, 4, 5] and [r.id for r in s.waiting] == [7]
    chosen, other = plan.candidates
    assert (chosen.name, other.name) == ("two batches", "GPU only")
    assert chosen.seconds == pytest.approx(17.78) and other.seconds == pytest.approx(13.78)
    assert (chosen.requests, other.requests) == (7, 3)
    assert chosen.stages.slack == pytest.approx((12 - 11.5, 4 + 1 + 0.78))
    assert plan.reasons[6] == "batch-0: prefill, KV to the cpu pool" and "taken back in step 5" in plan.reasons[7]
    assert not plan.forced


def test_step_4_fills_batch_1_then_batch_0_and_skips_the_rest_who_come_first_next_time():
    """No prefill: Tl0 = 4 ms (40 KV tokens); Tl1 + Tga0 = 4 + 0.4 ms (44 KV tokens)."""
    s = scheduler(cpu_blocks=1000, gpu_blocks=5)
    running(s, "gpu", 40, 0)
    for i, tokens in ((1, 25), (2, 20), (3, 15), (4, 30), (5, 12)):
        running(s, "cpu", tokens, i)
    plan = s.plan(0.0)
    first, second = plan.batches
    assert ids(second.cpu_decodes) == [1, 3], "25; 20 would exceed 40; 25 + 15 = 40"
    assert ids(first.cpu_decodes) == [2, 5], "20; 20 + 30 exceeds 44; 20 + 12 = 32"
    assert plan.reasons[4] == "skipped: it would break both inequalities" and s.skipped == {s.running[4]: 0}
    again = s.plan(0.0)
    assert ids(again.batches[1].cpu_decodes)[0] == 4


def test_step_5_read_literally_offloads_nothing_and_the_floor_mends_it():
    for floor, expected in ((0, []), (4, [1])):
        s = scheduler(gpu_blocks=4)
        s.floor = floor
        running(s, "gpu", 39, 0)
        s.waiting.append(Request(1, (1,) * 10))
        assert ids(s.plan(0.0).batches[0].prefills) == expected


def test_the_released_constants_keep_two_batches_from_ever_being_chosen_on_a_fast_gpu():
    for cls, count in ((Neo, 2), (NeoReleased, 1)):
        s = scheduler(cls, gpu_blocks=5)
        s.costs = Profile(
            1, [(1, 4e-4), (4, 4e-4), (100, 1e-2)], [(1, 1e-5)], [(1, 1e-6)], [(1, 1e-5), (100, 1e-4)], [(1, 0.0)],
            launch_s=s.costs.launch_s,
        )  # fmt: skip
        running(s, "gpu", 40, 0)
        running(s, "cpu", 40, 1)
        assert len(s.plan(0.0).batches) == count


def test_whoever_waits_too_long_runs_in_a_plan_that_names_it():
    """A CPU decode of 500 tokens (50 ms) fits neither inequality while a GPU decode runs."""
    s = scheduler(gpu_blocks=5)
    running(s, "gpu", 40, 0)
    running(s, "cpu", 500, 1)
    plans = [s.plan(0.0) for _ in range(Neo.PATIENCE + 1)]
    assert [p.forced for p in plans] == [()] * Neo.PATIENCE + [(1,)]
    assert ids(plans[-1].batches[1].cpu_decodes) == [1] and min(plans[-1].candidates[0].stages.slack) < 0


def test_between_two_forced_plans_lie_patience_others_and_whoever_has_waited_longest_comes_first():
    s = scheduler(gpu_blocks=5)
    running(s, "gpu", 40, 0)
    for i in (1, 2, 3):
        running(s, "cpu", 300, i)  # 30 ms each: none fits
    plans = [s.plan(0.0) for _ in range(4 * (Neo.PATIENCE + 1))]
    forced = {n: p.forced for n, p in enumerate(plans) if p.forced}
    every = Neo.PATIENCE + 1
    assert forced == {every - 1: (1,), 2 * every - 1: (2,), 3 * every - 1: (3,), 4 * every - 1: (1,)}


def test_whoever_waits_too_long_runs_alone_where_a_second_batch_would_cost_more():
    """GPU attention 4 ms, CPU attention of r1 5 ms: alone in batch-0 it prolongs the layer by 1 ms, a second batch by 5."""
    s = scheduler(gpu_blocks=41)
    running(s, "gpu", 400, 0)
    running(s, "cpu", 50, 1)
    plan = [s.plan(0.0) for _ in range(Neo.PATIENCE + 1)][-1]
    assert plan.forced == (1,) and [ids(b.cpu_decodes) for b in plan.batches] == [[1]]
    assert plan.candidates[0].seconds == pytest.approx(4 + 5)


def test_what_hides_behind_the_attention_of_batch_0_needs_no_second_reading_of_the_weights():
    """Tga0 4 ms hides r1's 3 ms: 2 requests in 4 + 4 ms. As batch-1 it would take 4 more. r2 (10 ms) fits nowhere."""
    s = scheduler(gpu_blocks=41)
    running(s, "gpu", 400, 0)
    running(s, "cpu", 30, 1)
    running(s, "cpu", 100, 2)
    plan = s.plan(0.0)
    assert [ids(b.cpu_decodes) for b in plan.batches] == [[1]] and not plan.forced
    assert plan.candidates[0].seconds == pytest.approx(8) and plan.candidates[0].name == "one batch with CPU decodes"
    assert plan.reasons[1] == "batch-0: CPU decode within its inequality"
    assert plan.reasons[2] == "skipped: it would break both inequalities"


def test_what_is_dealt_is_weighed_as_the_candidates_of_step_6_are():
    """All cuts at once, by the same x/T as one candidate, what comes once an iteration included."""
    s = scheduler(gpu_blocks=41)
    s.costs = replace(
        BY_HAND, head=Curve([(1, 0.5), (9, 4.5)]), overhead_s=0.1, prefill_overhead_s=0.2, pair_overhead_s=0.4
    )
    on_cpu = [running(s, "cpu", 10, i) for i in range(1, 5)]
    gpu, prompt = Work(running(s, "gpu", 300, 0), 299, 1), Work(Request(9, (1,) * 20), 0, 20)
    for first in (SubBatch((), (gpu,)), SubBatch((prompt,), (gpu,))):
        for k, m in ((1, 0), (2, 0), (0, 2), (1, 1), (2, 2)):
            two = s._two(first, (on_cpu[:k], on_cpu[k : k + m]))
            assert two.stages.holds
            assert s._rates(s._cover(first, 4), np.array([k]), np.array([m])) == pytest.approx(two.rate)


def test_cpu_decodes_of_batch_0_count_against_the_token_budget():
    for budget, served in ((3, [[1, 2]]), (2, [[2], [1]]), (1, [[], [1]])):
        s = scheduler(gpu_blocks=81, max_batched_tokens=budget)
        running(s, "gpu", 800, 0)
        for i in (1, 2):
            running(s, "cpu", 35, i)
        assert [ids(b.cpu_decodes) for b in s.plan(0.0).batches] == served


def test_on_a_host_too_slow_for_its_gpus_neo_does_not_fall_under_gpu_only():
    """With every late request forced: 0.97 of gpu-only, 0.3 of the plans forced."""
    model, config = (
        MODELS["llama-3.1-70b"],
        EngineConfig(gpu_kv_tokens=40000, cpu_kv_tokens=10**6, max_batched_tokens=8192),
    )
    costs, load = costs_of(HARDWARE["2xh100"], model), parse("synthetic:2000,100", 100)
    base, neo = (simulate(model, costs, replace(config, mode=mode), load) for mode in ("gpu-only", "neo"))
    assert neo.span_s < base.span_s
    assert 0 < neo.summary()["forced_share"] <= 1 / (Neo.PATIENCE + 1)


def test_the_explanation_of_a_forced_plan_says_whose_inequality_breaks():
    s = scheduler(gpu_blocks=5)
    running(s, "gpu", 40, 0)
    running(s, "cpu", 500, 1)
    reasons = [s.plan(0.0) for _ in range(Neo.PATIENCE + 1)][-1].reasons
    assert reasons[1] == "batch-1: CPU decode that has waited too long"
    lone = scheduler(gpu_blocks=5)
    for i in range(2):
        running(lone, "cpu", 60, i)
    plan = lone.plan(0.0)
    assert plan.forced == (-1,) and not plan.candidates[0].stages.holds
    assert "CPU decode though its inequality breaks" in plan.reasons[0] + plan.reasons[1]


def test_who_is_swapped_out_keeps_its_age_and_the_newest_of_a_full_pool_makes_way():
    """r0 needs three blocks: r2 and then r1 leave the GPU. When r1 then needs seven and six are free, r3 makes way."""
    s = scheduler(gpu_blocks=6, cpu_blocks=13)
    for i, device in enumerate(("gpu", "gpu", "gpu", "cpu")):
        running(s, device, 30 if device == "cpu" else 20, i)

    def grown(request: Request, tokens: int):
        request.output += [1] * tokens
        request.num_computed += tokens
        return s.plan(0.0)

    assert [m.request.id for m in grown(s.running[0], 21).moves] == [2, 1]
    assert [r.id for r in s.running] == [0, 1, 2, 3], "not in the order of leaving"
    assert grown(s.running[1], 65).why[0].startswith("r3 makes way: cpu pool of 13 blocks full")
    assert [r.id for r in s.running] == [0, 1, 2] and s.waiting[0].id == 3


def test_with_nothing_on_the_gpu_the_cpu_decodes_run_all_the_same():
    s = scheduler(gpu_blocks=5)
    for i in range(3):
        running(s, "cpu", 60, i)  # 6 blocks: none will ever fit into the GPU pool of 5
    plan = s.plan(0.0)
    assert sorted(i for b in plan.batches for i in ids(b.cpu_decodes)) == [0, 1, 2] and plan.forced == (-1,)


def test_a_lone_cpu_request_that_nearly_fills_the_gpu_pool_is_swapped_in():
    s = scheduler(gpu_blocks=10)
    request = running(s, "cpu", 99, 0)
    request.sampling = SamplingParams(1)
    plan = s.plan(0.0)
    assert [m.target for m in plan.moves] == ["gpu"] and ids(plan.batches[0].gpu_decodes) == [0]


def test_every_policy_that_weighs_refuses_to_start_without_stage_times():
    for mode in ("asymmetric", "fastdecode+", "neo", "neo-released"):
        with pytest.raises(NeoLiteError, match="weighs stage times"):
            Engine(EngineConfig(mode=mode), MODELS["tiny"], CheckingExecutor(EngineConfig()))


# ---- What must hold of every plan ----


@st.composite
def curves(draw: st.DrawFn) -> list[tuple[float, float]]:
    xs = sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=4)))
    steps = draw(st.lists(st.integers(0, 50), min_size=len(xs), max_size=len(xs)))
    return [(x, sum(steps[: i + 1]) / 10) for i, x in enumerate(xs)]


profiles = st.builds(
    Profile, num_layers=st.integers(1, 3), linear=curves(), prefill_attn=curves(), gpu_attn=curves(), cpu_attn=curves(),
    head=curves(), cpu_request_tokens=st.sampled_from([0.0, 3.5]), overhead_s=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
loads = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 24), st.integers(1, 12)), min_size=1, max_size=8)


class Watching(CheckingExecutor):
    """Also looks at the blocks and at the plan itself, each time."""

    engine: Engine

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.waits: dict[Request, int] = {}  # iterations in a row without a turn, of who decodes on the CPU
        self.last_forced = -Neo.PATIENCE - 1

    def run(self, plan):
        blocks, mode = self.engine.scheduler.blocks, self.config.mode
        live = list(self.engine._live.values())
        for device, total in blocks.total.items():
            held = [b for r in live if r.device == device for b in r.block_table]
            assert len(held) == len(set(held)) and len(held) + blocks.free(device) == total
        assert sum(len(b) for b in plan.batches) <= self.config.max_seqs
        if mode in ("neo", "neo-released") and not plan.forced:
            chosen, other = plan.candidates
            assert len(plan.batches) < 2 or chosen.stages.holds, plan.why
            assert chosen.rate >= other.rate or not other.stages.holds, plan.why
        if mode == "neo":
            self._watch_who_waits(plan)
        return super().run(plan)

    def _watch_who_waits(self, plan):
        """Counted here, not asked of the scheduler: forced is who has waited long enough, and not too often; or nothing else
        could run. And nobody waits longer than stated."""
        turn, on_cpu = {w.request for w in plan.work}, [r for r in self.engine._live.values() if r.device == "cpu"]
        waits = {r: self.waits.get(r, 0) + 1 for r in on_cpu if r.num_computed}
        for i in plan.forced:
            if i == -1:
                assert not any(b.prefills or b.gpu_decodes for b in plan.batches) and not plan.candidates[1].requests
                continue
            (forced,) = (r for r in turn if r.id == i)
            assert waits[forced] > Neo.PATIENCE and len(self.plans) - self.last_forced > Neo.PATIENCE
            self.last_forced = len(self.plans)
        self.waits = {r: n for r, n in waits.items() if r not in turn}
        assert all(n <= (Neo.PATIENCE + 1) * self.config.max_seqs for n in self.waits.values())
        first = plan.batches[0] if plan.batches else None
        within = first is None or first.num_tokens <= self.config.max_batched_tokens
        assert within or not first.cpu_decodes or not plan.candidates[1].requests, "CPU decodes beyond the token budget"


def serve(mode: str, costs: Profile, load, gpu: int, cpu: int, budget: int, seqs: int) -> None:
    config = EngineConfig(mode=mode, block_size=4, gpu_kv_tokens=gpu * 4, cpu_kv_tokens=cpu * 4,
                          max_batched_tokens=budget, max_seqs=seqs)  # fmt: skip
    watching = Watching(config)
    engine = Engine(config, MODELS["tiny"], watching, clock=iter(range(10**9)).__next__, costs=costs)
    watching.engine = engine
    pending, requests = sorted(load), []
    tokens = sum(p + o for _, p, o in load)
    while pending or engine._live:
        while pending and pending[0][0] <= engine.iterations:
            _, prompt, output = pending.pop(0)
            try:
                requests.append(engine.add([1] * prompt, SamplingParams(output, ignore_eos=True)))
            except NeoLiteError as error:
                assert "pool has" in str(error)
        before = engine.iterations
        engine.step()
        if engine.iterations == before and not engine._live:
            pending = [(0, p, o) for _, p, o in pending]
            continue
        assert engine.iterations > before, "requests wait and no plan serves them"
        assert engine.iterations <= 40 * tokens + 100, "no end in sight"
    assert all(r.finish_reason == "length" and len(r.output) == r.sampling.max_tokens for r in requests)
    starts = [r.first_scheduled_s for r in requests]
    assert starts == sorted(starts), "admitted out of order"
    assert_all_free(engine)


@pytest.mark.parametrize("mode", POLICIES)
def test_every_request_ends_and_every_plan_is_sound(mode):
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(costs=profiles, load=loads, gpu=st.integers(1, 12), cpu=st.integers(1, 16), budget=st.integers(1, 64),
           seqs=st.integers(1, 8), patience=st.sampled_from([2, Neo.PATIENCE]))  # fmt: skip
    def check(costs, load, gpu, cpu, budget, seqs, patience):
        with patch.object(Neo, "PATIENCE", patience):  # few of these small loads last long enough for two forced plans
            serve(mode, costs, load, gpu, cpu, budget, seqs)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("mode", POLICIES)
def test_every_request_ends_and_every_plan_is_sound_many_times(mode):
    share = {"neo": 0.5}.get(mode, 0.5 / (len(POLICIES) - 1))

    @settings(max_examples=int(float(os.environ.get("NEO_LITE_CASES", CASES)) * share), deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(costs=profiles, load=loads, gpu=st.integers(1, 12), cpu=st.integers(1, 16), budget=st.integers(1, 64),
           seqs=st.integers(1, 8), patience=st.sampled_from([2, Neo.PATIENCE]))  # fmt: skip
    def check(costs, load, gpu, cpu, budget, seqs, patience):
        with patch.object(Neo, "PATIENCE", patience):  # few of these small loads last long enough for two forced plans
            serve(mode, costs, load, gpu, cpu, budget, seqs)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gpu-only-unchunked", "fastdecode+", "neo", "neo-released"])
def test_on_real_devices_the_tokens_are_those_of_transformers(tmp_path, mode):
    """Greedy, fp32, a model that varies its tokens; requests on both sides, and some that change sides."""
    import test_pipeline as pipeline

    hf = pipeline.tiny_folder(tmp_path, {})
    prompts = [[i + 1, i + 2, i + 3] * (1 + i % 3) for i in range(12)]
    expected = [pipeline.hf_greedy(hf, prompt, 40)[0] for prompt in prompts]
    engine = pipeline.poisoned(pipeline.load_folder(tmp_path), mode, block_size=4, gpu_kv_tokens=160, cpu_kv_tokens=800)
    requests = pipeline.generate(engine, prompts, 40)
    assert [r.output for r in requests] == expected
    served = {e.name for e in engine.timeline.events if e.name in ("gpu_attn", "cpu_attn")}
    assert served == {"gpu-only-unchunked": {"gpu_attn"}, "fastdecode+": {"cpu_attn"}}.get(
        mode, {"gpu_attn", "cpu_attn"}
    )
    assert mode == "fastdecode+" or sum(r.num_swaps for r in requests) > 0
