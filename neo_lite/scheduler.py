"""What the next iteration computes: the policies, torch-free and deterministic.

`plan()` looks at three queues (waiting, running, parked) and at the free blocks, and returns a frozen `IterationPlan`
that says why it is as it is. The engine calls it once an iteration; the simulator and the notebooks call the same
object. A request's KV is only a cache of its tokens, so each of them can be parked in the other pool (a swap) or
dropped and prefilled again (a recompute) without being lost.
"""

from __future__ import annotations

from collections import deque

from neo_lite.blocks import Blocks
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.request import OTHER, Device, IterationPlan, Move, Request, SubBatch, Work


class Scheduler:
    """Continuous batching with all KV and all decode attention in one pool, `home`; the other pool only parks.

    Oldest first: the oldest running request can take every block of the pool, and a request that could never fit is
    refused on arrival, so each iteration makes progress and every admitted request finishes.
    """

    home: Device = "gpu"
    chunked_prefill = True

    def __init__(self, config: EngineConfig, blocks: Blocks) -> None:
        self.config, self.blocks = config, blocks
        self.waiting: deque[Request] = deque()  # no KV yet, or dropped
        self.running: list[Request] = []  # in the order of admission; KV in `home`
        self.parked: deque[Request] = deque()  # KV in the other pool, waiting for room

    def add(self, request: Request) -> None:
        """Queues a request, or refuses one whose pool could never hold it."""
        if not self.blocks.fits_ever(request, self.home):
            pool, tokens = self.blocks.total[self.home], request.max_total_tokens
            raise NeoLiteError(
                f"the request may grow to {tokens} tokens ({self.blocks.needed(tokens)} blocks) and the {self.home} pool"
                f" has {pool} blocks: shorten the prompt, lower max_tokens, or raise {self.home}_kv_tokens"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a finished or cancelled request out of its queue and its blocks back."""
        for queue in (self.waiting, self.running, self.parked):
            if request in queue:
                queue.remove(request)
        self.blocks.release(request)

    def requeue_all(self) -> None:
        """Drops all KV and starts everyone again from their tokens: after an iteration that did not end."""
        for request in reversed([*self.running, *self.parked]):
            self._drop(request)
        self.running.clear()
        self.parked.clear()

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.parked)

    def plan(self, now_s: float) -> IterationPlan:
        """Decodes first, then who is parked, then prefills in order of arrival, within the token budget."""
        moves: list[Move] = []
        why: list[str] = []
        self._make_room(moves, why)
        calm = not why  # whoever had to make way is not brought back in the same iteration, and nobody new comes
        if calm:
            self._resume(moves, why)
        decodes = [r for r in self.running if _decoding(r)]
        prefills = self._prefills(self.config.max_batched_tokens - len(decodes), calm and not self.parked, why)
        for work in prefills:
            if work.request.first_scheduled_s is None:
                work.request.first_scheduled_s = now_s
        batch = self._batch(prefills, [Work(r, r.num_computed, 1) for r in decodes])
        return IterationPlan(self.config.mode, (batch,), tuple(moves), tuple(why))

    def _make_room(self, moves: list[Move], why: list[str]) -> None:
        """A block for each decode that needs one; the newest request makes way for the oldest."""
        for request in list(self.running):
            while request in self.running and not self.blocks.grow(request, request.num_tokens):
                victim = self.running.pop()
                pool = f"r{victim.id} makes way: the {self.home} pool of {self.blocks.total[self.home]} blocks is full"
                if len(victim.block_table) <= self.blocks.free(OTHER[self.home]):
                    moves.append(self.blocks.move(victim, OTHER[self.home]))
                    self.parked.appendleft(victim)
                    why.append(f"{pool}; parked in the {victim.device} pool")
                else:
                    self._drop(victim)
                    why.append(f"{pool}, and so is the other; dropped, to be prefilled again")

    def _resume(self, moves: list[Move], why: list[str]) -> None:
        while self.parked and self._room_for(self.parked[0]):
            request = self.parked.popleft()
            moves.append(self.blocks.move(request, self.home))
            self.blocks.grow(request, request.num_tokens)
            self.running.append(request)
            why.append(f"r{request.id} comes back: {self.blocks.free(self.home)} {self.home} blocks stay free")

    def _prefills(self, budget: int, admit: bool, why: list[str]) -> list[Work]:
        """Chunks of who has begun, then of who waits; without chunking the first prompt may exceed the budget."""
        works: list[Work] = []
        begun = deque(r for r in self.running if not _decoding(r))
        while budget > 0:
            if not begun and admit and self.waiting and self._room_for(self.waiting[0]):
                begun.append(self._admit(self.waiting.popleft(), why))
            if not begun:
                break
            request = begun.popleft()
            length = request.num_tokens - request.num_computed
            if self.chunked_prefill:
                length = min(length, budget)
            works.append(Work(request, request.num_computed, length))
            budget -= length
        return works

    def _admit(self, request: Request, why: list[str]) -> Request:
        request.device = self.home
        self.blocks.grow(request, request.num_tokens)
        self.running.append(request)
        why.append(f"r{request.id} admitted: {request.num_tokens} tokens in {len(request.block_table)} blocks")
        return request

    def _room_for(self, request: Request) -> bool:
        """Room for all its tokens and a block of slack for each that runs, so that it need not leave at once."""
        needed = self.blocks.needed(request.num_tokens) + len(self.running)
        return len(self.running) < self.config.max_seqs and needed <= self.blocks.free(self.home)

    def _drop(self, request: Request) -> None:
        self.blocks.release(request)
        request.num_recomputes += 1
        self.waiting.appendleft(request)

    def _batch(self, prefills: list[Work], decodes: list[Work]) -> SubBatch:
        if self.home == "gpu":
            return SubBatch(tuple(prefills), gpu_decodes=tuple(decodes))
        return SubBatch(tuple(prefills), cpu_decodes=tuple(decodes))


class SimpleOffloading(Scheduler):
    """The paper's first sketch (figure 3): all KV and all decode attention on the CPU, everything else on the GPU.

    A prompt is prefilled whole: its KV leaves for the CPU layer by layer, where a second chunk could not see it.
    """

    home: Device = "cpu"
    chunked_prefill = False


POLICIES: dict[str, type[Scheduler]] = {"gpu-only": Scheduler, "simple": SimpleOffloading}


def _decoding(request: Request) -> bool:
    """Only its newest token is without KV."""
    return request.num_computed > 0 and request.num_tokens == request.num_computed + 1
