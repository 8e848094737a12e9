"""How the CPU kernel becomes a node on a CUDA stream, and what its q, k, v and output pass through. Called by `streams.Cuda`.

A host node is a C function that the driver calls once all before it on the stream is done. `PlainNodes` puts one between
the copies of q, k, v and that of the output. Waking up for it takes the driver 40 to 80 us: in each of 32 layers, that is
5 % of an iteration of decodes. `EarlyNodes` start ahead of their data and look at a word in pinned memory, which the GPU
sets behind its copy (`ready`); the GPU waits for another one (`done`). From the end of a call to the start of the next one
passes what the GPU has to do in between, and 28 us for both copies and both words. A row of CUDA graphs has one node,
launched beside them, which makes all calls. No node waits for anything that is not enqueued yet, so that whatever Python
waits for, it comes; but a replay's node runs while Python fills in and launches the rest, where this thread makes no other
call of the driver and no other engine has such nodes. Drivers without stream memory operations, and ranks on several hosts,
are served by `PlainNodes`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor

from neo_lite.config import ModelConfig, NeoLiteError
from neo_lite.cpu_attention import AttentionArgs, Kernel
from neo_lite.kv_cache import KVPool
from neo_lite.rows import Part

# The driver may run the nodes of several engines, each in a thread of its own, on one thread: one whose graph comes behind
# another's on the GPU must not come before it there.
LAUNCHING = threading.Lock()

Fetch = Callable[[], None]  # copies a call's output back, on the current stream
Arrival = Callable[[], torch.cuda.Event]  # what comes once the output is on the GPU


@contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection: the end of another engine's pools, unpinned now, would break a capture off, or wait for a
    node that waits for what comes next."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class PlainNodes:
    """Copy, node, copy: a chain on one stream. `leave` takes the copies to the host, `enter` those back."""

    cuts = False  # whether a call may begin in one CUDA graph and end in the next
    graphs = 0  # captured so far

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        # whatever copies KV is short, and goes before the rest of a matrix product that has begun
        self.leave = self.enter = torch.cuda.Stream(priority=-1)

    def call(self, args: AttentionArgs, place: int, fetch: Fetch) -> Arrival:
        """Enqueues a call of the kernel, the `place`-th of an iteration or of a row of graphs, after all on `leave`; `fetch`
        comes behind it, on `enter`. `args` must live until `finish`, or as long as the graphs."""
        launch_host(self.leave, self.kernel.entry_point, args)
        arrived = self._fetch(fetch)
        return lambda: arrived

    def _fetch(self, fetch: Fetch) -> torch.cuda.Event:
        with torch.cuda.stream(self.enter):
            fetch()
        return self.enter.record_event()

    def replay(self, steps: Sequence[Callable[[], None]], calls: Sequence[AttentionArgs], ahead: int) -> None:
        """Launches CUDA graphs that hold these calls by `steps`, one after the other; `ahead`: how many of them before the
        graphs' node."""
        for step in steps:
            step()

    def finish(self) -> None:
        """Waits for all calls. Raises RuntimeError where the GPU has failed."""
        torch.cuda.synchronize()


class EarlyNodes(PlainNodes):
    """Nodes on a stream of their own, which tell the GPU and are told by it through words."""

    cuts = True
    alive: WeakSet[EarlyNodes] = WeakSet()

    def __init__(self, kernel: Kernel, most_calls: int) -> None:
        super().__init__(kernel)
        self.alive.add(self)
        self.enter, self.nodes = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
        self.words = torch.zeros(2, most_calls, dtype=torch.int32, pin_memory=True)
        self.running: list[Calls] = []
        self.owed: Calls | None = None  # a node that must be launched, whatever happens

    def call(self, args: AttentionArgs, place: int, fetch: Fetch) -> Arrival:
        place %= self.words.shape[1]  # no two calls of a sub-batch are under way at a time
        ready, done = (row[place].data_ptr() for row in self.words)
        stream_word("Write", self.leave, ready, 1)
        if not torch.cuda.is_current_stream_capturing():
            with LAUNCHING:
                self.owed = self._node([args], place)
                self._launch_owed()
                self.owed = None

        graph, sent = self.graphs, self.leave.record_event()

        def arrive() -> torch.cuda.Event:
            if graph == self.graphs:  # one that waits before it writes might do so for ever; an earlier one has written
                self.enter.wait_event(sent)
            stream_word("Wait", self.enter, done, 1)
            stream_word("Write", self.enter, done, 0)
            return self._fetch(fetch)

        return arrive

    def replay(self, steps: Sequence[Callable[[], None]], calls: Sequence[AttentionArgs], ahead: int) -> None:
        if not calls:
            return super().replay(steps, calls, ahead)
        if len(self.alive) > 1:
            ahead = len(steps)
        with LAUNCHING, uncollected():
            # a graph without its node would wait for ever, and a node without its graphs
            self.owed = self._node(calls, 0)
            super().replay(steps[:ahead], calls, ahead)
            self._launch_owed()
            super().replay(steps[ahead:], calls, ahead)
            self.owed = None

    def finish(self) -> None:
        owed = self.owed
        try:
            if owed:  # Ctrl-C came before its launch (or after it: then it gives up at once, below)
                self._launch_owed()
            torch.cuda.current_stream().synchronize()  # this one tells of a failure without waiting for the nodes
            if owed:  # what was launched of its graphs is done by now
                owed.stop, self.owed = 1, None
            super().finish()
        except BaseException:
            for calls in self.running:  # which would wait for words that never come
                calls.stop = 1
            raise
        self.running.clear()
        self.words.zero_()  # where an iteration broke off, nobody has waited for its last calls

    def _node(self, calls: Sequence[AttentionArgs], place: int) -> Calls:
        return Calls(calls, *(row[place:].data_ptr() for row in self.words))

    def _launch_owed(self) -> None:
        assert self.owed
        self.running.append(self.owed)
        launch_host(self.nodes, self.kernel.calls_entry_point, self.owed)


