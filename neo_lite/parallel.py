"""Tensor parallel: one Llama over several ranks, each with whole KV groups, MLP columns and vocabulary rows of its own.

    x -> qkv -> attention -> o  --all-reduce-->  gate, up -> down  --all-reduce-->  x       twice [tokens, hidden] a layer
         my heads, my KV     my sum              my columns  my sum

KV crosses no link, neither a GPU's nor the host's. It is the same `model`: a `Shard` tells it its smaller shape, which part
of each tensor is its own, and how to add up. Engine and scheduler run once, on rank 0, whose pipeline sends every plan
to the other ranks (`follow`); those know nothing but their weights and their pools, so that ranks cannot drift apart.

Sums are torch.distributed's (NCCL on GPUs, on the compute stream; gloo on CPUs). Plans travel on a connection from rank 0
to each of the others: one that closes says at once who died, where gloo says only that somebody did, and NCCL waits.
Called by `launch`, which brings the ranks together.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from neo_lite.api import load_model
from neo_lite.config import EngineConfig, ModelConfig, NeoLiteError
from neo_lite.machine import check_memory, usable_cores
from neo_lite.model import Llama
from neo_lite.pipeline import Pipeline
from neo_lite.request import IterationPlan, Move, Request, SubBatch, Work
from neo_lite.rows import blocks_of
from neo_lite.timeline import Timeline

GRACE_S = 10.0  # between a rank's death and the end of whoever hangs on it
REPORT_S = 3.0  # in which the reason of a death arrives


class PeerLost(NeoLiteError):
    """A collective broke off: the fault is another rank's."""


# ---- What a rank holds ----


