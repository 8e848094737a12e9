"""How the ranks of a tensor-parallel command come to be: torchrun's processes, or actors of Ray. No launcher of our own.

    python -m torch.distributed.run --nproc-per-node 2 -m neo_lite bench ... --tensor-parallel 2
    python -m neo_lite bench ... --tensor-parallel 2 --executor ray

torchrun starts this very command once for each rank, on one or several machines. With Ray the command asks for an actor a
rank, each of which does what a process of torchrun does; Ray chooses machines and GPUs. Called by `__main__`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from neo_lite.config import NeoLiteError
from neo_lite.machine import sources_version
from neo_lite.parallel import GRACE_S, Ranks, follow


def run(args: argparse.Namespace, command: Callable[..., int]) -> int:
    """A command on `args.tensor_parallel` ranks: in this process, as one of torchrun's, or in Ray's actors."""
    check_arguments(args, int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1)
    if args.tensor_parallel == 1:
        return command(args)
    if args.executor == "ray":
        return on_ray(args)
    identity = {"neo_lite": sources_version(), "torch": torch.__version__}
    identity |= {name: value for name, value in vars(args).items() if not callable(value)}
    try:
        with contextlib.closing(Ranks(args.device, identity)) as ranks:
            return follow(ranks) if ranks.rank else command(args, ranks)
    except NeoLiteError:
        if os.environ["RANK"] == "0":
            raise
        return 1  # one line is enough, and it is rank 0's


def check_arguments(args: argparse.Namespace, started: int) -> None:
    count, asked = args.tensor_parallel, f"--tensor-parallel {args.tensor_parallel}"
    if count < 1:
        raise NeoLiteError(f"{asked}: give a whole number from 1 on")
    if args.executor not in ("torch", "ray"):
        raise NeoLiteError(f"--executor {args.executor!r} is unknown: choose torch or ray")
    if count == 1 < started:
        raise NeoLiteError(f"{started} ranks were started and would all do the same: add --tensor-parallel {started}")
    if args.executor == "torch" and started != count:
        launch = f"python -m torch.distributed.run --nproc-per-node {count} -m neo_lite {shlex.join(sys.argv[1:])}"
        raise NeoLiteError(f"{asked} needs {count} ranks, not {started}: {launch}")
    if count > 1 and (args.device not in ("auto", "cpu", "cuda") or getattr(args, "num_sms", 0)):
        raise NeoLiteError(f"{asked}: each rank takes a whole GPU by its number: --device cuda, and no --num-sms")
    if count > 1 and getattr(args, "profile", ""):
        raise NeoLiteError(f"{asked}: a --profile is of one GPU: leave it out, and the ranks measure together")


class RayRank:
    """A rank as an actor of Ray: does what a process of torchrun does, and keeps what that would print."""

    def place(self) -> tuple[str, int]:
        """Its machine's address and a free port there."""
        import ray

        with socket.create_server(("", 0)) as free:
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def main(self, argv: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
        from neo_lite.__main__ import main

        os.environ.update(environment)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
        return code, out.getvalue(), err.getvalue()


def on_ray(args: argparse.Namespace) -> int:
    """This process's command in actors of Ray, one a rank: of the cluster at $RAY_ADDRESS, else of one on this machine.
    Prints what rank 0 printed, when it has ended."""
    try:
        import ray
    except ImportError:
        raise NeoLiteError("--executor ray needs Ray, which is not installed: pip install 'neo-lite[ray]'") from None
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | os.environ
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if "RAY_ADDRESS" not in os.environ:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": 100 << 20}
    stage = "Ray does not start"
    try:
        ray.init(**options)
        count, gpus = args.tensor_parallel, 0 if args.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        if 0 < gpus < count:
            raise NeoLiteError(f"--tensor-parallel {count}: Ray has {gpus} GPUs: lower it, or add --device cpu")
        actors = [ray.remote(num_cpus=0, num_gpus=min(1, gpus))(RayRank).remote() for _ in range(count)]
        runs = _start(ray, actors)
        first = ray.wait(runs)[0]
        ended = ray.wait(runs[:1], timeout=2 * GRACE_S)[0] or first  # rank 0 is not far behind, and says why
        stage = f"rank {runs.index(ended[0])} died"
        code, out, err = ray.get(ended[0])
    except NeoLiteError:
        raise
    except Exception as error:  # Ray raises many kinds, its own and plain ones
        raise NeoLiteError(f"{stage}: {str(error).strip().splitlines()[0]}") from None
    finally:
        ray.shutdown()
    print(out, end="")
    print(err, end="", file=sys.stderr)
    return code


def _start(ray: Any, actors: list[Any]) -> list[Any]:
    places = ray.get([actor.place.remote() for actor in actors])
    hosts, argv = [host for host, _ in places], [*sys.argv[1:], "--executor", "torch"]
    shared = {"WORLD_SIZE": str(len(actors)), "MASTER_ADDR": hosts[0], "MASTER_PORT": str(places[0][1])}
    # LOCAL_RANK: Ray shows each actor one GPU, as number 0
    own = [{"RANK": str(i), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(hosts.count(h))} for i, h in enumerate(hosts)]
    return [actor.main.remote(argv, shared | env) for actor, env in zip(actors, own)]
