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
from neo_lite.cost_model import Candidate, Profile, Stages
from neo_lite.request import Device, IterationPlan, Move, Request, Said, SubBatch, Work, decodes_of
from neo_lite.scheduler import Scheduler, SimpleOffloading, Symmetric, Unchunked, halves

Prefill = tuple[Work, Device]  # who would be admitted, and where its KV would live
Dealt = tuple[list[Request], list[Request]]  # the CPU decodes of batch-0, few of them, and of batch-1, the rest
Forced = tuple[int, ...]  # ids of who runs against the policy's own rule


class OnGpu(NamedTuple):
    """All GPU decodes. They belong to batch-0 of every candidate, so that their attention is added up once."""

    requests: list[Request]
    works: tuple[Work, ...]
    ga0: float  # seconds of their attention in one layer

    def batch(self, prefills: Sequence[Prefill]) -> SubBatch:
        """Batch-0 without CPU decodes: they and these prefills."""
        return SubBatch(tuple([work for work, _ in prefills]), self.works)


class Queue(NamedTuple):
    """The CPU decodes, whoever has waited longest first. Their Works are made when it is settled who is served."""

    requests: list[Request]
    loads: list[float]  # KV tokens that each reads, what it costs besides included
    totals: np.ndarray  # of the first 0, 1, 2, ... of them


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

    homes: tuple[Device, ...] = ("gpu", "cpu")
    chunked_prefill = False
    PATIENCE = 16
    FLOOR = 0  # tokens below which no prefill is taken back; 0: where the cost model leaves the memory-bound regime
    greedy = True  # step 6 weighs; otherwise CPU decodes run whenever there are any

    def __init__(self, config: EngineConfig, blocks: Blocks, costs: Profile | None = None) -> None:
        super().__init__(config, blocks, costs)
        if costs is None:
            raise NeoLiteError(f"mode {config.mode} weighs stage times: give the engine a Profile (profiler.measure)")
        self.costs, self.floor = costs, self.FLOOR or costs.ridge_tokens
        self.plans = 0  # so many were made before
        # CPU decodes that were passed over, whoever has waited longest first, and the plan that was the first to do so.
        self.skipped: dict[Request, int] = {}
        self.unforced = self.PATIENCE  # plans since the last forced one

    def plan(self, now_s: float) -> IterationPlan:
        """Step 1, two empty batches, and then the others."""
        moves, why = list[Move](), list[str]()
        waited = len(self.waiting)
        on_gpu = self._step2_gpu_decodes(moves, why)
        prefills = self._step3_prefills(len(on_gpu.works), len(self.waiting) == waited, moves)
        queue = self._by_age()
        kept, dealt, late = self._two_batches(prefills, on_gpu, queue)
        chosen, other, forced = self._step6_decide(prefills, kept, on_gpu, dealt, late)
        for (request, _, _), device in self._floored(prefills, on_gpu) if chosen.name == "GPU only" else kept:
            self.waiting.popleft()
            self._admit(request, device, now_s, why)
        self._count_skipped(chosen, queue, forced)
        said = self._reasons(chosen, on_gpu, queue, dealt, prefills, forced)
        why.append(f"{_told(chosen)} against {_told(other)}" if other.requests else _told(chosen))
        both = chosen, other
        return IterationPlan(self.config.mode, chosen.batches, tuple(moves), tuple(why), both, said, forced)

    def _two_batches(self, prefills: list[Prefill], on_gpu: OnGpu, queue: Queue) -> tuple[list[Prefill], Dealt, Forced]:
        """Steps 4 and 5: the prefills kept, the CPU decodes of either batch, and who among them is late."""
        if not queue.requests or not (prefills or on_gpu.works):  # nothing to hide, or behind nothing: see step 6
            return self._step5_reduce(prefills, on_gpu, ([], [])), ([], []), ()
        cover = self._cover(on_gpu.batch(prefills), len(queue.requests), on_gpu.ga0)
        dealt = self._step4_cpu_decodes(cover, queue)
        kept = self._step5_reduce(prefills, on_gpu, dealt)
        if len(kept) < len(prefills):
            cover = self._cover(on_gpu.batch(kept), len(queue.requests), on_gpu.ga0)
        return kept, *self._late(cover, queue.requests[0], self._deal(cover, queue, dealt))

    def remove(self, request: Request) -> None:
        super().remove(request)
        self.skipped.pop(request, None)

    # ---- The six steps ----

    def _step2_gpu_decodes(self, moves: list[Move], why: list[str]) -> OnGpu:
        """Every GPU decode goes to batch-0; whoever finds no room is swapped out, and who fits comfortably comes in."""
        self._make_room(moves, why)
        if not why:
            self._resume(moves, why)
        on_gpu = [r for r in self.running if r.device == "gpu"]
        tokens = sum([r.num_computed for r in on_gpu]) + len(on_gpu)
        return OnGpu(on_gpu, decodes_of(on_gpu), self.costs.t_gpu_attn(tokens))

    def _step3_prefills(self, decodes: int, admit: bool, moves: list[Move]) -> list[Prefill]:
        """Prompts in order of arrival, on the GPU while there is room, then on the CPU, within the token budget."""
        found: list[Prefill] = []
        budget, seats = self.config.max_batched_tokens - decodes, self.config.max_seqs - len(self.running)
        there = {"gpu": decodes, "cpu": len(self.running) - decodes}
        room = {d: self.blocks.free(d) - there[d] for d in self.blocks.total}
        homes = [d for d in self.homes if d == "cpu" or all(m.target == "gpu" for m in moves)]
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

    def _step4_cpu_decodes(self, cover: Cover, queue: Queue) -> Dealt:
        """CPU decodes for batch-0 and batch-1 while `Tca1 <= Tl0` and `Tca0 <= Tl1 + Tga0` hold; the others are skipped.

        Batch-1 first: its attention hides behind the linear stage of all of batch-0, so that step 5 finds what can go.
        """
        on_cpu, loads, totals = queue
        fit = int(totals.searchsorted(cover.room1[0], "right")) - 1  # so many as they come, before anyone is in batch-0
        few, rest, skipped = list[Request](), on_cpu[:fit], list[Request]()
        room0, room1, least = cover.room0.tolist(), cover.room1.tolist(), min(loads)
        load0, load1 = 0.0, float(totals[fit])
        for i, (request, load) in enumerate(zip(on_cpu[fit:], loads[fit:], strict=True), fit):
            if load1 + load <= room1[len(few)]:
                rest.append(request)
                load1 += load
            elif load0 + load <= room0[len(rest)] and len(few) < cover.seats:
                few.append(request)
                load0 += load
            elif load1 + least > room1[len(few)] and load0 + least > room0[len(rest)]:
                skipped += on_cpu[i:]  # not even the shortest fits any more
                break
            else:
                skipped.append(request)
        self._overflow(skipped, few, rest)
        return few, rest

    def _overflow(self, skipped: list[Request], few: list[Request], rest: list[Request]) -> None:
        """CPU decodes that would break both inequalities: left to the next iteration."""

    def _step5_reduce(self, prefills: list[Prefill], on_gpu: OnGpu, dealt: Dealt) -> list[Prefill]:
        """Takes back the last prefills whose KV would go to the CPU, while both inequalities hold and above the floor."""
        if not prefills or prefills[-1][1] == "gpu":
            return prefills
        return self._floored(prefills, on_gpu, self._two(on_gpu.batch(prefills), dealt, on_gpu.ga0))

    def _deal(self, cover: Cover, queue: Queue, dealt: Dealt) -> Dealt:
        """Step 4 once more, since step 5 has settled the prefills: which CPU decodes go to which batch?

        Of all ways to cut the queue, the first k into batch-0 and the next into batch-1, as many as hide there or none (then
        the weights are read once), the one with the largest x/T; or what step 4 found, if none is larger.
        """
        if not self.greedy:
            return dealt
        on_cpu, _, totals = queue
        n = min(len(on_cpu), cover.seats) + 1
        k, load = np.arange(n), totals[:n]
        m = totals.searchsorted(load + cover.room1[:n], "right") - 1 - k
        sound = np.concatenate(((True,), load <= cover.room0[m], load <= cover.room0[0]))
        ks, ms = np.concatenate(((len(dealt[0]),), k, k)), np.concatenate(((len(dealt[1]),), m, np.zeros_like(m)))
        best = int((self._rates(cover, ks, ms) * (sound & (ks + ms > 0))).argmax())
        return (on_cpu[: ks[best]], on_cpu[ks[best] : ks[best] + ms[best]]) if best else dealt

    def _rates(self, cover: Cover, k: np.ndarray, m: np.ndarray) -> np.ndarray:
        """x/T with k CPU decodes in batch-0 and m in batch-1, all hidden: T is then the GPU's own work."""
        costs, stages, count = self.costs, cover.stages, len(cover.first) + k + m
        layer_s = cover.linear0[k] + cover.linear1[m] + stages.pref0 + stages.ga0
        once_s = costs.head.each(count) + costs.overhead(stages._replace(ca0=1.0))  # in either batch alike
        return count / np.maximum(costs.num_layers * layer_s + once_s, 1e-12)

    def _late(self, cover: Cover, oldest: Request, dealt: Dealt) -> tuple[Dealt, Forced]:
        """Whoever has waited longest, and too long, is served beside the others, or alone in batch-0 where that has the larger
        x/T; but not within `PATIENCE` plans after a forced one. Also returns its id."""
        if min(self.unforced, self.plans - self.skipped.get(oldest, self.plans)) < self.PATIENCE:
            return dealt, ()
        few, rest = dealt
        beside = dealt if oldest in few or oldest in rest else (few, [*rest, oldest])
        ways = (beside, ([oldest], list[Request]())) if self.greedy and cover.seats else (beside,)
        return max(ways, key=lambda way: self._two(cover.first, way).rate), (oldest.id,)

    def _step6_decide(
        self, tried: list[Prefill], kept: list[Prefill], on_gpu: OnGpu, dealt: Dealt, forced: Forced
    ) -> tuple[Candidate, Candidate, Forced]:
        """The candidate with the larger x/T first; the inequalities rule out a two-batch one that breaks them."""
        one = self.costs.candidate("GPU only", (on_gpu.batch(self._floored(tried, on_gpu)),), on_gpu.ga0)
        two = self._two(on_gpu.batch(kept), dealt, on_gpu.ga0)
        if not one.requests:  # nothing for the GPU: neither inequality admits anything, and whatever is on the CPU runs
            parts = halves(decodes_of(self.running))
            two = self.costs.candidate("two batches", [SubBatch(cpu_decodes=part) for part in parts])
            forced = () if two.stages.holds else (-1,)
            return two, one, forced
        better = two.rate > one.rate and two.stages.holds
        if any(dealt) and (better or forced or not self.greedy):
            return two, one, () if better else forced
        return one, two, ()

    # ---- What they share ----

    def _by_age(self) -> Queue:
        """Whoever was passed over the longest first, then the others in order of arrival."""
        on_cpu = [*self.skipped, *[r for r in self.running if r.device == "cpu" and r not in self.skipped]]
        own = self.costs.cpu_request_tokens
        loads = [r.num_computed + 1 + own for r in on_cpu]
        return Queue(on_cpu, loads, np.array([0.0, *loads]).cumsum())

    def _cover(self, first: SubBatch, count: int, ga0: float | None = None) -> Cover:
        """With 0 to `count` CPU decodes in either batch: what all steps ask for, worked out once."""
        widths, stages = np.arange(count + 1), self.costs.stages((first,), ga0)
        linear0, linear1 = self.costs.t_linear_each(np.array((first.num_tokens + widths, widths)))
        room0, room1 = self.costs.capacity(np.array((linear1 + stages.pref0 + stages.ga0, linear0)))
        seats = max(0, self.config.max_batched_tokens - first.num_tokens)
        return Cover(first, stages, linear0, linear1, room0, room1, seats)

    def _two(self, first: SubBatch, dealt: Dealt, ga0: float | None = None) -> Candidate:
        few, rest = dealt
        batches = SubBatch(first.prefills, first.gpu_decodes, decodes_of(few)), SubBatch(cpu_decodes=decodes_of(rest))
        return self.costs.candidate("two batches" if rest else "one batch with CPU decodes", batches, ga0)

    def _floored(self, prefills: list[Prefill], on_gpu: OnGpu, two: Candidate | None = None) -> list[Prefill]:
        """Without those of the CPU at the end, down to the floor; in step 5 only while the inequalities of `two` hold."""
        tokens = two.batches[0].num_tokens if two else len(on_gpu.works) + sum([w.length for w, _ in prefills])
        kept, stages = list(prefills), two.stages if two else None
        while kept and kept[-1][1] == "cpu" and tokens - kept[-1][0].length >= self.floor:
            tokens -= kept[-1][0].length
            if stages:
                pref0 = stages.pref0 - self.costs.t_prefill_attn([kept[-1][0]])
                stages = stages._replace(l0=self.costs.t_linear(tokens), pref0=pref0)
                if not stages.holds:
                    break
            kept.pop()
        return kept

    def _count_skipped(self, chosen: Candidate, queue: Queue, forced: Forced) -> None:
        """Whoever is served waits no more; whoever is passed over for the first time follows those who were before."""
        self.skipped.update(dict.fromkeys(queue.requests[len(self.skipped) :], self.plans))
        for work in [w for batch in chosen.batches for w in batch.cpu_decodes]:
            del self.skipped[work.request]
        self.plans += 1
        self.unforced = 0 if max(forced, default=-1) >= 0 else self.unforced + 1

    def _reasons(
        self, chosen: Candidate, on_gpu: OnGpu, queue: Queue, dealt: Dealt, prefills: list[Prefill], forced: Forced
    ) -> list[Said]:
        """Of whom and why they are where they are; what is said of a request last counts."""
        said: list[Said] = [(queue.requests, "skipped: it would break both inequalities")]
        if chosen.name == "GPU only":
            said += [(part, "skipped: GPU-only has the higher x/T") for part in dealt]
        said.append(([w.request for w, _ in prefills], "waits: taken back in step 5, down to the floor"))
        said.append((on_gpu.requests, "batch-0: its KV is on the GPU"))
        for batch, text, spare in zip(chosen.batches, ("batch-0", "batch-1"), chosen.stages.slack[::-1], strict=False):
            held = "within its inequality" if chosen.stages.holds or spare >= 0 else "though its inequality breaks"
            said += [([w.request], f"{text}: prefill, KV to the {w.request.device} pool") for w in batch.prefills]
            on_cpu = [w.request for w in batch.cpu_decodes]
            late = [r for r in on_cpu if r.id in forced]
            said += [(on_cpu, f"{text}: CPU decode {held}"), (late, f"{text}: CPU decode that has waited too long")]
        return said

    def _make_way(self, victim: Request, moves: list[Move]) -> str:
        """From the GPU to the CPU, where it goes on decoding; from the CPU nowhere, or the two could swap for ever."""
        self.skipped.pop(victim, None)
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
            self.skipped.pop(request, None)
            moves.append(self.blocks.move(request, "gpu"))
            self.blocks.grow(request, request.num_tokens)
            on_gpu += 1
            why.append(f"r{request.id} swapped in: {self.blocks.free('gpu')} gpu blocks stay free")


