"""The loop: stopping, streaming, cancelling, and what is left after an iteration that did not end."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from neo_lite.config import MODELS, EngineConfig, NeoLiteError
from neo_lite.engine import Engine
from neo_lite.request import SamplingParams

TINY = dataclasses.replace(MODELS["tiny"], eos_token_ids=(7,))


class Scripted:
    """Answers token after token from a script, the same for each request; may raise in one iteration."""

    def __init__(self, script: list[int], raise_at: int = -1, error: type[BaseException] = RuntimeError) -> None:
        self.script, self.raise_at, self.error, self.calls = script, raise_at, error, 0

    def run(self, plan):
        self.calls += 1
        if self.calls - 1 == self.raise_at:
            raise self.error("scripted")
        return {w.request.id: self.script[len(w.request.output)] for w in plan.work if w.samples}


def engine_of(executor: Scripted, **changes) -> Engine:
    return Engine(EngineConfig(**changes), TINY, executor)


@pytest.mark.parametrize(
    ("sampling", "output", "reason"),
    [
        (SamplingParams(10), [5, 6, 7], "stop"),
        (SamplingParams(10, stop_token_ids=(6,)), [5, 6], "stop"),
        (SamplingParams(2), [5, 6], "length"),
        (SamplingParams(5, ignore_eos=True), [5, 6, 7, 8, 9], "length"),
    ],
)
def test_what_ends_a_request(sampling, output, reason):
    engine = engine_of(Scripted([5, 6, 7, 8, 9]))
    request = engine.add([1, 2], sampling)
    engine.run()
    assert (request.output, request.finish_reason) == (output, reason)
    assert len(request.token_times_s) == len(output) and request.finished_s is not None
    assert engine.step() == []


def test_stream_yields_tokens_as_they_come_and_others_advance():
    engine = engine_of(Scripted([3, 4, 5, 6]))
    other = engine.add([1], SamplingParams(4))
    stream = engine.stream(engine.add([1], SamplingParams(4)))
    assert next(stream) == 3 and other.output == [3]
    assert list(stream) == [4, 5, 6] and other.finish_reason == "length"


def test_cancelling_gives_the_blocks_back_and_keeps_the_output():
    engine = engine_of(Scripted([3, 4, 5, 6]))
    request, other = (engine.add([1] * 20, SamplingParams(4)) for _ in range(2))
    engine.step()
    engine.cancel(request)
    engine.cancel(request)
    engine.run()
    assert (request.output, request.finish_reason) == ([3], "cancelled")
    assert other.output == [3, 4, 5, 6]
    assert engine.scheduler.blocks.free("gpu") == engine.config.num_gpu_blocks


def test_closing_a_stream_cancels_its_request():
    engine = engine_of(Scripted([3, 4, 5, 6]))
    request = engine.add([1], SamplingParams(4))
    stream = engine.stream(request)
    next(stream)
    stream.close()
    assert request.finish_reason == "cancelled" and engine.scheduler.unfinished == 0


def test_ctrl_c_in_an_iteration_loses_nothing():
    engine = engine_of(Scripted([3, 4, 5, 6], raise_at=2, error=KeyboardInterrupt))
    requests = [engine.add([1] * 20, SamplingParams(4)) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.scheduler.blocks.free("gpu") == engine.config.num_gpu_blocks
    engine.run()
    assert all(r.output == [3, 4, 5, 6] and r.finish_reason == "length" for r in requests)


def test_an_error_in_an_iteration_fails_those_in_it_and_keeps_the_rest():
    engine = engine_of(Scripted([3, 4], raise_at=0), max_seqs=1)
    first, second = (engine.add([1], SamplingParams(2)) for _ in range(2))
    with pytest.raises(RuntimeError):
        engine.run()
    assert first.finish_reason == "failed"
    engine.run()
    assert second.output == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([1], SamplingParams(0), "max_tokens is 0"),
        ([1], SamplingParams(temperature=-1.0), "temperature -1.0"),
        ([1], SamplingParams(top_p=0.0), "top_p 0.0"),
        ([1, 512], SamplingParams(), "token id 512"),
        ([1] * 2000, SamplingParams(100), "2000 tokens plus max_tokens 100 exceeds the model's 2048"),
    ],
)
def test_bad_requests_are_refused_in_one_line(prompt, sampling, message):
    engine = engine_of(Scripted([]))
    with pytest.raises(NeoLiteError, match=message) as caught:
        engine.add(prompt, sampling)
    assert "\n" not in str(caught.value) and engine.scheduler.unfinished == 0


@pytest.mark.parametrize("changes", [{"mode": "fast"}, {"block_size": 0}, {"gpu_kv_tokens": 0}, {"max_seqs": -1}])
def test_bad_settings_are_refused(changes):
    with pytest.raises(NeoLiteError, match=str(next(iter(changes.values())))):
        EngineConfig(**changes)


def test_one_engine_is_not_stepped_from_two_threads():
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Scripted):
        def run(self, plan):
            inside.set()
            go_on.wait(10)
            return super().run(plan)

    engine = engine_of(Slow([3, 4]))
    request = engine.add([1], SamplingParams(2))
    thread = threading.Thread(target=engine.run)
    thread.start()
    inside.wait(10)
    with pytest.raises(NeoLiteError, match="stepping in another thread"):
        engine.step()
    go_on.set()
    thread.join()
    assert request.output == [3, 4]


def test_numbers_of_numpy_are_numbers():
    engine = engine_of(Scripted([3, 4]))
    request = engine.add(np.array([1, 2]), SamplingParams(np.int64(2)))
    engine.run()
    assert request.output == [3, 4]
