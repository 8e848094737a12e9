"""Tensor parallel: the parts are the whole, tokens are those of one rank, and a rank's death ends the run cleanly.

Run as a script by torchrun this file is a rank: it serves the same cases as the test does alone, or dies on purpose.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_pipeline import COSTS, tiny_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from neo_lite import launch
from neo_lite.__main__ import main
from neo_lite.api import build_engine, load_model
from neo_lite.checkpoint import open_checkpoint
from neo_lite.config import MODELS, MODES, EngineConfig, NeoLiteError
from neo_lite.model import Llama
from neo_lite.parallel import RankPipeline, Shard, check_alike, heads, pack, share, unpack
from neo_lite.request import SamplingParams

UNEVEN = dict(  # three KV heads of three query heads; nothing that two or four ranks share evenly; every bias there is
    num_attention_heads=9, num_key_value_heads=3, head_dim=16, hidden_size=72, intermediate_size=101, vocab_size=97,
    attention_bias=True, mlp_bias=True,
)  # fmt: skip
ROOMY = dict(gpu_kv_tokens=4096, cpu_kv_tokens=4096)
NARROW = dict(block_size=4, gpu_kv_tokens=128, cpu_kv_tokens=128, max_batched_tokens=16)
POOLS = {"roomy": ROOMY, "narrow": NARROW, "measured": {**NARROW, "max_seqs": 8}}
ALL = [f"{mode}, {pools}" for mode in MODES for pools in ("roomy", "narrow")] + ["asymmetric, measured"]
END_S = 30.0  # from a rank's death to the end of the run
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs on this machine")
RANK = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


# ---- What a rank holds ----


def shards(model, size):
    return [Shard(model, SimpleNamespace(rank=rank, size=size)) for rank in range(size)]


@pytest.mark.parametrize("groups", range(1, 9))
@pytest.mark.parametrize("width", range(1, 5))
def test_each_query_head_is_on_one_rank_together_with_its_kv_head(groups, width):
    model = replace(MODELS["tiny"], num_heads=groups * width, num_kv_heads=groups)
    for size in range(1, groups * width + 1):
        parts = [heads(model, rank, size) for rank in range(size)]
        assert [head for _, q in parts for head in q] == list(range(groups * width))
        for kv, q in parts:
            assert sorted({head // width for head in q}) == list(kv)
            assert size > groups or len(q) == len(kv) * width, "whole groups"
            assert len(kv) == 1 or size <= groups


def test_smollm2_over_two_ranks():
    assert [(len(kv), len(q)) for kv, q in (heads(MODELS["smollm2"], rank, 2) for rank in (0, 1))] == [(2, 6), (1, 3)]


def test_shares_differ_by_one_at_most():
    assert [list(share(7, part, 3)) for part in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_the_whole(tmp_path, size):
    """Each number of each matrix is on one rank, norms on all; biases after a sum on rank 0 alone."""
    tiny_folder(tmp_path, UNEVEN)
    checkpoint = open_checkpoint(str(tmp_path))
    ranks = shards(checkpoint.config, size)
    for name, whole in checkpoint.tensors():
        module, parts = name.split(".")[-2], [shard.part(name, whole) for shard in ranks]
        if module.endswith("norm"):
            assert all(part.equal(whole) for part in parts)
        elif module in ("o_proj", "down_proj"):
            assert sum(parts).equal(whole) if name.endswith("bias") else torch.cat(parts, 1).equal(whole)
        elif module in ("k_proj", "v_proj") and size > checkpoint.config.num_kv_heads:
            assert [len(part) for part in parts] == [16] * size
            assert torch.cat([parts[0], *parts[2:]]).equal(whole) and parts[0].equal(parts[1])
        else:
            assert torch.cat(parts)[: len(whole)].equal(whole), name


def test_no_rank_holds_the_whole_model():
    model, size = MODELS["tiny"], 2
    for shard in shards(model, size):
        part = Llama(model, torch.float32, torch.device("cpu"), shard)
        matrices = [part.embedding, part.lm_head, *(m for w in part.layers for m in (w.qkv, w.o, w.gate_up, w.down))]
        assert sum(m.numel() for m in matrices) * size == model.num_parameters == shard.config.num_parameters * size


# ---- A plan on its way ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pools", [ROOMY, NARROW], ids=["roomy", "narrow"])
def test_a_plan_loses_nothing_on_its_way(mode, pools, compiler):
    """A second pipeline that gets nothing but messages ends each iteration with the same logits and the same KV."""
    model = load_model("random:tiny", "cpu")
    engine, twin = (build_engine(model, mode=mode, costs=COSTS, **pools) for _ in range(2))
    pipeline, follower, logits = engine.executor, twin.executor, []
    for p in (pipeline, follower):
        p.sample = lambda x, requests, draw=p.sample: logits.append(x) or draw(x, requests)
    follower.sample = lambda x, requests: logits.append(x) or [0] * len(requests)

    class Both:
        def run(self, plan):
            message = pickle.dumps(pack(plan))
            assert len(message) < 400 * (1 + len(list(plan.work)) + len(plan.moves)) + 8 * sum(
                w.length for w in plan.work
            )
            tokens = pipeline.run(plan)
            follower.run(unpack(*pickle.loads(message)))
            assert len(logits) % 2 == 0 and (not logits or logits.pop().equal(logits.pop()))
            for name, pool in pipeline.cache.pools.items():
                assert all(t.equal(follower.cache.pools[name].tensors[n]) for n, t in pool.tensors.items())
            return tokens

    engine.executor = Both()
    requests = add_requests(engine)
    engine.run()
    assert all(len(r.output) == r.sampling.max_tokens for r in requests)


# ---- Processes, and what they leave ----


@pytest.fixture
def mark() -> Iterator[dict[str, str]]:
    """An environment variable for every process of a test, which leaves none behind, and no shared memory."""
    made, shm = {"NEO_LITE_TEST": uuid.uuid4().hex}, Path("/dev/shm")
    before = set(os.listdir(shm)) if shm.exists() else set()
    yield made
    deadline_s = time.time() + 15
    while (left := marked(made)) and time.time() < deadline_s:
        time.sleep(0.2)
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    new = set(os.listdir(shm)) - before if shm.exists() else set()
    if new:
        time.sleep(2)  # Python's own semaphores, of whatever else runs here, have a name for an instant only
        assert unheld(new & set(os.listdir(shm))) == set()


def marked(mark: dict[str, str]) -> list[tuple[int, str]]:
    """Living processes that carry this mark in their environment: (pid, command line). None where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if next(iter(mark.values())).encode() in (folder / "environ").read_bytes():
                found.append((int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")))
        except OSError:
            continue
    return found


def unheld(names: set[str]) -> set[str]:
    """Those files of shared memory that no process has open or mapped: what somebody left behind."""
    held: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*") if names else ():
        try:
            paths = [line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()]
            held |= {Path(path).name for path in [*paths, *(os.readlink(fd) for fd in (folder / "fd").iterdir())]}
        except OSError:
            continue
    return names - held


def torchrun(size: int, *args: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return start([*command, *map(str, args)], **environment)


def start(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def last_json(out: str) -> Any:
    return json.loads(out.strip().splitlines()[-1])


# ---- The same tokens ----


def add_requests(engine):
    """Prompts around a block and beyond a chunk; every third is drawn, not greedy."""
    vocab = engine.model.vocab_size
    return [
        engine.add(
            [(7 * i + 3 * j) % vocab for j in range(n)],
            SamplingParams(12 + i, float(i % 3 == 2), seed=i, ignore_eos=True),
        )
        for i, n in enumerate((1, 5, 15, 16, 17, 33, 40, 3))
    ]


def answers(model: Llama, cases: Sequence[str]) -> dict[str, list[list[int]]]:
    """What is said in each case, "mode, pools". In the last one the ranks measure the times that the scheduler weighs."""
    said = {}
    for case in cases:
        mode, pools = case.split(", ")
        costs = None if pools == "measured" else COSTS
        engine = build_engine(model, EngineConfig(mode=mode, **POOLS[pools]), costs=costs)
        requests = add_requests(engine)
        engine.run()
        said[case] = [r.output for r in requests]
        assert case != "asymmetric, narrow" or sum(r.num_swaps for r in requests) > 0
    return said


def assert_the_same(model: str, size: int, cases: Sequence[str], mark: dict[str, str], device: str = "cpu") -> None:
    expected = answers(load_model(model, device, "float32"), cases)
    assert len({str(tokens) for tokens in expected["simple, roomy"]}) == 8
    run = torchrun(size, __file__, device, model, size, *cases, **mark)
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    assert last_json(out) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("tiny", 2), ("tiny", 4), ("uneven", 2), ("uneven", 4)])
def test_tokens_are_those_of_one_rank_in_every_mode(tmp_path, name, size, mark, compiler):
    """tiny over 4: two ranks a group. uneven over 2: 2 and 1 groups; over 4: a group's 3 query heads as 2 and 1."""
    assert_the_same("random:tiny" if name == "tiny" else uneven(tmp_path), size, ALL, mark)


def uneven(folder: Path) -> str:
    tiny_folder(folder, UNEVEN)
    words = Tokenizer(WordLevel({str(i): i for i in range(97)}, "0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_smollm2_and_its_three_kv_heads_over_two_ranks(mark, compiler):
    assert_the_same("smollm2", 2, ("gpu-only, roomy", "simple, roomy", "symmetric, roomy", "asymmetric, narrow"), mark)


@two_gpus
@pytest.mark.parametrize("model", ["random:tiny", "smollm2"])
def test_two_gpus_say_what_one_says(model, mark, compiler):
    assert_the_same(model, 2, ALL if model == "random:tiny" else ["simple, roomy", "asymmetric, roomy"], mark, "cuda")


WORDS = (
    "generate",
    "--model",
    "random:tiny",
    "--prompt",
    "actors",
    "--json",
    "--device",
    "cpu",
    "--mode",
    "asymmetric",
)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["torch", "ray"])
def test_the_command_line_says_the_same(executor, mark, compiler):
    alone = subprocess.run([sys.executable, "-m", "neo_lite", *WORDS], cwd=ROOT, capture_output=True, text=True)
    for _ in range(3):
        run = (on_torchrun if executor == "torch" else on_ray)(*WORDS, **mark)
        out, err = run.communicate(timeout=300)
        if TOO_BUSY not in err:
            break
    assert run.returncode == 0 and last_json(out)["tokens"] == last_json(alone.stdout)["tokens"], err


TOO_BUSY = "Ray does not start: The current node timed out"  # after 30 s, whatever else the machine has to do


def on_torchrun(*words: str, **environment: str) -> subprocess.Popen[str]:
    return torchrun(2, "-m", "neo_lite", *words, "--tensor-parallel", 2, **environment)


def on_ray(*words: str, **environment: str) -> subprocess.Popen[str]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'neo-lite[ray]'")
    command = [sys.executable, "-m", "neo_lite", *words, "--tensor-parallel", "2", "--executor", "ray"]
    return start(command, RAY_AUTH_MODE="disabled", **environment)


# ---- A rank that dies ----


@pytest.mark.slow
def test_a_ray_actor_that_is_killed_ends_the_run(mark):
    bench = "--model random:tiny --device cpu --workload synthetic:100,1000 --requests 40 --gpu-kv-tokens 100000"
    run = on_ray("bench", *bench.split(), "--cpu-kv-gib", "0.01", **mark)
    actors: list[int] = []
    while len(actors) < 2:
        if run.poll() is not None:
            assert TOO_BUSY in run.communicate()[1]
            run = on_ray("bench", *bench.split(), "--cpu-kv-gib", "0.01", **mark)
        time.sleep(0.5)
        actors = [pid for pid, line in marked(mark) if line.startswith("ray::RayRank.main")]
    time.sleep(10)  # into the run, on an idle machine; the outcome is the same before it
    os.kill(max(actors), signal.SIGKILL)
    died_s = time.time()
    _, err = run.communicate(timeout=120)
    assert time.time() - died_s < END_S and run.returncode == 1
    (line,) = our_lines(err)
    assert re.match("neo_lite: rank [01] died", line), err


def our_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("neo_lite: ") and "compil" not in line]


KILLED = "rank 1 died without a word (killed, or out of memory?); requests in flight, now failed: 8"
RAISED = "rank {} failed: OSError: no space on disk; requests in flight, now failed: 8"


@pytest.mark.parametrize(
    ("device", "size"), [pytest.param("cpu", 3, marks=pytest.mark.slow), pytest.param("cuda", 2, marks=two_gpus)]
)
@pytest.mark.parametrize(("victim", "how"), [(1, "kill"), (-1, "raise"), (0, "kill")])
def test_a_rank_that_dies_ends_the_run(tmp_path, device, size, victim, how, mark, compiler):
    """In time, with one line that says who died, all requests failed; `mark` sees that no process and no memory is left."""
    victim, died = victim % size, tmp_path / "died"
    line = {"raise": RAISED.format(victim), "kill": KILLED if victim else ""}[how]
    run = torchrun(size, __file__, f"die on {device}", "random:tiny", size, how, victim, died, **mark)
    out, err = run.communicate(timeout=300)
    assert 0 < time.time() - float(died.read_text()) < END_S
    assert run.returncode == 1 and our_lines(err) == [f"neo_lite: {line}"] * bool(line), err
    assert ("Signal 9 (SIGKILL)" in err) == (how == "kill") and f"rank      : {victim}" in err, "torchrun's own report"
    assert not victim or last_json(out) == {"finish_reasons": ["failed"] * 8}


# ---- Bad input ----


def refused(capsys, *words: str) -> str:
    assert main(["generate", "--model", "random:tiny", "--prompt", "x", *words]) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    return said.err


def test_bad_numbers_and_names_are_refused(capsys, monkeypatch):
    assert "--tensor-parallel 0: give a whole number from 1 on" in refused(capsys, "--tensor-parallel", "0")
    assert "--executor 'mpi' is unknown: choose torch or ray" in refused(capsys, "--executor", "mpi")
    monkeypatch.setattr(sys, "argv", ["neo_lite", "generate", "--prompt", "a b", "--tensor-parallel", "2"])
    launched = "-m torch.distributed.run --nproc-per-node 2 -m neo_lite generate --prompt 'a b' --tensor-parallel 2"
    said = refused(capsys, "--tensor-parallel", "2")
    assert "--tensor-parallel 2 needs 2 ranks, not 1: python " + launched in said
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused(capsys, "--tensor-parallel", "2", "--executor", "ray")
    assert "needs Ray, which is not installed: pip install 'neo-lite[ray]'" in said


def test_ranks_that_would_all_do_the_same_are_refused(capsys, monkeypatch):
    for name, value in {**RANK, "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "2 ranks were started and would all do the same: add --tensor-parallel 2" in refused(capsys)
    said = refused(capsys, "--tensor-parallel", "2", "--device", "cuda:1")
    assert "each rank takes a whole GPU by its number" in said
    assert main(["bench", "--tensor-parallel", "2", "--profile", "one.json"]) == 1
    assert "a --profile is of one GPU: leave it out" in capsys.readouterr().err
    monkeypatch.delenv("MASTER_PORT")
    assert "$MASTER_PORT is not set: start the ranks by" in refused(capsys, "--tensor-parallel", "2")


def test_more_ranks_than_query_heads_are_refused():
    with pytest.raises(NeoLiteError, match="--tensor-parallel 5: tiny has 4 query heads: lower it"):
        shards(MODELS["tiny"], 5)


def test_ranks_must_be_alike_and_have_a_gpu_each():
    one = {"neo_lite": "0.1.0", "model": "smollm2", "gpus": 2, "local_rank": 0}
    check_alike({0: one, 1: {**one, "local_rank": 1}})
    with pytest.raises(
        NeoLiteError, match="rank 1 has neo_lite '0.2.0' and rank 0 '0.1.0': start all ranks by the same"
    ):
        check_alike({0: one, 1: {**one, "neo_lite": "0.2.0"}})
    with pytest.raises(NeoLiteError, match="--tensor-parallel 3: rank 2 needs a GPU of its own, and its machine has 2"):
        check_alike({0: one, 1: {**one, "local_rank": 1}, 2: {**one, "local_rank": 2}})


def two_ranks(mark: dict[str, str], folders: list[Path], *models: str) -> Iterator[tuple[int, str, str]]:
    """Two processes as torchrun would start them on two machines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    runs = []
    for rank, (folder, model) in enumerate(zip(folders, models)):
        words = ["generate", "--device", "cpu", "--prompt", "x", "--tensor-parallel", "2", "--model", model]
        environment = {**RANK, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        runs.append(start([sys.executable, "-m", "neo_lite", *words], folder, **environment, **mark))
    for run in runs:
        out, err = run.communicate(timeout=120)
        yield run.returncode, out, err


@pytest.mark.slow
def test_ranks_with_different_models_are_refused_before_anything_is_loaded(tmp_path, mark):
    first, second = two_ranks(mark, [tmp_path, tmp_path], "random:tiny", "smollm2")
    line = "neo_lite: rank 1 has model 'smollm2' and rank 0 'random:tiny': start all ranks by the same command, on the"
    assert first[0] == second[0] == 1 and first[2].startswith(line) and len(first[2].splitlines()) == 1
    assert first[1] == second[1] == second[2] == ""


@pytest.mark.slow
def test_a_model_of_another_shape_under_the_same_name_is_refused(tmp_path, mark):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, size in zip(folders, (96, 128)):
        tiny_folder(folder / "model", {"intermediate_size": size})
    first, second = two_ranks(mark, folders, "./model", "./model")
    assert (
        first[2]
        == "neo_lite: rank 1 failed: ./model has another shape here than on rank 0: copy the model from there\n"
    )
    assert first[0] == second[0] == 1 and second[2] == ""


# ---- As a rank ----


def die(args: argparse.Namespace, ranks) -> int:  # type: ignore[no-untyped-def]
    """Rank 0 of a run in which a rank dies in its third iteration; says what became of the requests."""
    engine = build_engine(load_model(args.model, args.device, "float32", ranks), **ROOMY)
    requests = add_requests(engine)
    try:
        engine.run()
    finally:
        print(json.dumps({"finish_reasons": [r.finish_reason for r in requests]}), flush=True)
    return 0


def arm(how: str, note: Path) -> None:
    """From now on the third plan kills this process, or raises."""
    inner, plans = RankPipeline.run, []

    def run(self, plan):  # type: ignore[no-untyped-def]
        plans.append(plan)
        if len(plans) == 3:
            note.write_text(str(time.time()))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no space on disk")
        return inner(self, plan)

    RankPipeline.run = run  # type: ignore[method-assign]


def as_a_rank(what: str, model: str, size: str, *rest: str) -> int:
    """`what`: a device on which to give answers, or "die on" one."""
    dies, device = what.startswith("die on "), what.removeprefix("die on ")
    args = argparse.Namespace(model=model, tensor_parallel=int(size), executor="torch", device=device)

    def answer(args: argparse.Namespace, ranks: Any) -> int:
        print(json.dumps(answers(load_model(args.model, device, "float32", ranks), rest)))
        return 0

    if dies and os.environ["RANK"] == rest[1]:
        arm(rest[0], Path(rest[2]))
    try:
        return launch.run(args, die if dies else answer)
    except NeoLiteError as error:
        print(f"neo_lite: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(as_a_rank(*sys.argv[1:]))