class Staging:
    """q, k, v and the output of one sub-batch in pinned memory, and the output on the GPU; q, k, v side by side: one copy.

    One set serves all layers: the next layer's q follows the use of this layer's output on the compute stream, hence this
    layer's call and both of its copies.
    """

    def __init__(self, max_seqs: int, model: ModelConfig, dtype: torch.dtype) -> None:
        self.heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
        qkv, out = ((max_seqs, heads, model.head_dim) for heads in (sum(self.heads), model.num_heads))
        self.qkv, self.out = (torch.zeros(shape, dtype=dtype, pin_memory=True) for shape in (qkv, out))
        self.out_gpu = torch.zeros(out, dtype=dtype, device="cuda")
        self.part: Part | None = None  # whose rows it serves now

    def bind(self, kernel: Kernel, pool: KVPool, part: Part, threads: int) -> None:
        """Checks the kernel's arguments and cuts the buffers for a part, once for all layers."""
        count, view, scales = len(part.works), part.view, pool.scales(0)
        self.used, self.output, self.result = self.qkv[:count], self.out[:count], self.out_gpu[:count]
        q, k, v = self.used.split(self.heads, dim=1)
        self._args = kernel.args(
            q, pool.k[0], pool.v[0], view.block_table, view.seq_lens, self.output, k_new=k, v_new=v, num_threads=threads,
            k_scale=scales.get("k_scale"), v_scale=scales.get("v_scale"),
        )  # fmt: skip
        self.part = part

    def args(self, pool: KVPool, layer: int) -> AttentionArgs:
        """The bound arguments, moved on to a layer."""
        args = AttentionArgs.from_buffer_copy(self._args)
        args.tensors = self._args.tensors
        for name, tensor in pool.tensors.items():
            setattr(args, name if name.endswith("scale") else name + "_cache", tensor[layer].data_ptr())
        return args


def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The tensor [rows, q_heads + 2 kv_heads, head_dim] that `Llama.pre_attention` has cut into these."""
    count, heads, dim = len(q), q.shape[1] + k.shape[1] + v.shape[1], q.shape[2]
    assert q.stride() == k.stride() == v.stride() == (heads * dim, dim, 1), "q, k and v are not side by side"
    assert v.data_ptr() - q.data_ptr() == (q.shape[1] + k.shape[1]) * dim * q.itemsize
    return q.as_strided((count, heads, dim), q.stride())


class Calls(ctypes.Structure):
    """The struct of `kernels/attention.h`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("args", "ready", "done")]
    _fields_ += [(name, ctypes.c_int32) for name in ("count", "stop")]

    def __init__(self, calls: Sequence[AttentionArgs], ready: int, done: int) -> None:
        self.calls, self.pointers = calls, (ctypes.c_void_p * len(calls))(*map(ctypes.addressof, calls))  # kept alive
        super().__init__(ctypes.addressof(self.pointers), ready, done, len(calls), 0)


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver's own library: it is there wherever a GPU is, and needs no toolkit."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    for operation in ("Write", "Wait"):
        function = getattr(library, f"cuStream{operation}Value32_v2", None)  # in drivers of CUDA 11.7 and up
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return library


def launch_host(stream: torch.cuda.Stream, entry_point: int, args: ctypes.Structure) -> None:
    """Enqueues a call of a C function on a stream; `args` must live until it has run."""
    _succeed("cuLaunchHostFunc", _driver().cuLaunchHostFunc(stream.cuda_stream, entry_point, ctypes.addressof(args)))


def stream_word(operation: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Enqueues a "Write" of a 32-bit word in pinned memory, or a "Wait" until it equals `value`."""
    flags = 1 if operation == "Wait" else 0  # equal; a write comes after all that the stream has done before it
    name = f"cuStream{operation}Value32_v2"
    _succeed(name, getattr(_driver(), name)(stream.cuda_stream, address, value, flags))


def _succeed(what: str, code: int) -> None:
    if code != 0:
        raise NeoLiteError(f"{what} failed with code {code}: the GPU is in an error state; restart the process")


def on_one_host() -> bool:
    """Not ranks on several: between hosts, NCCL has host nodes of its own in CUDA graphs, which the driver may run on the same
    thread as these, and so after one that waits for what they send."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


@functools.cache
def has_stream_words() -> bool:
    """Whether this GPU and its driver can write to a word in pinned memory, and wait for one, in the order of a stream."""
    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    try:
        for operation in ("Write", "Wait"):
            stream_word(operation, torch.cuda.current_stream(), word.data_ptr(), 1)
        return True
    except (AttributeError, NeoLiteError):
        return False
    finally:
        torch.cuda.current_stream().synchronize()
