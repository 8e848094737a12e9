"""The policies against a fake executor: every admitted request finishes, plans are sound, memory comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_lite.config import MODELS, EngineConfig, NeoLiteError
from neo_lite.cost_model import Profile, kv_tokens
from neo_lite.engine import Engine
from neo_lite.request import IterationPlan, SamplingParams

MODES = ("gpu-only", "simple", "symmetric", "asymmetric")
COSTS = Profile(
    2, [(1, 1.0), (64, 8.0)], [(1, 0.1), (64, 2.0)], [(1, 0.1), (64, 1.0)], [(1, 0.5), (64, 6.0)], [(1, 0.1)]
)


class CheckingExecutor:
    """Follows each token of KV through the plans, as a real one would, and fails on the first unsound step."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.slots: dict[str, dict[int, tuple[int, int]]] = {"gpu": {}, "cpu": {}}  # pool -> slot -> (request, place)
        self.plans: list[IterationPlan] = []

    def run(self, plan: IterationPlan) -> dict[int, int]:
        size = self.config.block_size
        for move in plan.moves:
            source, target = self.slots["cpu" if move.target == "gpu" else "gpu"], self.slots[move.target]
            for a, b in zip(move.source_blocks, move.target_blocks, strict=True):
                for i in range(size):
                    target[b * size + i] = source.get(a * size + i, (-1, -1))
        tokens = {}
        for work in plan.work:
            request = work.request
            pool = self.slots[request.device]

            def slot(p, table=request.block_table):
                return table[p // size] * size + p % size

            for p in range(work.start, work.seq_len):
                pool[slot(p)] = (request.id, p)
            for p in range(work.seq_len):
                assert pool[slot(p)] == (request.id, p), f"r{request.id} reads KV that is not its own at {p}"
            if work.samples:
                tokens[request.id] = 1
        assert len({w.request.id for w in plan.work}) == sum(1 for _ in plan.work), "a request is planned twice"
        self.plans.append(plan)
        return tokens


def engine_with(mode: str, **changes: int) -> Engine:
    config = EngineConfig(mode=mode, **changes)
    return Engine(config, MODELS["tiny"], CheckingExecutor(config), clock=iter(range(10**9)).__next__, costs=COSTS)


def assert_all_free(engine: Engine) -> None:
    blocks = engine.scheduler.blocks
    assert {d: blocks.free(d) for d in ("gpu", "cpu")} == blocks.total
    assert engine.scheduler.unfinished == 0


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    gpu=st.integers(4, 30), cpu=st.integers(4, 30), budget=st.integers(1, 64), seqs=st.integers(1, 6),
)  # fmt: skip
def test_every_admitted_request_finishes(mode, lengths, gpu, cpu, budget, seqs):
    sizes = {"gpu_kv_tokens": gpu * 4, "cpu_kv_tokens": cpu * 4, "block_size": 4}
    engine = engine_with(mode, max_batched_tokens=budget, max_seqs=seqs, **sizes)
    admitted, home = [], engine.scheduler.homes[0]
    for prompt, output in lengths:
        fits = -(-(prompt + output - 1) // 4) <= (
            max(gpu, cpu) if mode == "asymmetric" else {"gpu": gpu, "cpu": cpu}[home]
        )
        try:
            admitted.append(engine.add([1] * prompt, SamplingParams(output, ignore_eos=True)))
            assert fits
        except NeoLiteError:
            assert not fits
    for _ in range(20_000):
        if not engine.scheduler.unfinished:
            break
        assert engine.scheduler.unfinished and (engine.step() or engine.executor.plans[-1]), "a step did nothing"
    for request in admitted:
        assert request.finish_reason == "length" and len(request.output) == request.sampling.max_tokens
    assert_all_free(engine)


def test_gpu_only_chunks_a_long_prompt_beside_decodes():
    engine = engine_with("gpu-only", max_batched_tokens=16, gpu_kv_tokens=4096)
    first = engine.add([1] * 8, SamplingParams(20))
    engine.step()
    engine.add([1] * 40, SamplingParams(2))
    chunks = [engine.step() and [w.length for w in engine.executor.plans[-1].batches[0].prefills] for _ in range(3)]
    assert chunks == [[15], [15], [10]]
    assert len(first.output) == 4, "the decode went on beside every chunk"


def test_simple_prefills_whole_and_decodes_on_the_cpu():
    engine = engine_with("simple", max_batched_tokens=16)
    request = engine.add([1] * 40, SamplingParams(3))
    engine.run()
    batches = [p.batches[0] for p in engine.executor.plans]
    assert [w.length for w in batches[0].prefills] == [40]
    assert all(len(b.cpu_decodes) == 1 and not b.gpu_decodes for b in batches[1:])
    assert request.finish_reason == "length"


@pytest.mark.parametrize("mode", ["gpu-only", "simple", "symmetric"])
def test_a_full_pool_parks_the_newest_and_a_full_machine_drops_it(mode):
    home, other = ("gpu", "cpu") if mode == "gpu-only" else ("cpu", "gpu")
    sizes = {f"{home}_kv_tokens": 32, f"{other}_kv_tokens": 32}
    engine = engine_with(mode, block_size=4, **sizes)
    requests = [engine.add([1] * 8, SamplingParams(20, ignore_eos=True)) for _ in range(3)]
    engine.run()
    assert sum(r.num_swaps for r in requests) > 0
    assert requests[0].num_swaps == 0, "the oldest stays"
    tiny = engine_with(mode, block_size=4, **{f"{home}_kv_tokens": 32, f"{other}_kv_tokens": 4})
    requests = [tiny.add([1] * 8, SamplingParams(20, ignore_eos=True)) for _ in range(3)]
    tiny.run()
    assert sum(r.num_recomputes for r in requests) > 0
    assert_all_free(tiny)
    said = [line for plan in tiny.executor.plans for line in plan.why]
    assert any("dropped" in line for line in said)


