"""What the next iteration computes: what all policies share, and the simple ones. Torch-free and deterministic.

`plan()` looks at three queues (waiting, running, parked) and at the free blocks, and returns a frozen `IterationPlan`
that says why it is as it is. The engine calls it once an iteration; the simulator and the notebooks call the same
object. The load-aware policies are in `neo`. A request's KV is only a cache of its tokens, so each of them can be parked
in the other pool (a swap) or dropped and prefilled again (a recompute) without being lost.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

from neo_lite.blocks import Blocks
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cost_model import Profile
from neo_lite.request import OTHER, Device, IterationPlan, Move, Request, SubBatch, Work, decodes_of


class Scheduler:
    """Continuous batching with all KV and all decode attention in one pool, the home; the other pool only parks.

    Oldest first: the oldest running request can take every block of the pool, and a request that could never fit is
    refused on arrival, so each iteration makes progress and every admitted request finishes.
    """

    homes: tuple[Device, ...] = ("gpu",)  # the pools where a request may decode
    chunked_prefill = True

    def __init__(self, config: EngineConfig, blocks: Blocks, costs: Profile | None = None) -> None:
        self.config, self.blocks = config, blocks
        self.waiting: deque[Request] = deque()  # no KV yet, or dropped
        self.running: list[Request] = []  # in order of arrival, whatever pool each came from
        self.parked: deque[Request] = deque()  # KV in the other pool, waiting for room

    def check(self, request: Request) -> None:
        """Refuses a request whose pool could never hold it."""
        if not any(self.blocks.fits_ever(request, device) for device in self.homes):
            home = max(self.homes, key=lambda d: self.blocks.total[d])
            pool, tokens = self.blocks.total[home], request.max_total_tokens
            raise NeoLiteError(
                f"the request may grow to {tokens} tokens ({self.blocks.needed(tokens)} blocks) and the {home} pool"
                f" has {pool} blocks: shorten the prompt, lower max_tokens, or raise {home}_kv_tokens"
            )

    def remove(self, request: Request) -> None:
        """Takes a finished or cancelled request out of its queue and its blocks back."""
        for queue in (self.running, self.parked, self.waiting):  # the shortest first: thousands may wait
            if request in queue:
                queue.remove(request)
                break
        self.blocks.release(request)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.parked)

    def plan(self, now_s: float) -> IterationPlan:
        """Decodes first, then who is parked, then prefills in order of arrival, within the token budget."""
        moves, why = list[Move](), list[str]()
        self._make_room(moves, why)
        if calm := not why:  # whoever had to make way is not brought back in the same iteration, and nobody new comes
            self._resume(moves, why)
        decodes = decodes_of(r for r in self.running if decoding(r))
        prefills = self._prefills(self.config.max_batched_tokens - len(decodes), calm and not self.parked, now_s, why)
        batches = self._batches(tuple(prefills), decodes)
        return IterationPlan(self.config.mode, batches, tuple(moves), tuple(why))

    # ---- What the policies share ----

    def _make_room(self, moves: list[Move], why: list[str]) -> None:
        """A block for each decode that needs one; the newest request of its pool makes way for the oldest."""
        size = self.blocks.block_size
        for request in [r for r in self.running if r.num_computed >= len(r.block_table) * size]:  # one in sixteen
            while (not why or request in self.running) and not self.blocks.grow(request, request.num_tokens):
                victim = next(r for r in reversed(self.running) if r.device == request.device)
                self.running.remove(victim)
                pool = f"r{victim.id} makes way: {victim.device} pool of {self.blocks.total[victim.device]} blocks full"
                why.append(f"{pool}; {self._make_way(victim, moves)}")

    def _drop(self, request: Request) -> None:
        self.blocks.release(request)
        request.num_recomputes += 1
        self.waiting.appendleft(request)

    def _prefills(self, budget: int, admit: bool, now_s: float, why: list[str]) -> list[Work]:
        """Chunks of who has begun, then of who waits; without chunking the first prompt may exceed the budget."""
        works: list[Work] = []
        begun = deque(r for r in self.running if not decoding(r))
        while budget > 0:
            if not begun and admit and self.waiting and len(self.running) < self.config.max_seqs:
                whole = self.chunked_prefill or not works or self.waiting[0].num_tokens <= budget
                if whole and self._room(self.waiting[0]):
                    begun.append(self._admit(self.waiting.popleft(), self.homes[0], now_s, why))
            if not begun:
                break
            request = begun.popleft()
            length = request.num_tokens - request.num_computed
            if self.chunked_prefill:
                length = min(length, budget)
            works.append(Work(request, request.num_computed, length))
            budget -= length
        return works

    def _admit(self, request: Request, device: Device, now_s: float, why: list[str]) -> Request:
        request.device = device
        request.first_scheduled_s = now_s if request.first_scheduled_s is None else request.first_scheduled_s
        self.blocks.grow(request, request.num_tokens)
        self._enter(request)
        why.append(f"r{request.id} admitted: {request.num_tokens} tokens in {len(request.block_table)} {device} blocks")
        return request

    def _enter(self, request: Request) -> None:
        """Among those that run, by arrival: who came back or was swapped out keeps its age."""
        insort(self.running, request, key=lambda r: r.id)

    def _room(self, request: Request) -> bool:
        """Room at home for all its tokens, and a block for each that runs there, so that none leaves at once."""
        home = self.homes[0]
        there = sum(r.device == home for r in self.running)
        return self.blocks.needed(request.num_tokens) + there <= self.blocks.free(home)

    # ---- What a policy decides ----

    def _make_way(self, victim: Request, moves: list[Move]) -> str:
        """Takes a request that is no longer running out of its full pool; says how."""
        other = OTHER[victim.device]
        if len(victim.block_table) > self.blocks.free(other):
            self._drop(victim)
            return "the other too: dropped, to be prefilled again"
        moves.append(self.blocks.move(victim, other))
        self.parked.appendleft(victim)
        return f"parked in the {other} pool"

    def _resume(self, moves: list[Move], why: list[str]) -> None:
        """Brings back who was parked, oldest first."""
        home = self.homes[0]
        while self.parked and len(self.running) < self.config.max_seqs and self._room(self.parked[0]):
            request = self.parked.popleft()
            moves.append(self.blocks.move(request, home))
            self.blocks.grow(request, request.num_tokens)
            self._enter(request)
            why.append(f"r{request.id} comes back: {self.blocks.free(home)} {home} blocks stay free")

    def _batches(self, prefills: tuple[Work, ...], decodes: tuple[Work, ...]) -> tuple[SubBatch, ...]:
        return (SubBatch(prefills, gpu_decodes=decodes),)


class Unchunked(Scheduler):
    """The same with whole prompts: SwiftLLM's scheduling, the paper's baseline in figures 9 and 10."""

    chunked_prefill = False


class SimpleOffloading(Scheduler):
    """The paper's first sketch (figure 3): all KV and all decode attention on the CPU, everything else on the GPU.

    A prompt is prefilled whole: its KV leaves for the CPU layer by layer, where a second chunk could not see it.
    """

    homes: tuple[Device, ...] = ("cpu",)
    chunked_prefill = False

    def _batches(self, prefills: tuple[Work, ...], decodes: tuple[Work, ...]) -> tuple[SubBatch, ...]:
        return (SubBatch(prefills, cpu_decodes=decodes),)


class Symmetric(SimpleOffloading):
    """FastDecode's pipeline (figure 4): two equal sub-batches of CPU decodes take turns; prefills run on their own."""

    def _batches(self, prefills: tuple[Work, ...], decodes: tuple[Work, ...]) -> tuple[SubBatch, ...]:
        if prefills:
            return (SubBatch(prefills),)
        return tuple(SubBatch(cpu_decodes=half) for half in halves(decodes))


def halves(works: Sequence[Work]) -> list[tuple[Work, ...]]:
    """Two parts of about as many KV tokens each, the longest dealt out first."""
    parts: tuple[list[Work], list[Work]] = ([], [])
    tokens, lengths = [0, 0], [start + length for _, start, length in works]
    for i in sorted(range(len(works)), key=lengths.__getitem__, reverse=True):
        lighter = int(tokens[1] < tokens[0])
        parts[lighter].append(works[i])
        tokens[lighter] += lengths[i]
    return [tuple(part) for part in parts if part]


def decoding(request: Request) -> bool:
    """Only its newest token is without KV."""
    return request.num_computed > 0 and request.num_tokens == request.num_computed + 1
