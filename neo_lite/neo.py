"""The load-aware policies: the paper's six steps, one method each, and what is measured against them.

Each iteration weighs a GPU-only candidate against a two-batch one (batch-0: prefills, GPU decodes, a few CPU decodes;
batch-1: the other CPU decodes) and takes the one with more requests a second, x/T. (The paper prints T/x and means that.)
Called by the engine, through `POLICIES`, as any other policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from neo_lite.blocks import Blocks
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cost_model import Candidate, Profile, Stages, kv_tokens
from neo_lite.request import Device, IterationPlan, Move, Request, SubBatch, Work, decodes_of
from neo_lite.scheduler import Scheduler, SimpleOffloading, Symmetric, Unchunked, halves

Prefill = tuple[Work, Device]  # who would be admitted, and where its KV would live
Dealt = tuple[list[Work], list[Work]]  # the CPU decodes of batch-0, few of them, and of batch-1, the rest


class OnGpu(NamedTuple):
    """All GPU decodes. They belong to batch-0 of every candidate, so that their attention is added up once."""

    works: tuple[Work, ...]
    ga0: float  # seconds of their attention in one layer

    def batch(self, prefills: Sequence[Prefill], few: Sequence[Work] = ()) -> SubBatch:
        """Batch-0: they, these prefills and a few CPU decodes."""
        return SubBatch(tuple([work for work, _ in prefills]), self.works, tuple(few))


class Cover(NamedTuple):
    """What hides behind batch-0's prefills and GPU decodes, `first`. Arrays are by the number of CPU decodes, from 0 on."""

    first: SubBatch
    stages: Stages  # of one layer of `first`
    linear0: np.ndarray  # seconds of Tl0 and of Tl1, by the CPU decodes in batch-0 and in batch-1
    linear1: np.ndarray
    room0: np.ndarray  # KV tokens that batch-0's CPU attention may read, by the CPU decodes in batch-1; and the reverse
    room1: np.ndarray
    seats: int  # CPU decodes that batch-0 takes within the token budget


