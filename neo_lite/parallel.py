"""Tensor parallel: one Llama over several ranks, each with whole KV groups, MLP columns and vocabulary rows of its own.

    x -> qkv -> attention -> o  --all-reduce-->  gate, up -> down  --all-reduce-->  x       twice [tokens, hidden] a layer
         my heads, my KV     my sum              my columns  my sum

KV crosses no link, neither a GPU's nor the host's. It is the same `model`: a `Shard` tells it its smaller shape, which part
of each tensor is its own, and how to add up. Engine and scheduler run once, on rank 0, whose pipeline sends every plan
to the other ranks (`follow`); those know nothing but their weights and their pools, so that ranks cannot drift apart.

Ranks are processes of torchrun, or Ray's actors that do as such a process does; sums are torch.distributed's (NCCL on
GPUs, on the compute stream; gloo on CPUs). Plans travel on a connection from rank 0 to each of the others: one that closes
says at once who died, where gloo says only that somebody did and NCCL waits. Called by `__main__`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import pickle
import secrets
import shlex
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from neo_lite.api import load_model
from neo_lite.config import EngineConfig, ModelConfig, NeoLiteError
from neo_lite.machine import check_memory, code_version, usable_cores
from neo_lite.model import Llama
from neo_lite.pipeline import Pipeline
from neo_lite.profiler import measure
from neo_lite.request import IterationPlan, Move, Request, SubBatch, Work
from neo_lite.timeline import Timeline

GRACE_S = 10.0  # between a rank's death and the end of whoever hangs on it
REPORT_S = 3.0  # in which the reason of a death arrives
DIED = "died without a word (killed, or out of memory?)"


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
            raise NeoLiteError(
                f"--tensor-parallel {size}: {whole.name} has {whole.num_heads} query heads: ask for no more"
            )
        self.whole, self.ranks = whole, ranks
        kv, q = heads(whole, rank, size)
        inner, rows = share(whole.intermediate_size, rank, size), -(-whole.vocab_size // size)
        self.first_row = rank * rows
        self.config = replace(
            whole, num_heads=len(q), num_kv_heads=len(kv), intermediate_size=len(inner), vocab_size=rows
        )
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

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        with self.ranks.collective():
            dist.all_reduce(x)
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
        with self.ranks.collective():
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return float(x)

    def pipeline(self, model: Llama, config: EngineConfig, timeline: Timeline, measuring: bool) -> RankPipeline:
        """This rank's pipeline, with pools of its own and its share of the host's threads. `config` counts tokens of
        whole requests and threads of the whole host. `measuring`: a measurement of all ranks follows."""
        ranks = self.ranks
        ranks.tell("engine", config, measuring)
        on_host = config.cpu_kv_tokens + (0 if ranks.device.startswith("cuda") else config.gpu_kv_tokens)
        num_bytes = on_host * self.config.kv_bytes_per_token(str(model.dtype)[6:]) * ranks.local_size
        check_memory(num_bytes, f"the KV pools of this host's {ranks.local_size} ranks (lower cpu_kv_tokens)")
        threads = max(1, (config.cpu_threads or usable_cores()) // ranks.local_size)
        return RankPipeline(model, replace(config, cpu_threads=threads), timeline)


class RankPipeline(Pipeline):
    """The pipeline of one rank. Rank 0's sends each plan to the others before it runs it."""

    def run(self, plan: IterationPlan) -> dict[int, int]:
        assert self.model.shard is not None
        ranks = self.model.shard.ranks
        try:
            ranks.check()
            ranks.tell("plan", *pack(plan))
            tokens = super().run(plan)
            ranks.check()  # a collective of NCCL that was broken off ends like any other
            return tokens
        except BaseException as error:
            lost = ranks.failure if ranks.failed.is_set() else str(error) if isinstance(error, PeerLost) else ""
            ranks.failure = ranks.failure or "an iteration broke off on rank 0"
            if lost and ranks.rank == 0:
                raise NeoLiteError(f"{lost}; requests in flight, now failed: {len(list(plan.work))}") from error
            raise

    def measure_all_reduce(self, tokens: Sequence[int] = (1, 16, 64, 256, 1024, 2048)) -> list[tuple[int, float]]:
        """Seconds of one all-reduce of [n, hidden], of which a layer has two: a curve for the cost model."""
        shard = self.model.shard
        assert shard is not None
        shard.ranks.tell("all_reduce", tokens)
        sync = torch.cuda.synchronize if self.model.device.type == "cuda" else lambda: None

        def once(x: Tensor) -> float:
            sync()
            start_s = time.perf_counter()
            shard.all_reduce(x)
            sync()
            return shard.slowest(time.perf_counter() - start_s)

        sizes = [
            torch.zeros(n, self.model.whole.hidden_size, dtype=self.model.dtype, device=self.model.device)
            for n in tokens
        ]
        return [(len(x), statistics.median([once(x) for _ in range(12)][2:])) for x in sizes]


