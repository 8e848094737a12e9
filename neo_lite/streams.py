"""Where and when a stage runs: on the spot (`Host`), or on CUDA streams (`Cuda`). Called by the pipeline alone.

The CPU is just another stream. Its attention is a chain beside the compute stream: copy q, k, v to pinned memory; a host
node, which is the kernel's entry point with a pointer to its arguments (`host_nodes`); copy the output back. Events join it
to the compute stream. Python only enqueues: no thread, and no wait that the data does not ask for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor

from neo_lite.attention import Backend
from neo_lite.config import EngineConfig, ModelConfig
from neo_lite.cpu_attention import AttentionArgs, Kernel
from neo_lite.host_nodes import EarlyNodes, PlainNodes, Staging, has_stream_words, on_one_host, together, uncollected
from neo_lite.kv_cache import KVPool
from neo_lite.machine import usable_cores
from neo_lite.rows import Part
from neo_lite.timeline import Timeline

Pending = Callable[[], Tensor]  # makes the caller's stream wait for a result, and returns it
Steps = Generator[None, None, Tensor]  # work that stops now and then, and returns its result
Fills = list[Callable[[], None]]  # of a replay's tensors, in the order in which it comes to need them
STOPS = 1, 3  # where a capture is cut: while the GPU is at a first piece, Python fills in and launches the others


class Host:
    """No CUDA: every stage runs when it is called, in the order in which a GPU's streams would start it."""

    def __init__(self, timeline: Timeline, decode: Backend) -> None:
        self.timeline, self.decode = timeline, decode

    def stage(self, lane: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Times a stage of the caller's stream."""
        return self.timeline.span(lane, name, **args)

    def aside(self, lane: str, name: str, work: Callable[[], None], reads: tuple[Tensor, ...] = (), **args: Any) -> Any:
        """Runs a copy beside the compute stream, after what is enqueued there; returns what `wait` takes.

        `reads`: tensors of the compute stream that the caller may let go before the copy has run.
        """
        with self.stage(lane, name, **args):
            work()

    def wait(self, done: Any) -> None:
        """Everything enqueued from now on comes after `done`."""

    def cpu_attention(
        self, batch: int, pool: KVPool, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor
    ) -> Pending:
        """Starts the decodes of one part on the CPU; q, k, v as in `attention`. `batch`: 0 or 1, the sub-batch."""
        with self.stage("cpu", "cpu_attn", layer=layer, batch=batch, **_served(part, self.decode)):
            pool.put(layer, k, v, part.new_places(pool))
            out = self.decode(q, k, v, pool.k[layer], pool.v[layer], part.view, **pool.scales(layer))
        return lambda: out

    def capture(self, work: Callable[[], Steps]) -> Callable[[Fills], Tensor]:
        """What does `work` again, on tensors that kept their addresses and are filled anew, and returns its result."""

        def replay(fills: Fills) -> Tensor:
            for fill in fills:
                fill()
            return finished(work())

        return replay

    def begin(self) -> None:
        """Before an iteration."""

    def finish(self) -> None:
        """After it: nothing is under way any more, and the timeline has its events."""
        if torch.cuda.is_initialized():  # a GPU without the kernel
            torch.cuda.synchronize()


class Cuda:
    """Compute on the current stream, KV copies on a second one, CPU attention and its copies on others."""

    def __init__(
        self, timeline: Timeline, decode: Backend, kernel: Kernel, model: ModelConfig, config: EngineConfig
    ) -> None:
        self.timeline, self.decode, self.kernel, self.config = timeline, decode, kernel, config
        self.copies = torch.cuda.Stream(priority=-1)
        early = has_stream_words() and on_one_host()
        self.nodes = EarlyNodes(kernel, 2 * model.num_layers) if early else PlainNodes(kernel)
        leave_cores(config.cpu_threads)
        dtype = getattr(torch, kernel.spec.dtype)
        self.staging = [Staging(config.max_seqs, model, dtype) for _ in range(2)]
        self._marks: list[tuple[str, str, dict[str, Any], torch.cuda.Event, torch.cuda.Event]] = []
        self._calls: list[tuple[AttentionArgs, dict[str, Any]]] = []  # alive until they have run
        self._reading: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @contextmanager
    def stage(self, lane: str, name: str, **args: Any) -> Iterator[None]:
        if not self.timeline.enabled:
            yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._marks.append((lane, name, args, start, end))

    def aside(
        self, lane: str, name: str, work: Callable[[], None], reads: tuple[Tensor, ...] = (), **args: Any
    ) -> torch.cuda.Event:
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies), self.stage(lane, name, **args):
            work()
        done = self.copies.record_event()
        if reads:  # or their memory would go to the compute stream's next tensors meanwhile
            self._reading.append((done, reads))
        if len(self._reading) > 2:
            torch.cuda.current_stream().wait_event(self._reading.popleft()[0])  # two layers ago: over long since
        return done

    def wait(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(done)
        self.nodes.leave.wait_event(done)

    def cpu_attention(
        self, batch: int, pool: KVPool, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor
    ) -> Pending:
        """Enqueues copy, host node, copy."""
        staging, nodes = self.staging[batch], self.nodes
        if part is not staging.part:
            staging.bind(self.kernel, pool, part, self.config.cpu_threads)
        nodes.leave.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(nodes.leave), self.stage("d2h", "transfer", layer=layer, batch=batch):
            staging.used.copy_(together(q, k, v), non_blocking=True)

        def fetch() -> None:
            with self.stage("h2d", "transfer", layer=layer, batch=batch):
                staging.result.copy_(staging.output, non_blocking=True)

        args = staging.args(pool, layer)
        arrive = nodes.call(args, len(self._calls), fetch)
        self._calls.append((args, {"layer": layer, "batch": batch, **_served(part, self.decode)}))

        def result() -> Tensor:
            torch.cuda.current_stream().wait_event(arrive())
            return staging.result

        return result

    def capture(self, work: Callable[[], Steps]) -> Captured:
        """Records what `work` enqueues here, and on the streams that join in, as CUDA graphs: the first of what comes before its
        first stop, two more of the rest."""
        self.finish()  # so that the calls in it are counted from 0
        steps, graphs, out = work(), list[torch.cuda.CUDAGraph](), None
        with uncollected():
            for stops in STOPS if self.nodes.cuts else ():
                if out is None:
                    with self._graph(graphs):
                        out = advanced(steps, stops)
            if out is None:
                with self._graph(graphs):
                    out = finished(steps)
        calls, self._calls = self._calls, []
        for stage in self.staging:
            stage.part = None  # the graphs' own
        return Captured(graphs, out, [args for args, _ in calls], self.nodes)

    @contextmanager
    def _graph(self, graphs: list[torch.cuda.CUDAGraph]) -> Iterator[None]:
        """Captures one, with the streams of CPU attention in it from its begin to its end."""
        if not self._graphs:  # all share one memory, as they never run at the same time; torch drops it with the last
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph, others = torch.cuda.CUDAGraph(), (self.nodes.leave, self.nodes.enter)
        # thread_local: NCCL has a thread that asks for the state of earlier collectives while this one captures
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            self.nodes.graphs += 1
            for stream in others:
                stream.wait_stream(torch.cuda.current_stream())
            try:
                yield
            finally:  # after an error, too: a capture that ends with streams of its own leaves the caller on its stream
                for stream in others:
                    torch.cuda.current_stream().wait_stream(stream)
        self._graphs.add(graph)
        graphs.append(graph)

    def begin(self) -> None:
        """Anchors the GPU's clock to the host's, while the timeline records."""
        if self.timeline.enabled:
            self._anchor = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            self._anchor.record()
            self._anchor.synchronize()
            self._anchor_s = time.perf_counter()

    def finish(self) -> None:
        try:
            self.nodes.finish()
            for lane, name, args, start, end in self._marks:
                start_s, end_s = (self._anchor_s + self._anchor.elapsed_time(e) / 1e3 for e in (start, end))
                self.timeline.record(lane, name, start_s, end_s, **args)
            for call, args in self._calls:
                self.timeline.record("cpu", "cpu_attn", call.start_s, call.end_s, **args)
        finally:
            self._marks.clear()
            self._calls.clear()
            self._reading.clear()


@dataclass
class Captured:
    """CUDA graphs that follow one another, the tensor that the last writes, and their calls of the CPU kernel."""

    graphs: list[torch.cuda.CUDAGraph]
    out: Tensor
    calls: list[AttentionArgs]
    nodes: PlainNodes
    launched: bool = False

    def __call__(self, fills: Fills) -> Tensor:
        filled = [partial(self._fill, *pair) for pair in zip_longest(fills, self.calls[: len(fills)])]
        first, *others = [graph.replay for graph in self.graphs]
        steps: Fills = [*filled[:1], first, *filled[1:], *others] if others else [*filled, first]
        # its first launch loads a graph onto the GPU, for which the driver might wait until no node runs
        self.nodes.replay(steps, self.calls, ahead=steps.index(first) + 1 if self.launched else len(steps))
        self.launched = True
        return self.out

    def _fill(self, fill: Callable[[], None], call: AttentionArgs | None) -> None:
        """`call`: the sub-batch's first one, or the next layer's of the one before it."""
        fill()
        if call is not None:
            self.nodes.kernel.check(call)


def advanced(steps: Steps, stops: int) -> Tensor | None:
    """Lets work go on for so many stops; its result, if it ends before."""
    try:
        for _ in range(stops):
            next(steps)
    except StopIteration as end:
        return cast(Tensor, end.value)
    return None


def finished(steps: Steps) -> Tensor:
    """Lets work go on to its end; its result."""
    while (out := advanced(steps, 1)) is None:
        pass
    return out


def leave_cores(threads: int) -> None:
    """Shrinks torch's own OpenMP team to the cores that the kernel's `threads` leave, two at least.

    While all teams of a process together have more threads than there are cores, libgomp puts waiting threads to sleep at
    once, and waking the kernel's for each layer takes longer than a short attention.
    """
    torch.set_num_threads(max(2, usable_cores() - (threads or usable_cores())))
    torch.zeros(1 << 20).add_(1)  # the team shrinks when it next works


def failure(error: RuntimeError) -> str | None:
    """What to tell of an error that came from the GPU; None for any other."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the GPU's memory does not suffice for an iteration: lower max_batched_tokens, max_seqs or gpu_kv_tokens;"
            " the requests in flight have failed, and this engine or a new one can go on"
        )
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as dead:  # an illegal access or an assert: no call of this process will work again
        return (
            f"the GPU has failed ({str(dead).splitlines()[0]}): the requests in flight have failed; restart the process"
        )
    return None


def _served(part: Any, decode: Backend) -> dict[str, Any]:
    return {"backend": getattr(decode, "__name__", "unknown"), "requests": part.requests}