class Neo(Scheduler):
    """NEO's scheduler. Where the paper's steps would let a request starve or the engine stall, it departs from them:

    - A CPU decode that was skipped comes first the next time; after `PATIENCE` iterations the one that has waited longest
      runs whatever the inequalities and x/T say (the plan is then `forced`). Between two forced plans lie `PATIENCE`
      others: where the CPU does not pay, nearly all plans would be forced, and the GPU read its weights twice for
      nothing. So nobody waits longer than `PATIENCE` + 1 iterations for each CPU decode up to its own.
    - Step 4 says that CPU decodes go to either batch, not which. It fills batch-1 first, so that step 5 sees how many
      prefills they need; then they are dealt anew, by x/T. That may leave batch-1 empty: what hides behind the GPU's
      attention in batch-0 costs no second reading of the weights.
    - With nothing on the GPU neither inequality leaves room for anything: the CPU decodes then run as two halves.
    - Swapping in keeps a twentieth of the GPU pool free (hysteresis), unless nothing runs on the GPU, so that a request
      longer than that is not locked out.
    - Once a prompt goes to the CPU, later ones do too, so that step 5 can take back the last ones and keep the order.
    - Step 5 read literally removes every prefill of the CPU while no CPU decode runs, and nothing is ever offloaded. It
      stops at a floor: the width at which the linear stage leaves the memory-bound regime, read off the cost model. The
      GPU-only candidate keeps the same floor.
    """

    chunked_prefill = False
    PATIENCE = 16
    greedy = True  # step 6 weighs; otherwise CPU decodes run whenever there are any

    def __init__(self, config: EngineConfig, blocks: Blocks, costs: Profile | None = None) -> None:
        super().__init__(config, blocks, costs)
        if costs is None:
            raise NeoLiteError(f"mode {config.mode} weighs stage times: give the engine a Profile (profiler.measure)")
        self.costs, self.floor = costs, costs.ridge_tokens
        self.skipped: dict[Request, int] = {}  # iterations in a row that a CPU decode was passed over
        self.unforced = self.PATIENCE  # plans since the last forced one

    def plan(self, now_s: float) -> IterationPlan:
        """Step 1, two empty batches, and then the others."""
        moves: list[Move] = []
        why: list[str] = []
        waited = len(self.waiting)
        on_gpu = self._step2_gpu_decodes(moves, why)
        prefills = self._step3_prefills(len(on_gpu.works), len(self.waiting) == waited, moves)
        kept, (few, rest), late = self._two_batches(prefills, on_gpu)
        chosen, other, forced = self._step6_decide((prefills, kept), on_gpu, few, rest, late)
        for (request, _, _), device in self._floored(prefills, on_gpu) if chosen.name == "GPU only" else kept:
            self.waiting.popleft()
            self._admit(request, device, why)
            request.first_scheduled_s = now_s if request.first_scheduled_s is None else request.first_scheduled_s
        where = self._account(chosen, few, rest, prefills, forced)
        why.append(f"{_told(chosen)} against {_told(other)}" if other.requests else _told(chosen))
        return IterationPlan(self.config.mode, chosen.batches, tuple(moves), tuple(why), (chosen, other), where, forced)

    def _two_batches(self, prefills: list[Prefill], on_gpu: OnGpu) -> tuple[list[Prefill], Dealt, tuple[int, ...]]:
        """Steps 4 and 5: the prefills kept, the CPU decodes of either batch, and who among them is late."""
        works = self._by_age()
        if not works:
            return self._step5_reduce(prefills, on_gpu, [], []), ([], []), ()
        own = self.costs.cpu_request_tokens
        loads = [w.start + 1 + own for w in works]
        totals = np.cumsum([0.0, *loads])
        cover = self._cover(on_gpu.batch(prefills), len(works), on_gpu.ga0)
        few, rest = self._step4_cpu_decodes(cover, works, loads, totals)
        kept = self._step5_reduce(prefills, on_gpu, few, rest)
        if len(kept) < len(prefills):
            cover = self._cover(on_gpu.batch(kept), len(works), on_gpu.ga0)
        return kept, *self._late(cover, works, *self._deal(cover, works, totals, few, rest))

    # ---- The six steps ----

    def _step2_gpu_decodes(self, moves: list[Move], why: list[str]) -> OnGpu:
        """Every GPU decode goes to batch-0; whoever finds no room is swapped out, and who fits comfortably comes in."""
        self._make_room(moves, why)
        if not why:
            self._resume(moves, why)
        works = tuple(decodes_of([r for r in self.running if r.device == "gpu"]))
        return OnGpu(works, self.costs.t_gpu_attn(kv_tokens(works)))

    def _step3_prefills(self, decodes: int, admit: bool, moves: list[Move]) -> list[Prefill]:
        """Prompts in order of arrival, on the GPU while there is room, then on the CPU, within the token budget."""
        found: list[Prefill] = []
        budget, seats = self.config.max_batched_tokens - decodes, self.config.max_seqs - len(self.running)
        there = {"gpu": decodes, "cpu": len(self.running) - decodes}
        room = {d: self.blocks.free(d) - there[d] for d in self.blocks.total}
        homes = [d for d in self._homes() if d == "cpu" or all(m.target == "gpu" for m in moves)]
        for request in islice(self.waiting, max(0, seats) if admit else 0):
            tokens, needed = request.num_tokens, self.blocks.needed(request.num_tokens)
            fits = [d for d in homes if needed <= room[d] and self.blocks.fits_ever(request, d)]
            if not fits or (found and tokens > budget):
                break
            if fits[0] == "cpu":
                homes = ["cpu"]
            room[fits[0]] -= needed + 1
            budget -= tokens
            found.append((Work(request, 0, tokens), fits[0]))
        return found

    def _step4_cpu_decodes(self, cover: Cover, works: list[Work], loads: list[float], totals: np.ndarray) -> Dealt:
        """CPU decodes for batch-0 and batch-1 while `Tca1 <= Tl0` and `Tca0 <= Tl1 + Tga0` hold; the others are skipped.

        Batch-1 first: its attention hides behind the linear stage of all of batch-0, so that step 5 finds what can go.
        """
        fit = int(totals.searchsorted(cover.room1[0], "right")) - 1  # so many as they come, before anyone is in batch-0
        few, rest, skipped = list[Work](), works[:fit], list[Work]()
        room0, room1, least = cover.room0.tolist(), cover.room1.tolist(), min(loads)
        load0, load1 = 0.0, float(totals[fit])
        for i, (work, load) in enumerate(zip(works[fit:], loads[fit:], strict=True), fit):
            if load1 + load <= room1[len(few)]:
                rest.append(work)
                load1 += load
            elif load0 + load <= room0[len(rest)] and len(few) < cover.seats:
                few.append(work)
                load0 += load
            elif load1 + least > room1[len(few)] and load0 + least > room0[len(rest)]:
                skipped += works[i:]  # not even the shortest fits any more
                break
            else:
                skipped.append(work)
        self._overflow(skipped, few, rest)
        return few, rest

    def _overflow(self, works: Sequence[Work], few: list[Work], rest: list[Work]) -> None:
        """CPU decodes that would break both inequalities: left to the next iteration."""

    def _step5_reduce(self, prefills: list[Prefill], on_gpu: OnGpu, few: list[Work], rest: list[Work]) -> list[Prefill]:
        """Takes back the last prefills whose KV would go to the CPU, while both inequalities hold and above the floor."""
        if not prefills or prefills[-1][1] == "gpu":
            return prefills
        first, second = on_gpu.batch(prefills, few), SubBatch(cpu_decodes=tuple(rest))
        kept, tokens, stages = list(prefills), first.num_tokens, self.costs.stages((first, second), on_gpu.ga0)
        while kept and kept[-1][1] == "cpu" and tokens - kept[-1][0].length >= self.floor:
            tokens -= kept[-1][0].length
            pref0 = stages.pref0 - self.costs.t_prefill_attn([kept[-1][0]])
            stages = Stages(self.costs.t_linear(tokens), pref0, *stages[2:])
            if not stages.holds:
                break
            kept.pop()
        return kept

    def _deal(self, cover: Cover, works: list[Work], totals: np.ndarray, few: list[Work], rest: list[Work]) -> Dealt:
        """Step 4 once more, since step 5 has settled the prefills: which CPU decodes go to which batch?

        Of all ways to cut the queue, the first k into batch-0 and the next into batch-1, as many as hide there or none (then
        the weights are read once), the one with the largest x/T; or what step 4 found, if none is larger.
        """
        if not self.greedy:
            return few, rest
        k = np.arange(min(len(works), cover.seats) + 1)
        m = totals.searchsorted(totals[k] + cover.room1[k], "right") - 1 - k
        hidden = np.concatenate(([True], totals[k] <= cover.room0[m], totals[k] <= cover.room0[0]))
        k, m = np.concatenate(([len(few)], k, k)), np.concatenate(([len(rest)], m, 0 * m))
        rates = self._rates(cover, k, m) * (hidden & (k + m > 0))
        best = int(rates.argmax())
        if best == 0:
            return few, rest
        return works[: k[best]], works[k[best] : k[best] + m[best]]

    def _rates(self, cover: Cover, k: np.ndarray, m: np.ndarray) -> np.ndarray:
        """x/T with k CPU decodes in batch-0 and m in batch-1, all hidden: T is then the GPU's own work."""
        costs, stages, count = self.costs, cover.stages, len(cover.first) + k + m
        layer_s = cover.linear0[k] + cover.linear1[m] + stages.pref0 + stages.ga0
        once_s = costs.head.each(count) + costs.overhead(stages._replace(ca0=1.0))  # in either batch alike
        return count / np.maximum(costs.num_layers * layer_s + once_s, 1e-12)

    def _late(
        self, cover: Cover, works: Sequence[Work], few: list[Work], rest: list[Work]
    ) -> tuple[Dealt, tuple[int, ...]]:
        """Whoever has waited longest, and too long, is served beside the others, or alone in batch-0 where that has the larger
        x/T; but not within `PATIENCE` plans after a forced one. Also returns its id."""
        if min(self.unforced, self.skipped.get(works[0].request, 0)) < self.PATIENCE:
            return (few, rest), ()
        oldest = works[0]
        beside = (few, rest) if oldest in few or oldest in rest else (few, [*rest, oldest])
        ways = (beside, ([oldest], list[Work]())) if self.greedy and cover.seats else (beside,)
        return max(ways, key=lambda way: self._two(cover.first, *way).rate), (oldest.request.id,)

    def _step6_decide(
        self, prefills: tuple[list[Prefill], list[Prefill]], on_gpu: OnGpu, few: list[Work], rest: list[Work],
        forced: tuple[int, ...],
    ) -> tuple[Candidate, Candidate, tuple[int, ...]]:  # fmt: skip
        """The candidate with the larger x/T first; the inequalities rule out a two-batch one that breaks them."""
        tried, kept = prefills
        one = self.costs.candidate("GPU only", (on_gpu.batch(self._floored(tried, on_gpu)),), on_gpu.ga0)
        two = self._two(on_gpu.batch(kept), few, rest, on_gpu.ga0)
        if not one.requests:  # nothing for the GPU: neither inequality admits anything, and whatever is on the CPU runs
            parts = halves(decodes_of(self.running))
            two = self.costs.candidate("two batches", [SubBatch(cpu_decodes=part) for part in parts])
            forced = () if two.stages.holds else (-1,)
            return two, one, forced
        better = two.rate > one.rate and two.stages.holds
        if (few or rest) and (better or forced or not self.greedy):
            return two, one, () if better else forced
        return one, two, ()

    # ---- What they share ----

    def _by_age(self) -> list[Work]:
        """The CPU decodes, whoever was passed over most often first."""
        on_cpu = [r for r in self.running if r.device == "cpu"]
        first = sorted([r for r in on_cpu if r in self.skipped], key=self.skipped.__getitem__, reverse=True)
        return decodes_of(first + [r for r in on_cpu if r not in self.skipped])

    def _cover(self, first: SubBatch, count: int, ga0: float | None = None) -> Cover:
        """With 0 to `count` CPU decodes in either batch: what all steps ask for, worked out once."""
        widths, stages = np.arange(count + 1), self.costs.stages((first,), ga0)
        linear0, linear1 = self.costs.t_linear_each(np.array((first.num_tokens + widths, widths)))
        room0, room1 = self.costs.capacity(np.array((linear1 + stages.pref0 + stages.ga0, linear0)))
        seats = max(0, self.config.max_batched_tokens - first.num_tokens)
        return Cover(first, stages, linear0, linear1, room0, room1, seats)

    def _two(self, first: SubBatch, few: list[Work], rest: list[Work], ga0: float | None = None) -> Candidate:
        name = "two batches" if rest else "one batch with CPU decodes"
        batches = SubBatch(first.prefills, first.gpu_decodes, tuple(few)), SubBatch(cpu_decodes=tuple(rest))
        return self.costs.candidate(name, batches, ga0)

    def _floored(self, prefills: Sequence[Prefill], on_gpu: OnGpu) -> list[Prefill]:
        """The GPU-only candidate's prefills: those of the CPU taken back from the end, down to the floor."""
        kept, tokens = list(prefills), len(on_gpu.works) + sum([w.length for w, _ in prefills])
        while kept and kept[-1][1] == "cpu" and tokens - kept[-1][0].length >= self.floor:
            tokens -= kept.pop()[0].length
        return kept

    def _account(
        self, chosen: Candidate, few: list[Work], rest: list[Work], prefills: list[Prefill], forced: tuple[int, ...]
    ) -> dict[int, str]:
        """Counts who was passed over, and says of each request why it is where it is."""
        reasons = {w.request.id: "waits: taken back in step 5, down to the floor" for w, _ in prefills}
        for batch, text, spare in zip(chosen.batches, ("batch-0", "batch-1"), chosen.stages.slack[::-1], strict=False):
            held = "within its inequality" if chosen.stages.holds or spare >= 0 else "though its inequality breaks"
            for w in batch.prefills:
                reasons[w.request.id] = f"{text}: prefill, KV to the {w.request.device} pool"
            reasons.update(dict.fromkeys([w.request.id for w in batch.gpu_decodes], "batch-0: its KV is on the GPU"))
            ids = [w.request.id for w in batch.cpu_decodes]
            reasons.update(dict.fromkeys(ids, f"{text}: CPU decode {held}"))
            reasons.update((i, f"{text}: CPU decode that has waited too long") for i in forced if i in ids)
        passed = [r for r in self.running if r.id not in reasons]
        self.skipped = {r: self.skipped.get(r, 0) + 1 for r in passed}
        self.unforced = 0 if max(forced, default=-1) >= 0 else self.unforced + 1
        reasons.update(dict.fromkeys([r.id for r in passed], "skipped: it would break both inequalities"))
        if chosen.name == "GPU only":
            reasons.update((w.request.id, "skipped: GPU-only has the higher x/T") for w in (*few, *rest))
        return reasons

    def _homes(self) -> tuple[Device, ...]:
        return ("gpu", "cpu")

    def _make_way(self, victim: Request, moves: list[Move]) -> str:
        """From the GPU to the CPU, where it goes on decoding; from the CPU nowhere, or the two could swap for ever."""
        fits = self.blocks.fits_ever(victim, "cpu") and len(victim.block_table) <= self.blocks.free("cpu")
        if victim.device == "cpu" or not fits:
            self._drop(victim)
            return "dropped, to be prefilled again"
        moves.append(self.blocks.move(victim, "cpu"))
        self._enter(victim)
        return "swapped out to the CPU"

    def _resume(self, moves: list[Move], why: list[str]) -> None:
        """Swaps in the oldest CPU-requests while a twentieth of the GPU pool stays free."""
        on_cpu = [r for r in self.running if r.device == "cpu"]
        on_gpu = len(self.running) - len(on_cpu)
        for request in on_cpu:
            if not self.blocks.fits_ever(request, "gpu"):
                continue
            slack = max(on_gpu, self.blocks.total["gpu"] // 20) if on_gpu else 0
            if self.blocks.needed(request.num_tokens) + slack > self.blocks.free("gpu"):
                return
            moves.append(self.blocks.move(request, "gpu"))
            self.blocks.grow(request, request.num_tokens)
            on_gpu += 1
            why.append(f"r{request.id} swapped in: {self.blocks.free('gpu')} gpu blocks stay free")


class Asymmetric(Neo):
    """NEO's pipeline (figure 5) filled by a fixed rule, steps 1 to 4 alone: the GPU until it is full, then the CPU."""

    PATIENCE = 8
    greedy = False

    def __init__(self, config: EngineConfig, blocks: Blocks, costs: Profile | None = None) -> None:
        super().__init__(config, blocks, costs)
        self.floor = 2**62  # tokens: no prefill is taken back


class FastDecodePlus(Neo):
    """The paper's FastDecode+ (figure 8): NEO's pipeline with every decode on the CPU, whether or not it can be hidden."""

    greedy = False

    def _homes(self) -> tuple[Device, ...]:
        return ("cpu",)

    def _resume(self, moves: list[Move], why: list[str]) -> None:
        """Nobody decodes on the GPU."""

    def _overflow(self, works: Sequence[Work], few: list[Work], rest: list[Work]) -> None:
        for batch, half in zip((rest, few), halves(works), strict=False):
            batch += half


class NeoReleased(Neo):
    """The released code's constants: prefills trimmed to 128 tokens, and 0.8 ms of launches in each layer's CPU time.

    Nor does it age who was skipped: with hundreds of requests on the CPU that costs a fifth of the throughput (figure 10a).
    """

    PATIENCE = 2**62
    FLOOR = 128
    LAUNCH_S = 8e-4

    def __init__(self, config: EngineConfig, blocks: Blocks, costs: Profile | None = None) -> None:
        super().__init__(config, blocks, costs and replace(costs, launch_s=self.LAUNCH_S))
        self.floor = self.FLOOR


POLICIES: dict[str, type[Scheduler]] = {
    "gpu-only": Scheduler,
    "gpu-only-unchunked": Unchunked,
    "simple": SimpleOffloading,
    "symmetric": Symmetric,
    "asymmetric": Asymmetric,
    "fastdecode+": FastDecodePlus,
    "neo": Neo,
    "neo-released": NeoReleased,
}


def _told(c: Candidate) -> str:
    return f"{c.name}: {c.requests} requests in {c.seconds * 1e3:.1f} ms, {c.rate:.0f}/s"