# ---- A plan on its way ----


def pack(plan: IterationPlan) -> tuple[Any, ...]:
    """A plan as plain tuples: of each request only what its rows need, not its history."""

    def row(w: Work) -> tuple[Any, ...]:
        r = w.request
        tokens = tuple(r.token(i) for i in range(w.start, w.seq_len))
        return r.id, w.start, tokens, w.samples, r.device, r.block_table

    kinds = [[[row(w) for w in kind] for kind in (b.prefills, b.gpu_decodes, b.cpu_decodes)] for b in plan.batches]
    return plan.mode, kinds, [(m.request.id, m.target, m.source_blocks, m.target_blocks) for m in plan.moves]


def unpack(mode: str, batches: list[Any], moves: list[Any]) -> IterationPlan:
    """The same plan over requests that live for one iteration; tokens before their rows are zeros, and never read."""

    def work(number: int, start: int, tokens: tuple[int, ...], samples: bool, device: Any, table: list[int]) -> Work:
        prompt = (0,) * start + tokens + (0,) * (not samples)
        return Work(Request(number, prompt, device=device, block_table=table, num_computed=start), start, len(tokens))

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
                pipeline = None  # its pools make room for the next one's
                pipeline = model.shard.pipeline(model, rest[0], Timeline(enabled=False), rest[1])
                pipeline.sample = lambda logits, requests: [0] * len(requests)  # rank 0 draws
                if rest[1]:
                    measure(pipeline)
            elif kind == "all_reduce":
                pipeline.measure_all_reduce(*rest)
            else:
                pipeline.run(unpack(*rest))
        return 0
    except PeerLost:
        if not ranks.leader_lives() and ranks.rank == 1:
            print(f"neo_lite: rank 0 {DIED}", file=sys.stderr)
    except Exception as error:
        name = "" if isinstance(error, NeoLiteError) else f"{type(error).__name__}: "
        ranks.report("failed: " + name + (str(error).strip().splitlines() or ["no reason given"])[0])
    return 1


# ---- The ranks ----


