"""The loop: schedule, run, commit. Torch-free: the executor (real devices or a virtual clock) and the clock are given.

Called by the command line, the notebooks and the simulator. Read `step` first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

from neo_lite.blocks import Blocks
from neo_lite.config import EngineConfig, ModelConfig, NeoLiteError, is_int
from neo_lite.cost_model import Profile
from neo_lite.neo import POLICIES
from neo_lite.request import GREEDY, IterationPlan, Request, SamplingParams
from neo_lite.timeline import Timeline


class Executor(Protocol):
    """Runs a plan and returns the next token of each request that samples one, by request id."""

    def run(self, plan: IterationPlan) -> Mapping[int, int]: ...


class Engine:
    """Requests in, tokens out, one iteration at a time."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, executor: Executor,
        clock: Callable[[], float] = time.perf_counter, timeline: Timeline | None = None, costs: Profile | None = None,
    ) -> None:  # fmt: skip
        self.config, self.model, self.executor, self.clock = config, model, executor, clock
        self.timeline = Timeline(enabled=False) if timeline is None else timeline
        self.costs, self.iterations, self._next_id = costs, 0, 0
        self._live: dict[int, Request] = {}  # unfinished, by id: the truth that everything else is rebuilt from
        self._in_doubt = False  # an iteration did not end: queues, blocks and KV may be half changed
        self._thread: int | None = None  # that is stepping
        self._rebuild()

    def add(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Request:
        """Queues a prompt of token ids; raises NeoLiteError if it can never be answered."""
        check_prompt(prompt, self.model)
        check_sampling(sampling, len(prompt), self.model)
        request = Request(self._next_id, tuple(prompt), sampling, arrival_s=self.clock())
        self._next_id += 1
        self.scheduler.check(request)
        self._live[request.id] = request  # from here on it is answered, whatever interrupts the next line
        self.scheduler.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request where it stands; its output so far stays readable."""
        self._own(request)
        if not request.finished:
            self._finish(request, "cancelled")

    def step(self) -> list[Request]:
        """One iteration; returns the requests that got a token.

        Whatever stops it midway, the tokens so far are kept and the next step starts from them; after an error the
        requests of the iteration end as failed.
        """
        if self._thread not in (None, threading.get_ident()):
            raise NeoLiteError("this engine is stepping in another thread: give each thread an engine of its own")
        self._thread = threading.get_ident()
        try:
            if self._in_doubt:
                self._rebuild()
            self._in_doubt = True
            advanced = self._iterate()
            self._in_doubt = False
            return advanced
        except BaseException:
            self._rebuild()
            raise
        finally:
            self._thread = None

    def run(self) -> None:
        """Steps until every request is answered."""
        while self._live:
            before = self.iterations
            self.step()
            if self._live and self.iterations == before:
                raise NeoLiteError(
                    f"{len(self._live)} requests wait and no plan serves them: enlarge the pools or max_seqs"
                )

    def stream(self, request: Request) -> Generator[int, None, None]:
        """The tokens of one request as they come; the others advance with it. Closing the generator cancels it."""
        self._own(request)
        tokens = self._stream(request)
        next(tokens)  # so that closing it before its first token finds it started
        return tokens

    def _stream(self, request: Request) -> Generator[int, None, None]:
        sent = 0
        try:
            yield -1
            while True:
                yield from request.output[sent:]
                sent = len(request.output)
                if request.finished:
                    return
                self.step()
        except GeneratorExit:
            self.cancel(request)
            raise

    def _iterate(self) -> list[Request]:
        """Schedule, run, commit."""
        with self.timeline.span("scheduler", "plan"):
            plan = self.scheduler.plan(self.clock())
        if not plan:
            return []
        try:
            tokens = self.executor.run(plan)
        except Exception:
            for work in plan.work:
                self._finish(work.request, "failed")
            raise
        return self._commit(plan, tokens)

    def _rebuild(self) -> None:
        """Free blocks and new queues; every unfinished request starts again from its tokens, in order of arrival.

        KV is only a cache of the tokens, so nothing is lost. Interrupted itself, it starts over at the next step.
        """
        config = self.config
        blocks = Blocks(config.num_gpu_blocks, config.num_cpu_blocks, config.block_size)
        self.scheduler = POLICIES[config.mode](config, blocks, self.costs)
        for request in list(self._live.values()):
            del request.token_times_s[len(request.output) :], request.output[len(request.token_times_s) :]
            request.block_table, request.num_computed = [], 0
            reason = request.finish_reason or (self._finish_reason(request) if request.output else None)
            if reason is None:
                self.scheduler.waiting.append(request)
            else:
                self._finish(request, reason)
        self._in_doubt = False

    def _commit(self, plan: IterationPlan, tokens: Mapping[int, int]) -> list[Request]:
        now_s = self.clock()
        self.iterations += 1
        advanced = []
        for request, start, length in plan.work:
            request.num_computed = start + length
            if (token := tokens.get(request.id)) is not None:
                request.output.append(token)
                request.token_times_s.append(now_s)
                advanced.append(request)
                if (reason := self._finish_reason(request)) is not None:
                    self._finish(request, reason)
        return advanced

    def _finish_reason(self, request: Request) -> str | None:
        token, sampling = request.output[-1], request.sampling
        if token in sampling.stop_token_ids or (token in self.model.eos_token_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(request.output) >= sampling.max_tokens else None

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason, request.finished_s = reason, self.clock()
        self.scheduler.remove(request)
        self._live.pop(request.id, None)

    def _own(self, request: Request) -> None:
        if not request.finished and self._live.get(request.id) is not request:
            raise NeoLiteError(f"request {request.id} belongs to another engine: ask the one that added it")


def check_prompt(prompt: Sequence[int], model: ModelConfig) -> None:
    """Raises NeoLiteError unless it is a non-empty list of token ids of the model."""
    if isinstance(prompt, (str, bytes)):
        raise NeoLiteError(f"the prompt is a {type(prompt).__name__}: encode it with model.tokenizer.encode(...) first")
    try:
        tokens = list(prompt)
    except TypeError:
        raise NeoLiteError(f"the prompt is {prompt!r}: give a list of token ids") from None
    if not tokens:
        raise NeoLiteError("the prompt is empty: give at least one token")
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < model.vocab_size:
        return  # the usual case, without a look at each of 100,000 tokens
    for token in tokens:
        if not is_int(token):
            raise NeoLiteError(f"the prompt holds {token!r}: give a list of token ids, whole numbers")
        if not 0 <= token < model.vocab_size:
            raise NeoLiteError(f"token id {token} is not in the vocabulary of {model.vocab_size}: check the tokenizer")


def check_sampling(sampling: SamplingParams, prompt_tokens: int, model: ModelConfig) -> None:
    """Raises NeoLiteError unless every value can be used, so that a request never fails amid its neighbours."""
    count, temperature, top_p = sampling.max_tokens, sampling.temperature, sampling.top_p
    if not is_int(count) or count < 1:
        raise NeoLiteError(f"max_tokens is {count!r}: ask for at least 1")
    if not is_int(sampling.seed):
        raise NeoLiteError(f"seed is {sampling.seed!r}: give a whole number")
    numbers = all(isinstance(x, (int, float)) for x in (temperature, top_p))
    if not numbers or not temperature >= 0 or not 0 < top_p <= 1:
        raise NeoLiteError(
            f"temperature {temperature!r} and top_p {top_p!r}: choose temperature >= 0 and 0 < top_p <= 1"
        )
    stops = sampling.stop_token_ids
    if not isinstance(stops, (tuple, list, set, frozenset)) or not all(is_int(t) for t in stops):
        raise NeoLiteError(f"stop_token_ids is {stops!r}: give a tuple of token ids")
    if prompt_tokens + count > model.max_position:
        raise NeoLiteError(
            f"prompt of {prompt_tokens} tokens plus max_tokens {count} exceeds the model's {model.max_position}"
            " positions: shorten one of them"
        )
