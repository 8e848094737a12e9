"""The loop: schedule, run, commit. Torch-free: the executor (real devices or a virtual clock) and the clock are given.

Called by the command line, the notebooks and the simulator. Read `step` first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from neo_lite.config import EngineConfig, ModelConfig, NeoLiteError
from neo_lite.cost_model import Profile
from neo_lite.request import GREEDY, IterationPlan, Request, SamplingParams
from neo_lite.scheduler import POLICIES, Blocks
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
        blocks = Blocks(config.num_gpu_blocks, config.num_cpu_blocks, config.block_size)
        self.scheduler = POLICIES[config.mode](config, blocks, costs)
        self.iterations = 0
        self._next_id = 0

    def add(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Request:
        """Queues a prompt of token ids; raises NeoLiteError if it can never be answered."""
        self._check(prompt, sampling)
        request = Request(self._next_id, tuple(prompt), sampling, arrival_s=self.clock())
        self.scheduler.add(request)
        self._next_id += 1
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request where it stands; its output so far stays readable."""
        if not request.finished:
            self._finish(request, "cancelled")

    def step(self) -> list[Request]:
        """One iteration; returns the requests that got a token."""
        with self.timeline.span("scheduler", "plan"):
            plan = self.scheduler.plan(self.clock())
        if not plan:
            return []
        try:
            tokens = self.executor.run(plan)
        except Exception:
            for work in plan.work:
                self._finish(work.request, "failed")
            self.scheduler.requeue_all()
            raise
        except BaseException:  # Ctrl-C: the KV is in doubt, the tokens are not; the next step starts from them
            self.scheduler.requeue_all()
            raise
        return self._commit(plan, tokens)

    def run(self) -> None:
        """Steps until every request is answered."""
        while self.scheduler.unfinished:
            self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """The tokens of one request as they come; the others advance with it. Closing the iterator cancels it."""
        sent = 0
        try:
            while True:
                yield from request.output[sent:]
                sent = len(request.output)
                if request.finished:
                    return
                self.step()
        except GeneratorExit:
            self.cancel(request)
            raise

    def _commit(self, plan: IterationPlan, tokens: Mapping[int, int]) -> list[Request]:
        now_s = self.clock()
        self.iterations += 1
        advanced = []
        for work in plan.work:
            request = work.request
            request.num_computed = work.seq_len
            if request.id in tokens:
                request.output.append(tokens[request.id])
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

    def _check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        total, limit = len(prompt) + sampling.max_tokens, self.model.max_position
        if not len(prompt):
            raise NeoLiteError("the prompt is empty: give at least one token")
        if sampling.max_tokens < 1:
            raise NeoLiteError(f"max_tokens is {sampling.max_tokens}: ask for at least 1")
        if not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1:
            raise NeoLiteError(
                f"temperature {sampling.temperature} and top_p {sampling.top_p}: choose temperature >= 0, 0 < top_p <= 1"
            )
        if bad := [t for t in prompt if not 0 <= t < self.model.vocab_size]:
            raise NeoLiteError(
                f"token id {bad[0]} is not in the vocabulary of {self.model.vocab_size}: check the tokenizer"
            )
        if total > limit:
            raise NeoLiteError(
                f"prompt of {len(prompt)} tokens plus max_tokens {sampling.max_tokens} exceeds the model's {limit}"
                " positions: shorten one of them"
            )