class Ranks:
    """This process among the ranks: its number, its device, the collectives, the connections with rank 0."""

    def __init__(self, device: str, identity: Mapping[str, Any]) -> None:
        self.rank, self.size, self.local_rank, self.local_size = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        )
        gpus = 0 if device == "cpu" else torch.cuda.device_count()
        self.device = f"cuda:{self.local_rank}" if gpus else "cpu"
        self.failure, self.failed, self.told, self.closing = "", threading.Event(), threading.Event(), False
        self.peers: dict[int, Connection] = {}  # rank 0: all others; on those: rank 0
        store = next(dist.rendezvous("env://"))[0]
        me = {**identity, "gpus": gpus, "local_rank": self.local_rank}
        if self.rank == 0:
            self._meet(store, me)
        else:
            self._join(store, me)
        if gpus:
            torch.cuda.set_device(self.local_rank)
        dist.init_process_group(
            "nccl" if gpus else "gloo", store=dist.PrefixStore("neo_lite", store), rank=self.rank, world_size=self.size,
            device_id=torch.device(self.device) if gpus else None,
        )  # fmt: skip

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
        self._sigterm: Any = signal.SIG_DFL
        if threading.current_thread() is threading.main_thread():
            self._sigterm = signal.signal(signal.SIGTERM, self._terminated)
        threading.Thread(target=self._watch, daemon=True).start()

    def _join(self, store: Any, me: dict[str, Any]) -> None:
        key, host, port = store.get("neo_lite/door").decode().split()
        self.peers[0] = Client((host, int(port)), authkey=key.encode())
        self.peers[0].send((self.rank, me))
        self.receive()

    def shard(self, name: str, dtype: torch.dtype, model: ModelConfig) -> Shard:
        """This rank's part of a model, of which all ranks must find the same shape under its name; no weights yet."""
        shard = Shard(model, self)
        self.tell("model", name, str(dtype)[6:])
        self.tell(model)
        if self.rank and self.receive() != (model,):
            raise NeoLiteError(
                f"its {model.name} has another shape than rank 0's: copy the model, so that all read one"
            )
        with self.collective():
            dist.barrier()
        return shard

    def tell(self, *message: Any) -> None:
        """From rank 0 to all others, which take it up by `receive`; nothing at all is the end. On those it does nothing."""
        if self.rank == 0:
            data = pickle.dumps(message or None)
            try:
                for connection in self.peers.values():
                    connection.send_bytes(data)
            except OSError as error:
                raise PeerLost(self.why(error)) from error

    def receive(self) -> Any:
        try:
            return self.peers[0].recv()
        except (EOFError, OSError) as error:
            raise PeerLost(f"rank 0 {DIED}") from error

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around each collective: an error in it comes from the loss of another rank."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(self.why(error)) from error

    def check(self) -> None:
        if self.failure:
            raise NeoLiteError(f"{self.failure}: start the ranks again")

    def why(self, error: object) -> str:
        """On rank 0 who died of what, as soon as that is known."""
        self.told.set()
        if self.rank == 0:
            self.failed.wait(REPORT_S)
        return self.failure or f"a rank was lost ({str(error).splitlines()[0]:.120})"

    def report(self, what: str) -> None:
        """To rank 0, before this rank ends."""
        with contextlib.suppress(OSError):
            self.peers[0].send(what)

    def leader_lives(self) -> bool:
        """Whether rank 0 is there, or has said goodbye; it is told that this rank is a victim, not a cause."""
        self.report("")
        try:
            return not self.peers[0].poll(REPORT_S) or self.receive() is None
        except (PeerLost, OSError):
            return False

    def _watch(self) -> None:
        """A thread of rank 0: the first rank that fails, or goes without a word, is why the run ends."""
        ranks: dict[Any, int] = {connection: rank for rank, connection in self.peers.items()}
        while ranks:
            for connection in cast("list[Connection]", wait(list(ranks))):
                rank = ranks.pop(connection)
                try:
                    what = connection.recv()
                except (EOFError, OSError):
                    what = DIED
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

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing = True
        if self.rank == 0:
            signal.signal(signal.SIGTERM, self._sigterm)
            with contextlib.suppress(PeerLost):
                self.tell()
        gc.collect()  # CUDA graphs hold on to their communicator
        if not self.failed.is_set():
            dist.destroy_process_group()
            signal.alarm(0)