def share(count: int, part: int, parts: int) -> range:
    """One part of `count` things in their order; the first parts get the remainder, one each."""
    start = part * (count // parts) + min(part, count % parts)
    return range(start, start + count // parts + (part < count % parts))


def heads(model: ModelConfig, rank: int, size: int) -> tuple[range, range]:
    """KV heads and query heads of a rank: whole groups, or, with more ranks than groups, a group that several ranks
    replicate and whose query heads they share out."""
    groups, width = model.num_kv_heads, model.group_size
    if size <= groups:
        kv = share(groups, rank, size)
        return kv, range(kv.start * width, kv.stop * width)
    of_rank = [r * groups // size for r in range(size)]
    group = of_rank[rank]
    part = share(width, rank - of_rank.index(group), of_rank.count(group))
    return range(group, group + 1), range(group * width + part.start, group * width + part.stop)


class Shard:
    """One rank's part of a model. `config` is its shape: with it the pools and the pipeline are made as always."""

    def __init__(self, whole: ModelConfig, ranks: Ranks) -> None:
        rank, size = ranks.rank, ranks.size
        if size > whole.num_heads:
            raise NeoLiteError(f"--tensor-parallel {size}: {whole.name} has {whole.num_heads} query heads: lower it")
        self.whole, self.ranks = whole, ranks
        kv, q = heads(whole, rank, size)
        inner, rows = share(whole.intermediate_size, rank, size), -(-whole.vocab_size // size)
        self.first_row = rank * rows
        narrow = replace(whole, vocab_size=rows, intermediate_size=len(inner))
        self.config = replace(narrow, num_heads=len(q), num_kv_heads=len(kv))
        d = whole.head_dim
        q_rows, kv_rows, mlp = (slice(r.start * n, r.stop * n) for r, n in ((q, d), (kv, d), (inner, 1)))
        self._rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows, "gate_proj": mlp, "up_proj": mlp}
        self._columns = {"o_proj": q_rows, "down_proj": mlp}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's rows or columns of a tensor of the whole checkpoint, by transformers' name."""
        module, kind = name.split(".")[-2:]
        if module in ("embed_tokens", "lm_head"):
            mine = tensor[self.first_row : self.first_row + self.config.vocab_size]
            return F.pad(mine, (0, 0, 0, self.config.vocab_size - len(mine)))  # equal parts: the last is filled up
        if module in self._columns:
            if kind == "bias":  # added once, not by each rank
                return tensor if self.ranks.rank == 0 else torch.zeros_like(tensor)
            return tensor[:, self._columns[module]]
        return tensor[self._rows[module]] if module in self._rows else tensor

    def embed(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """Each token's row from the rank that has it: the others add zeros."""
        local = tokens - self.first_row
        mine = (local >= 0) & (local < len(embedding))
        return self.all_reduce(F.embedding(local.where(mine, 0), embedding).masked_fill_(~mine[:, None], 0))

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum over all ranks (or their maximum), in place."""
        with self.ranks.collective():
            dist.all_reduce(x, op)
        return x

    def all_gather(self, logits: Tensor) -> Tensor:
        """[n, rows of this rank] -> [n, whole vocabulary], on every rank."""
        parts = logits.new_empty(self.ranks.size, *logits.shape)
        with self.ranks.collective():
            if len(logits):
                dist.all_gather(list(parts), logits.contiguous())
        return parts.transpose(0, 1).flatten(1)[:, : self.whole.vocab_size]

    def slowest(self, seconds: float) -> float:
        """The longest of all ranks' times, the same on each: they wait for one another, and decide alike."""
        x = torch.tensor(seconds, dtype=torch.float64, device=self.ranks.device)
        return float(self.all_reduce(x, dist.ReduceOp.MAX))

    def pipeline(self, model: Llama, config: EngineConfig, timeline: Timeline) -> RankPipeline:
        """This rank's pipeline, with pools of its own and its share of the host's threads. `config` counts tokens of
        whole requests and threads of the whole host."""
        ranks = self.ranks
        ranks.tell("engine", config)
        on_host = config.cpu_kv_tokens + (config.gpu_kv_tokens if ranks.device == "cpu" else 0)
        num_bytes = on_host * self.config.kv_bytes_per_token(str(model.dtype)[6:]) * ranks.local_size
        check_memory(num_bytes, f"the KV pools of this host's {ranks.local_size} ranks (lower cpu_kv_tokens)")
        threads = max(1, (config.cpu_threads or usable_cores()) // ranks.local_size)
        return RankPipeline(model, replace(config, cpu_threads=threads), timeline)

    def together(self, work: Callable[[Any], Any], pipeline: Any) -> Any:
        """A measurement in which ranks wait for one another: `work(pipeline)` on each; its result on rank 0."""
        self.ranks.tell(work)
        return work(pipeline)


class RankPipeline(Pipeline):
    """The pipeline of one rank. Rank 0's sends each plan to the others before it runs it."""

    def run(self, plan: IterationPlan) -> dict[int, int]:
        ranks = cast(Shard, self.model.shard).ranks
        ranks.check()
        try:
            ranks.tell("plan", self.timeline.enabled, pack(plan))
            tokens = super().run(plan)
            ranks.check()  # a collective of NCCL that was broken off ends like any other
            return tokens
        except BaseException as error:
            ranks.failure = ranks.failure or "an iteration broke off on rank 0"
            if ranks.failed.is_set():
                failed = len(list(plan.work))
                raise NeoLiteError(f"{ranks.failure}; requests in flight, now failed: {failed}") from error
            raise


# ---- A plan on its way ----


def pack(plan: IterationPlan) -> tuple[Any, ...]:
    """A plan as plain tuples: of each request only what its rows need, not its history."""

    def row(w: Work) -> tuple[Any, ...]:
        r = w.request
        tokens = [r.token(i) for i in range(w.start, w.seq_len)]
        return r.id, w.start, tokens, w.samples, r.device, blocks_of(r).tobytes()

    kinds = [[[row(w) for w in kind] for kind in (b.prefills, b.gpu_decodes, b.cpu_decodes)] for b in plan.batches]
    return plan.mode, kinds, [(m.request.id, m.target, m.source_blocks, m.target_blocks) for m in plan.moves]


def unpack(mode: str, batches: list[Any], moves: list[Any]) -> IterationPlan:
    """The same plan over requests that live for one iteration. Tokens before their rows only have to be so many."""

    def work(number: int, start: int, tokens: list[int], samples: bool, device: Any, blocks: bytes) -> Work:
        before, new = cast("tuple[int, ...]", range(start)), tokens if samples else [*tokens, 0]
        table = cast("list[int]", np.frombuffer(blocks, np.int32))
        request = Request(number, before, output=new, device=device, block_table=table, num_computed=start)
        return Work(request, start, len(tokens))

    subs = tuple(SubBatch(*(tuple(work(*row) for row in kind) for kind in kinds)) for kinds in batches)
    return IterationPlan(mode, subs, tuple(Move(Request(number, ()), *where) for number, *where in moves))


def follow(ranks: Ranks) -> int:
    """Every rank but 0: builds what rank 0 builds and runs its plans, until it says that this is all."""
    model: Any = None
    pipeline: Any = None
    try:
        while (message := ranks.receive()) is not None:
            kind, *rest = message
            if kind == "model":
                model = load_model(rest[0], "auto", rest[1], ranks)
            elif kind == "engine":
                pipeline = None
                gc.collect()  # its pools make room for the next one's
                pipeline = model.shard.pipeline(model, rest[0], Timeline(enabled=False))
                pipeline.sample = lambda logits, requests: [0] * len(requests)  # rank 0 draws
            elif kind == "plan":  # recorded iterations take another way through the same layers: all ranks the same
                pipeline.timeline.enabled = rest[0]
                pipeline.run(unpack(*rest[1]))
                pipeline.timeline.events.clear()
            else:
                kind(pipeline)
        return 0
    except Exception as error:
        name = "" if isinstance(error, NeoLiteError) else f"{type(error).__name__}: "
        what = "" if isinstance(error, PeerLost) else f"failed: {name}{str(error).strip().splitlines()[0]}"
    with contextlib.suppress(OSError):
        ranks.peers[0].send(what)
    return 1


# ---- The ranks ----


class Ranks:
    """This process among the ranks: its number, its device, the collectives, the connections with rank 0."""

    def __init__(self, device: str, identity: dict[str, Any]) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # as torchrun and `RayRank` set them
        if lacking := [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise NeoLiteError(f"${lacking[0]} is not set: start the ranks by python -m torch.distributed.run")
        self.rank, self.size, self.local_rank, self.local_size = (int(os.environ[name]) for name in names)
        gpus = 0 if device == "cpu" else torch.cuda.device_count()
        self.device = f"cuda:{self.local_rank}" if gpus else "cpu" if device == "auto" else device
        self.failure, self.failed, self.told, self.closing = "", threading.Event(), threading.Event(), False
        self.peers: dict[int, Connection] = {}  # rank 0: all others; on those: rank 0
        store = next(dist.rendezvous("env://"))[0]
        me = {**identity, "gpus": gpus, "local_rank": self.local_rank}
        (self._join if self.rank else self._meet)(store, me)
        if gpus:
            torch.cuda.set_device(self.local_rank)
        backend, on = ("nccl", torch.device(self.device)) if gpus else ("gloo", None)
        store = dist.PrefixStore("neo_lite", store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, device_id=on)

    def _meet(self, store: Any, me: dict[str, Any]) -> None:
        """Rank 0: a connection with each of the others, which are let in if they are what it is."""
        key, host, hellos = secrets.token_hex(16), os.environ["MASTER_ADDR"], {0: me}
        with Listener((host, 0), backlog=self.size, authkey=key.encode()) as listener:
            store.set("neo_lite/door", f"{key} {host} {listener.address[1]}")
            while len(self.peers) < self.size - 1:
                connection = listener.accept()
                with socket.socket(fileno=os.dup(connection.fileno())) as tcp:  # or a plan waits for the last one's ACK
                    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                rank, hellos[rank] = connection.recv()
                self.peers[rank] = connection
        check_alike(hellos)
        self.tell("welcome")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminated)
        threading.Thread(target=self._watch, daemon=True).start()

    def _join(self, store: Any, me: dict[str, Any]) -> None:
        key, host, port = store.get("neo_lite/door").decode().split()
        try:
            self.peers[0] = Client((host, int(port)), authkey=key.encode())
            self.peers[0].send((self.rank, me))
        except (EOFError, OSError) as error:
            raise PeerLost("rank 0 is gone") from error
        self.receive()

    def shard(self, name: str, dtype: torch.dtype, model: ModelConfig) -> Shard:
        """This rank's part of a model, of which all ranks must find the same shape under its name; no weights yet."""
        shard = Shard(model, self)
        self.tell("model", name, str(dtype)[6:])
        self.tell(model)
        if self.rank and self.receive() != (model,):
            raise NeoLiteError(f"{model.name} has another shape here than on rank 0: copy the model from there")
        with self.collective():
            dist.barrier()
        return shard

    def tell(self, *message: Any) -> None:
        """From rank 0 to all others, which take it up by `receive`; nothing at all is the end. On those it does nothing."""
        data = pickle.dumps(message or None)
        with self.collective():
            for connection in () if self.rank else self.peers.values():
                connection.send_bytes(data)

    def receive(self) -> Any:
        try:
            return self.peers[0].recv()
        except (EOFError, OSError) as error:
            raise PeerLost("rank 0 is gone") from error

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around whatever needs the other ranks: an error in it comes from the loss of one."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise PeerLost(self.why(error)) from error

    def why(self, error: object) -> str:
        """On rank 0 who died of what, as soon as that is known."""
        self.told.set()
        if self.rank == 0:
            self.failed.wait(REPORT_S)
        return self.failure or f"a rank was lost ({str(error).splitlines()[0]:.120})"

    def check(self) -> None:
        if self.failure:
            raise NeoLiteError(f"{self.failure}: start the ranks again")

    def _watch(self) -> None:
        """A thread of rank 0: the first rank that fails, or goes without a word, is why the run ends."""
        ranks: dict[Any, int] = {connection: rank for rank, connection in self.peers.items()}
        while ranks:
            for connection in cast("list[Connection]", wait(list(ranks))):
                rank = ranks.pop(connection)
                try:
                    what = connection.recv()  # "": it lost another rank
                except (EOFError, OSError):
                    what = "died without a word (killed, or out of memory?)"
                if what and not self.closing and not self.failed.is_set():
                    self._fail(f"rank {rank} {what}")

    def _fail(self, reason: str) -> None:
        """The main thread, if it hangs in NCCL, comes free by an abort; if it hangs all the same, the kernel ends it."""
        self.failure = reason
        self.failed.set()
        signal.alarm(int(2 * GRACE_S))
        if self.device != "cpu":
            dist.distributed_c10d._abort_process_group()
        if not self.told.wait(GRACE_S):
            print(f"neo_lite: {reason}", file=sys.stderr, flush=True)

    def _terminated(self, *_: Any) -> None:
        """torchrun stops the survivors of a death by SIGTERM: rank 0 says whose it was before it goes."""
        if not self.told.is_set():
            raise NeoLiteError(self.why("stopped by SIGTERM"))

    def close(self) -> None:
        self.closing = True
        with contextlib.suppress(PeerLost):
            self.tell()
        if not self.failed.is_set():
            gc.collect()  # CUDA graphs hold on to their communicator
            broken = self.failure and self.device != "cpu"  # NCCL would first wait for what the others still expect
            (dist.distributed_c10d._abort_process_group if broken else dist.destroy_process_group)()


def check_alike(hellos: dict[int, dict[str, Any]]) -> None:
    """Raises NeoLiteError unless all ranks run the same, each on a GPU of its own where there are any."""
    ours, on_gpu = hellos[0], any(hello["gpus"] for hello in hellos.values())
    for rank, hello in sorted(hellos.items()):
        if other := next((k for k in ours.keys() - {"gpus", "local_rank"} if hello.get(k) != ours[k]), None):
            clash = f"rank {rank} has {other} {hello.get(other)!r} and rank 0 {ours[other]!r}"
            raise NeoLiteError(f"{clash}: start all ranks by the same command, on the same versions")
        if on_gpu and hello["local_rank"] >= hello["gpus"]:
            lack = f"rank {rank} needs a GPU of its own, and its machine has {hello['gpus']}"
            raise NeoLiteError(f"--tensor-parallel {len(hellos)}: {lack}: ask for fewer ranks, or add --device cpu")