def test_a_plan_says_why():
    engine = engine_with("gpu-only")
    engine.add([1] * 20, SamplingParams(1))
    engine.step()
    assert engine.executor.plans[-1].why == ("r0 admitted: 20 tokens in 2 gpu blocks",)


def test_a_refusal_names_the_pool_and_the_remedy():
    engine = engine_with("simple", cpu_kv_tokens=64)
    with pytest.raises(NeoLiteError, match=r"104 tokens \(7 blocks\).*cpu pool has 4.*raise cpu_kv_tokens"):
        engine.add([1] * 100, SamplingParams(5))
    assert engine.scheduler.unfinished == 0


def test_symmetric_prefills_alone_and_halves_the_decodes():
    engine = engine_with("symmetric")
    for length in (40, 30, 20, 10):
        engine.add([1] * length, SamplingParams(5, ignore_eos=True))
    engine.step(), engine.step()
    prefill, decode = (plan.batches for plan in engine.executor.plans)
    assert len(prefill) == 1 and len(prefill[0].prefills) == 4
    assert [[w.request.id for w in b.cpu_decodes] for b in decode] == [[0, 3], [1, 2]]


def test_asymmetric_fills_the_gpu_first_then_the_cpu_and_keeps_the_inequality():
    engine = engine_with("asymmetric", block_size=4, gpu_kv_tokens=80, cpu_kv_tokens=400)
    requests = [engine.add([1] * 20, SamplingParams(30, ignore_eos=True)) for _ in range(10)]
    engine.run()
    batches = [p.batches for p in engine.executor.plans]
    assert {d: sum(len(getattr(b[0], d)) for b in batches) > 0 for d in ("gpu_decodes", "cpu_decodes")}
    told = [reason for p in engine.executor.plans for reason in p.reasons.values()]
    assert "batch-0: prefill, KV to the cpu pool" in told and "batch-0: prefill, KV to the gpu pool" in told
    two = [b for b in batches if len(b) == 2 and b[0].num_tokens]
    assert two and any(COSTS.t_cpu_attn(len(b[1]), kv_tokens(b[1].cpu_decodes)) > 0 for b in two)
    assert all(len(r.output) == 30 for r in requests)
    assert_all_free(engine)


def test_asymmetric_moves_requests_both_ways_mid_generation():
    engine = engine_with("asymmetric", block_size=4, gpu_kv_tokens=80, cpu_kv_tokens=400)
    for i in range(8):
        engine.add([1] * 12, SamplingParams(10 + 10 * i, ignore_eos=True))
    engine.run()
    assert {m.target for p in engine.executor.plans for m in p.moves} == {"cpu", "gpu"}


def test_no_cpu_decode_waits_longer_than_its_patience():
    slow = Profile(2, [(1, 0.1)], [(1, 0.1)], [(1, 0.1)], [(1, 50.0), (64, 500.0)], [(1, 0.1)])
    config = EngineConfig(mode="asymmetric", block_size=4, gpu_kv_tokens=40, cpu_kv_tokens=400)
    engine = Engine(config, MODELS["tiny"], CheckingExecutor(config), clock=iter(range(10**9)).__next__, costs=slow)
    requests = [engine.add([1] * 12, SamplingParams(40, ignore_eos=True)) for _ in range(6)]
    engine.run()
    assert all(len(r.output) == 40 for r in requests)
    gaps = {w.request.id: [] for p in engine.executor.plans for w in p.work}
    for i, plan in enumerate(engine.executor.plans):
        for work in plan.work:
            gaps[work.request.id].append(i)
    assert max(b - a for seen in gaps.values() for a, b in zip(seen, seen[1:], strict=False)) <= 10


def test_asymmetric_without_stage_times_is_refused():
    with pytest.raises(NeoLiteError, match="asymmetric weighs stage times"):
        Engine(EngineConfig(mode="asymmetric"), MODELS["tiny"], CheckingExecutor(EngineConfig()))


def test_one_large_cpu_request_does_not_keep_the_others_from_the_gpu():
    engine = engine_with("asymmetric", block_size=4, gpu_kv_tokens=80, cpu_kv_tokens=800, max_seqs=5)
    large = engine.add([1] * 200, SamplingParams(60, ignore_eos=True))
    engine.step()
    first = engine.add([1] * 70, SamplingParams(5, ignore_eos=True))
    engine.step()
    small = [engine.add([1] * 12, SamplingParams(40, ignore_eos=True)) for _ in range(3)]
    engine.step()
    assert large.device == "cpu" and first.device == "gpu" and {r.device for r in small} == {"cpu"}
    engine.run()
    moved_in = {m.request.id for p in engine.executor.plans for m in p.moves if m.target == "gpu"}
    assert moved_in == {r.id for r in small}, "swapped in, though max_seqs run and the large one never can be"
    assert_all_free(engine)


def test_without_chunking_only_the_first_prompt_may_exceed_the_budget():
    engine = engine_with("simple", max_batched_tokens=100)
    for length in (90, 90, 150, 5):
        engine.add([1] * length, SamplingParams(1))
    engine.run()
    assert [[w.length for w in p.batches[0].prefills] for p in engine.executor.plans] == [[90], [90], [150], [5]]


def test_a_refusal_in_asymmetric_mode_names_the_larger_pool():
    engine = engine_with("asymmetric", gpu_kv_tokens=64, cpu_kv_tokens=640)
    with pytest.raises(NeoLiteError, match="cpu pool has 40 blocks.*raise cpu_kv_tokens"):
        engine.add([1] * 1000, SamplingParams(5))