def check_alike(hellos: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises NeoLiteError unless all ranks run the same, each on a GPU of its own where there are any."""
    on_gpu = any(hello["gpus"] for hello in hellos.values())
    for rank, hello in sorted(hellos.items()):
        for name in hellos[0].keys() - {"gpus", "local_rank"}:
            if hello.get(name) != hellos[0][name]:
                raise NeoLiteError(
                    f"rank {rank} has {name} {hello.get(name)!r} and rank 0 {hellos[0][name]!r}: start all ranks by the"
                    " same command, on the same versions"
                )
        if on_gpu and hello["local_rank"] >= hello["gpus"]:
            raise NeoLiteError(
                f"--tensor-parallel {len(hellos)}: rank {rank} needs a GPU of its own, and its machine has"
                f" {hello['gpus']}: ask for fewer ranks, or add --device cpu"
            )


# ---- Starting them ----


def run(args: argparse.Namespace, command: Callable[..., int]) -> int:
    """A command on `args.tensor_parallel` ranks: in this process, as one of torchrun's, or in Ray's actors."""
    count, started = args.tensor_parallel, int(os.environ.get("WORLD_SIZE", 1))
    check_arguments(args, started)
    if count == 1:
        return command(args)
    if args.executor == "ray":
        return on_ray(args)
    identity = {k: v for k, v in vars(args).items() if not callable(v)}
    try:
        with Ranks(args.device, {"neo_lite": code_version(), "torch": torch.__version__, **identity}) as ranks:
            return follow(ranks) if ranks.rank else command(args, ranks)
    except NeoLiteError:
        if os.environ["RANK"] == "0":
            raise
        return 1  # one line is enough, and it is rank 0's


def check_arguments(args: argparse.Namespace, started: int) -> None:
    count = args.tensor_parallel
    if count < 1:
        raise NeoLiteError(f"--tensor-parallel {count}: give a whole number from 1 on")
    if args.executor not in ("torch", "ray"):
        raise NeoLiteError(f"--executor {args.executor!r} is unknown: choose torch or ray")
    if count == 1 and started > 1:
        raise NeoLiteError(f"{started} ranks were started: add --tensor-parallel {started}, or they all do the same")
    if count > 1 and args.executor == "torch" and started != count:
        launch = f"python -m torch.distributed.run --nproc-per-node {count} -m neo_lite {shlex.join(sys.argv[1:])}"
        raise NeoLiteError(f"--tensor-parallel {count} needs {count} ranks, not {started}: {launch}")
    if count > 1 and (args.device not in ("auto", "cpu", "cuda") or getattr(args, "num_sms", 0)):
        raise NeoLiteError(
            "with --tensor-parallel each rank takes a whole GPU: leave --num-sms and a number in --device out"
        )


class RayRank:
    """A rank as an actor of Ray: does what a process of torchrun does, and keeps what that would print."""

    def place(self) -> tuple[str, int]:
        """Its machine's address and a free port there."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def main(self, argv: list[str], **environment: str) -> tuple[int, str, str]:
        os.environ.update(environment)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = importlib.import_module("neo_lite.__main__").main(argv)
        return code, out.getvalue(), err.getvalue()


def on_ray(args: argparse.Namespace) -> int:
    """This process's command in actors of Ray, one a rank: of the cluster at $RAY_ADDRESS, else of one on this machine.
    Prints what rank 0 printed, when it has ended."""
    try:
        import ray
    except ImportError:
        raise NeoLiteError("--executor ray needs Ray, which is not installed: pip install 'neo-lite[ray]'") from None
    count, here = args.tensor_parallel, "RAY_ADDRESS" not in os.environ
    local = {"address": "local", "include_dashboard": False, "object_store_memory": 100 << 20} if here else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}, **local)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0)) if args.device != "cpu" else 0
        if 0 < gpus < count:
            raise NeoLiteError(
                f"--tensor-parallel {count}: Ray has {gpus} GPUs: ask for fewer ranks, or add --device cpu"
            )
        ranks = [ray.remote(num_cpus=0, num_gpus=min(1, gpus))(RayRank).remote() for _ in range(count)]
        places = ray.get([rank.place.remote() for rank in ranks])
        (host, port), hosts = places[0], [place[0] for place in places]
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": host, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
        argv = [*sys.argv[1:], "--executor", "torch"]  # Ray shows each actor one GPU: number 0
        return report(ray, [
            rank.main.remote(argv, RANK=str(i), LOCAL_WORLD_SIZE=str(hosts.count(hosts[i])), **shared)
            for i, rank in enumerate(ranks)
        ])  # fmt: skip
    finally:
        ray.shutdown()


def report(ray: Any, runs: list[Any]) -> int:
    """Prints what rank 0 says; it ends soon after the first rank that ends."""
    first = ray.wait(runs, num_returns=1)[0][0]
    ended = ray.wait(runs[:1], num_returns=1, timeout=2 * GRACE_S)[0]
    try:
        code, out, err = ray.get(ended[0] if ended else first)
    except ray.exceptions.RayError as error:
        rank = 0 if ended else runs.index(first)
        raise NeoLiteError(f"rank {rank} died: {str(error).strip().splitlines()[0]}") from None
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code
