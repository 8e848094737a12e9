"""The nouns of serving: a request, the two sub-batches of an iteration, and the plan that holds them.

A request is the one thing that changes; sub-batches and plans are fully built, then frozen, so that the executor and
the timeline can trust what they read. Called by the scheduler (builds), the executor (runs), the engine (commits).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from neo_lite.cost_model import Candidate

Device = Literal["gpu", "cpu"]  # where a request's KV lives: the GPU pool or the CPU pool, never split between them
OTHER: dict[Device, Device] = {"gpu": "cpu", "cpu": "gpu"}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Temperature 0 is greedy; `top_p` keeps the smallest set of tokens of that mass."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


GREEDY = SamplingParams()


@dataclass(eq=False)
class Request:
    """One prompt on its way to its answer.

    `num_computed` tokens have their KV in blocks `block_table` of pool `device`. A prefill computes the tokens after
    them; a decode is the prefill of one last token. A request that lost its KV starts again from `num_computed` 0
    and prefills its prompt and its output so far.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    arrival_s: float = 0.0
    output: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)  # when each output token was committed
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    finish_reason: str | None = None  # stop, length, cancelled, failed
    device: Device = "gpu"
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_swaps: int = 0
    num_recomputes: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_total_tokens(self) -> int:
        """The most tokens whose KV it can ever hold: the last output token is sampled, never fed back."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def token(self, i: int) -> int:
        return self.prompt[i] if i < len(self.prompt) else self.output[i - len(self.prompt)]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class Work(NamedTuple):
    """Tokens `start` to `start + length` of one request in one iteration. `length` 1 at the end is a decode."""

    request: Request
    start: int
    length: int

    @property
    def seq_len(self) -> int:
        """Tokens it attends to, itself included."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether its last logits give a token (a chunk in the middle of a prompt gives none)."""
        return self.seq_len == self.request.num_tokens


_work = partial(tuple.__new__, Work)  # a third cheaper than Work(...), and an iteration has hundreds


def decodes_of(requests: Iterable[Request]) -> tuple[Work, ...]:
    """The newest token of each."""
    return tuple([_work((r, r.num_computed, 1)) for r in requests])


@dataclass(frozen=True)
class SubBatch:
    """What goes through the layers together: linear stages as one, attention split by where the KV lives."""

    prefills: tuple[Work, ...] = ()
    gpu_decodes: tuple[Work, ...] = ()
    cpu_decodes: tuple[Work, ...] = ()

    def __iter__(self) -> Iterator[Work]:
        """Prefills, GPU decodes, CPU decodes."""
        return iter((*self.prefills, *self.gpu_decodes, *self.cpu_decodes))

    def __len__(self) -> int:
        return len(self.prefills) + len(self.gpu_decodes) + len(self.cpu_decodes)

    @property
    def num_tokens(self) -> int:
        return sum([length for _, _, length in self.prefills]) + len(self.gpu_decodes) + len(self.cpu_decodes)


@dataclass(frozen=True)
class Move:
    """One request's KV from the blocks of one pool to those of the other: a swap-out if the target is the CPU."""

    request: Request
    target: Device
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


Said = tuple[Sequence[Request], str]  # of whom, and what


@dataclass(frozen=True)
class IterationPlan:
    """One iteration, decided. `moves` run first and in order: a later one may reuse what an earlier one freed.

    A load-aware policy also says what it weighed (`candidates`, the chosen one first), why requests are where they are
    (`said`), and whom it runs against its own rule since they waited too long (`forced`; id -1: nothing else could run).
    """

    mode: str
    batches: tuple[SubBatch, ...]
    moves: tuple[Move, ...] = ()
    why: tuple[str, ...] = ()  # one sentence for each decision, for people
    candidates: tuple[Candidate, ...] = ()
    said: Sequence[Said] = ()  # of two about the same request the last counts
    forced: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.moves) or any(len(b) for b in self.batches)

    @cached_property
    def reasons(self) -> Mapping[int, str]:
        """Why each request is where it is, by id: worked out only when somebody asks."""
        return {request.id: why for requests, why in self.said for request in requests}

    @property
    def work(self) -> Iterator[Work]:
        return chain.from_iterable(self.batches)
