"""Calls of the kernel that wait for a word: the protocol, with a thread of this test in the GPU's place."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_cpu_attention import case, check, reference

from neo_lite import host_nodes
from neo_lite.cpu_attention import AttentionArgs, KernelSpec, load_kernel
from neo_lite.host_nodes import Calls, EarlyNodes

SPEC = KernelSpec(64, 2, 16, "float32")
DEADLINE_S = 20.0


def until(word: torch.Tensor, value: int) -> None:
    limit_s = time.monotonic() + DEADLINE_S
    while int(word) != value:
        assert time.monotonic() < limit_s, f"the word is {int(word)}, not {value}"
        time.sleep(0)


def started(calls: list[AttentionArgs], words: torch.Tensor) -> tuple[Calls, threading.Thread]:
    """A node that runs beside this thread, as the driver would run it."""
    kernel, struct = load_kernel(SPEC), Calls(calls, words[0].data_ptr(), words[1].data_ptr())
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.calls_entry_point)  # lets go of the GIL
    thread = threading.Thread(target=entry, args=(ctypes.addressof(struct),), daemon=True)
    thread.start()
    return struct, thread


def test_each_call_waits_for_its_word_and_both_words_are_clear_after_it() -> None:
    kernel, words = load_kernel(SPEC), torch.zeros(2, 3, dtype=torch.int32)
    inputs = [case(SPEC, [5 + i, 40], seed=i) for i in range(3)]
    outs = [torch.full_like(given[0], torch.nan) for given in inputs]
    calls = [kernel.args(*given, out, num_threads=1) for given, out in zip(inputs, outs)]
    for _ in range(2):  # a graph is replayed on the same words
        struct, thread = started(calls, words)
        for i, out in enumerate(outs):
            time.sleep(0.01)
            assert out.isnan().all() and not words.any(), "nothing runs before its q, k and v have come"
            words[0, i] = 1
            until(words[1, i], 1)
            assert not words[0].any()
            check(SPEC, out, reference(*inputs[i]))
            words[1, i] = 0
            out.fill_(torch.nan)
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and struct.count == 3


def test_a_node_gives_up_when_it_is_told_that_the_gpu_has_failed() -> None:
    words = torch.zeros(2, 1, dtype=torch.int32)
    inputs = case(SPEC, [5])
    out = torch.full_like(inputs[0], torch.nan)
    struct, thread = started([load_kernel(SPEC).args(*inputs, out, num_threads=1)], words)
    time.sleep(0.3)  # past the turns without yielding
    assert thread.is_alive()
    struct.stop = 1
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and out.isnan().all() and not words.any()


class Device:
    """A GPU that sets the words of graphs, one call each, when they are launched; its streams are threads of this test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = object.__new__(EarlyNodes)
        self.nodes.__dict__ |= dict(kernel=load_kernel(SPEC), words=torch.zeros(2, 4, dtype=torch.int32), running=[])
        self.nodes.__dict__ |= dict(owed=None, nodes=None)
        self.threads: list[threading.Thread] = []
        self.interrupted, self.launched = "", 0
        monkeypatch.setattr(host_nodes, "launch_host", self.launch)
        stream = SimpleNamespace(synchronize=self.wait_for_the_graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait_for_the_nodes)

    def launch(self, _stream: object, entry_point: int, calls: Calls) -> None:
        if self.interrupted == "before the node":
            self.interrupted = ""
            raise KeyboardInterrupt
        entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry_point)
        self.threads.append(threading.Thread(target=entry, args=(ctypes.addressof(calls),), daemon=True))
        self.threads[-1].start()

    def replay(self) -> None:
        """Of the next graph."""
        if self.interrupted == f"before graph {self.launched}":
            raise KeyboardInterrupt
        self.nodes.words[0, self.launched] = 1
        self.launched += 1

    def wait_for_the_graph(self) -> None:
        for i in range(self.launched):
            until(self.nodes.words[1, i], 1)
            self.nodes.words[1, i] = 0

    def wait_for_the_nodes(self) -> None:
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a node waits for a word that never comes"


def test_where_another_engine_has_nodes_a_replay_launches_its_own_after_all_graphs(monkeypatch):  # type: ignore[no-untyped-def]
    device, other = Device(monkeypatch), object.__new__(EarlyNodes)
    monkeypatch.setattr(EarlyNodes, "alive", {device.nodes})
    order: list[str] = []
    launch = device.launch
    monkeypatch.setattr(host_nodes, "launch_host", lambda *given: (order.append("node"), launch(*given)))
    inputs = case(SPEC, [5])
    calls = [load_kernel(SPEC).args(*inputs, torch.empty_like(inputs[0]), num_threads=1)]
    for alive in ({device.nodes}, {device.nodes, other}):
        monkeypatch.setattr(EarlyNodes, "alive", alive)
        device.nodes.replay(
            [device.replay, lambda: order.append(f"rest, collecting: {gc.isenabled()}")], calls, ahead=1
        )
        device.nodes.finish()
        device.launched = 0
    assert order == ["node", "rest, collecting: False", "rest, collecting: False", "node"] and gc.isenabled()


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("interrupted", ["", "before graph 0", "before graph 1", "before the node"])
def test_an_interrupt_between_graphs_and_their_node_leaves_nobody_waiting(monkeypatch, interrupted, ahead):  # type: ignore[no-untyped-def]
    inputs = [case(SPEC, [5, 40], seed=i) for i in range(2)]
    outs = [torch.full_like(given[0], torch.nan) for given in inputs]
    device = Device(monkeypatch)
    device.interrupted = interrupted
    calls = [load_kernel(SPEC).args(*given, out, num_threads=1) for given, out in zip(inputs, outs)]
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        device.nodes.replay([device.replay, device.replay], calls, ahead)
    device.nodes.finish()
    assert not device.nodes.words.any() and not device.nodes.running and device.nodes.owed is None
    launched = {"before graph 0": 0, "before graph 1": 1, "before the node": ahead}.get(interrupted, 2)
    assert device.launched == launched
    for i, out in enumerate(outs):  # what the GPU was told to wait for has come, and nothing else
        if i < launched:
            check(SPEC, out, reference(*inputs[i]))
        else:
            assert out.isnan().all()