class Asymmetric(Neo):
    """NEO's pipeline (figure 5) filled by a fixed rule, steps 1 to 4 alone: the GPU until it is full, then the CPU."""

    PATIENCE = 8
    FLOOR = 2**62  # no prefill is taken back
    greedy = False


class FastDecodePlus(Neo):
    """The paper's FastDecode+ (figure 8): NEO's pipeline with every decode on the CPU, whether or not it can be hidden."""

    homes = ("cpu",)
    greedy = False

    def _resume(self, moves: list[Move], why: list[str]) -> None:
        """Nobody decodes on the GPU."""

    def _overflow(self, skipped: list[Request], few: list[Request], rest: list[Request]) -> None:
        for batch, half in zip((rest, few), halves(decodes_of(skipped)), strict=False):
            batch += [w.request for w in half]


class NeoReleased(Neo):
    """The released code's constants: prefills trimmed to 128 tokens, and 0.8 ms of launches in each layer's CPU time.

    Nor does it age who was skipped: with hundreds of requests on the CPU that costs a fifth of the throughput (figure 10a).
    """

    PATIENCE = 2**62
    FLOOR = 128
    LAUNCH_S = 8e-4

    def __init__(self, config: EngineConfig, blocks: Blocks, costs: Profile | None = None) -> None:
        super().__init__(config, blocks, costs and replace(costs, launch_s=self.LAUNCH_S))


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
