"""Bad input and bad moments, end to end: one line that names the value and the remedy, and nothing lost.

In process where it can be (`main(argv)`, `load_model`, `build_engine`, `engine.add`), in a process of its own where the
point is the process: signals, a compiler, a cache, a closed pipe.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from neo_lite import build_engine, load_model
from neo_lite.__main__ import main
from neo_lite.checkpoint import RandomCheckpoint
from neo_lite.config import MODELS, MODES, NeoLiteError
from neo_lite.request import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (1, 15, 16, 17, 33, 40)
CONFIG = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=160, vocab_size=512, max_position_embeddings=2048,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return load_model("random:tiny", "cpu")


@pytest.fixture(scope="module")
def requests():
    """Prompts of lengths around a block, greedy and drawn in turn: (prompt, sampling)."""
    rng = random.Random(3)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in LENGTHS]
    return [(p, SamplingParams(20, float(i % 2), seed=i)) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(model, requests):
    """What each request says when it is alone and unconstrained."""
    engine = build_engine(model, gpu_kv_tokens=2048, cpu_kv_tokens=2048)
    outputs = []
    for prompt, sampling in requests:
        request = engine.add(prompt, sampling)
        engine.run()
        outputs.append(request.output)
    assert len({tuple(output) for output in outputs}) == len(outputs)
    return outputs


def assert_all_free(engine):
    blocks = engine.scheduler.blocks
    for device in ("gpu", "cpu"):
        assert sorted(blocks._free[device]) == list(range(blocks.total[device])), device
    assert engine.scheduler.unfinished == 0


def assert_refused(call, *parts):
    with pytest.raises(NeoLiteError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message


# ---- The command line, in process ----


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "a" * 3000], "3000 tokens"),
        (["--prompt", "a" * 300, "--gpu-kv-tokens", "64"], "gpu_kv_tokens"),
        (["--prompt", "a" * 300, "--cpu-kv-tokens", "64", "--mode", "simple"], "cpu_kv_tokens"),
        (["--prompt", "\udcff"], "UTF-8"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-tokens", "-1"], "max_tokens is -1"),
        (["--max-tokens", "abc"], "'abc'"),
        (["--temperature", "-1"], "temperature -1"),
        (["--temperature", "nan"], "temperature nan"),
        (["--temperature", "1", "--top-p", "5"], "top_p 5"),
        (["--temperature", "1", "--top-p", "nan"], "top_p nan"),
        (["--gpu-kv-tokens", "1"], "gpu_kv_tokens is 1"),
        (["--cpu-kv-tokens", "15"], "cpu_kv_tokens is 15"),
        (["--gpu-kv-tokens", str(10**12)], "gpu_kv_tokens"),
        (["--cpu-kv-tokens", str(10**30)], "cpu_kv_tokens"),
        (["--cpu-threads", "-1"], "cpu_threads is -1"),
        (["--mode", "fast"], "mode 'fast'"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--device", "cpu:x"], "device 'cpu:x'"),
        (["--dtype", "float64"], "dtype 'float64'"),
        (["--model", "random:nope"], "'random:nope'"),
        (["--model", "random:llama-3.1-70b", "--device", "cpu"], "262.83 GiB"),
    ],
)
def test_the_command_line_refuses_in_one_line(arguments, named, capsys, monkeypatch):
    monkeypatch.setenv("NEO_LITE_HOST_MEMORY_GIB", "8")
    try:
        code = main(["generate", "--model", "random:tiny", "--prompt", "hi", "--max-tokens", "3", *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    lines = [x for x in captured.err.splitlines() if "compiling" not in x and "waiting for another process" not in x]
    assert code in (1, 2) and captured.out == ""
    assert len(lines) == 1 and named in lines[0], captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cpu-kv-gib", "nan"), ("--cpu-kv-gib", "-1"), ("--cpu-kv-gib", "inf"), ("--seed", "-1"),
        ("--trace", "/nonexistent/trace.json"), ("--trace", "/"), ("--requests", "0"), ("--workload", "synthetic:²,1"),
    ],
)  # fmt: skip
def test_bench_refuses_in_one_line_before_it_loads_anything(arguments, capsys, monkeypatch):
    monkeypatch.setattr("neo_lite.bench.load_model", lambda *_: pytest.fail("loaded"))
    assert main(["bench", "--model", "random:tiny", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and arguments[1] in err


@pytest.mark.parametrize("arguments", [[], ["--max-tokens", "1"], ["--mode", "simple"], ["--temperature", "inf"]])
def test_json_is_strict(arguments, capsys):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert (
        main(["generate", "--model", "random:tiny", "--prompt", "é🎉\n", "--max-tokens", "3", "--json", *arguments])
        == 0
    )
    result = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert set(result) >= {"text", "tokens", "timings"}
    assert len(result["tokens"]) == (1 if "--max-tokens" in arguments else 3)


# ---- The engine's door ----


@pytest.mark.parametrize("prompt", ["Gravity is", None, [1.5], ["a"], [None], [[1, 2]], torch.ones(2, 2), 7])
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(model, prompt):
    engine = build_engine(model, gpu_kv_tokens=512, cpu_kv_tokens=512)
    assert_refused(lambda: engine.add(prompt), "prompt")
    assert_all_free(engine)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(3, 1.0, seed=2**63), SamplingParams(3, 1.0, seed=-(2**63)), SamplingParams(3, 1.0, seed=1.5),
        SamplingParams(2.5), SamplingParams("3"), SamplingParams(3, "hot"), SamplingParams(3, stop_token_ids=111),
    ],
)  # fmt: skip
def test_sampling_is_accepted_or_refused_on_arrival_and_never_fails_its_neighbours(model, sampling):
    engine = build_engine(model, gpu_kv_tokens=512, cpu_kv_tokens=512)
    neighbour = engine.add([1, 2, 3], SamplingParams(3))
    try:
        engine.add([4, 5], sampling)
    except NeoLiteError as error:
        assert "\n" not in str(error)
    engine.run()
    assert neighbour.finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(3, 1e-40), SamplingParams(3, 5e-324), SamplingParams(3, 1.0, 1e-300)]
)
def test_a_vanishing_temperature_or_top_p_is_greedy(model, sampling):
    engine = build_engine(model, gpu_kv_tokens=512, cpu_kv_tokens=512)
    drawn, greedy = engine.add([1, 2, 3], sampling), engine.add([1, 2, 3], SamplingParams(3))
    engine.run()
    assert drawn.output == greedy.output


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu_kv_tokens": 15}, {"cpu_kv_tokens": 15}, {"block_size": 10**9}, {"gpu_kv_tokens": 2.5}, {"block_size": "16"},
        {"max_batched_tokens": float("nan")}, {"max_seqs": 2.5}, {"cpu_threads": -1}, {"cpu_threads": 2.5},
    ],
)  # fmt: skip
def test_a_bad_setting_is_refused_by_its_name(model, changes):
    name, value = next(iter(changes.items()))
    assert_refused(
        lambda: build_engine(model, **{"gpu_kv_tokens": 512, "cpu_kv_tokens": 512, **changes}), name, str(value)
    )


def test_a_request_of_another_engine_is_refused(model):
    mine, other = (build_engine(model, gpu_kv_tokens=512, cpu_kv_tokens=512) for _ in range(2))
    request = other.add([1, 2], SamplingParams(6))
    other.step()
    with pytest.raises(NeoLiteError):
        next(mine.stream(request))  # would wait for ever
        mine.step()
    with pytest.raises(NeoLiteError):
        mine.cancel(request)
    other.run()
    assert len(request.output) == 6
    assert_all_free(mine)
    assert_all_free(other)


def test_a_stream_closed_before_its_first_token_cancels(model):
    engine = build_engine(model, gpu_kv_tokens=512, cpu_kv_tokens=512)
    request = engine.add([1, 2], SamplingParams(6))
    engine.stream(request).close()
    assert request.finish_reason == "cancelled"
    assert_all_free(engine)


# ---- Odd settings, full pools: every request finishes with the same tokens ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"max_seqs": 1}, {"max_batched_tokens": 1}, {"max_batched_tokens": 5, "max_seqs": 3}, {"block_size": 1},
        {"block_size": 7}, {"block_size": 1000}, {"gpu_kv_tokens": 64, "cpu_kv_tokens": 64},
        {"gpu_kv_tokens": 59, "cpu_kv_tokens": 59, "block_size": 1},
    ],
    ids=lambda changes: "-".join(f"{k}{v}" for k, v in changes.items()) or "plain",
)  # fmt: skip
def test_the_same_tokens_under_any_setting(model, requests, expected, mode, changes):
    engine = build_engine(model, **{"mode": mode, "gpu_kv_tokens": 2048, "cpu_kv_tokens": 2048, **changes})
    added = [engine.add(*request) for request in requests]
    for _ in range(2000):
        engine.step()
    assert [r.output for r in added] == expected
    assert_all_free(engine)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_may_fill_its_pool_and_not_one_token_more(model, mode):
    """64 places hold 45 tokens of prompt and 19 of 20 output tokens: the last is never fed back."""
    engine = build_engine(model, mode=mode, gpu_kv_tokens=64, cpu_kv_tokens=64)
    fits, waits = engine.add([1] * 45, SamplingParams(20)), engine.add([2], SamplingParams(3))
    assert_refused(lambda: engine.add([1] * 46, SamplingParams(20)), "65 tokens", "kv_tokens")
    engine.run()
    assert (len(fits.output), len(waits.output)) == (20, 3)
    assert_all_free(engine)


@pytest.mark.parametrize("mode", MODES)
def test_two_engines_in_two_threads(model, requests, expected, mode):
    found: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        engine = build_engine(model, mode=mode, gpu_kv_tokens=256, cpu_kv_tokens=256)
        added = [engine.add(*request) for request in requests]
        engine.run()
        found[i] = [r.output for r in added]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected, 1: expected}


# ---- Ctrl-C anywhere between two iterations' attention ----


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in the engine, the scheduler or the allocator."""

    FILES = ("engine.py", "scheduler.py", "blocks.py", "request.py")

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        return self.line if path.parent.name == "neo_lite" and path.name in self.FILES else None

    def line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.line


def interrupted_run(model, requests, mode, at, costs):
    """Runs until line `at`, then to the end; the engine, its requests and the number of lines."""
    engine = build_engine(model, mode=mode, gpu_kv_tokens=64, cpu_kv_tokens=64, costs=costs)
    added = [engine.add(*request) for request in requests]
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt)
    try:
        engine.run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    for _ in range(300):  # not run(): a lost request would keep it for ever
        engine.step()
    return engine, added, interrupt.lines


@pytest.mark.parametrize("mode", ["gpu-only", "simple", "asymmetric"])
def test_ctrl_c_at_any_line_loses_nothing(model, requests, mode):
    short = [(prompt, SamplingParams(6, s.temperature, seed=s.seed)) for prompt, s in requests[:4]]
    costs = None
    if mode == "asymmetric":
        costs = build_engine(model, mode=mode, gpu_kv_tokens=64, cpu_kv_tokens=64).scheduler.costs
    _, whole, total = interrupted_run(model, short, mode, -1, costs)
    wrong = []
    for at in random.Random(1).sample(range(1, total), min(80, total - 1)):
        engine, added, _ = interrupted_run(model, short, mode, at, costs)
        if [(r.output, r.finish_reason) for r in added] != [(r.output, r.finish_reason) for r in whole]:
            wrong.append(at)
        else:
            assert_all_free(engine)
    assert not wrong, f"{len(wrong)} of 80 interrupted runs ended otherwise (lines {wrong[:5]} of {total})"


# ---- Checkpoints ----


@pytest.fixture(scope="module")
def tensors():
    return {name: tensor.clone() for name, tensor in RandomCheckpoint(MODELS["tiny"]).tensors()}


def kv_of(heads: int) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{i}.self_attn.{p}.weight": torch.zeros(heads * 16, 64)
        for i in (0, 1)
        for p in ("k_proj", "v_proj")
    }


@pytest.mark.parametrize(
    ("config", "extra", "named"),
    [
        ({**CONFIG, "model_type": "gpt2"}, {}, "'gpt2'"),
        ({**CONFIG, "num_hidden_layers": "2"}, {}, "num_hidden_layers"),
        ({**CONFIG, "num_hidden_layers": -2}, {}, "num_hidden_layers"),
        ({**CONFIG, "hidden_size": 64.5}, {}, "hidden_size"),
        ({**CONFIG, "max_position_embeddings": -1}, {}, "max_position_embeddings"),
        ({**CONFIG, "rope_theta": "x"}, {}, "rope_theta"),
        ({**CONFIG, "rope_scaling": "yarn"}, {}, "yarn"),
        ({**CONFIG, "num_key_value_heads": 3}, kv_of(3), "num_key_value_heads"),
        (CONFIG, {"model.norm.weight": torch.ones(3)}, "model.norm.weight"),
        ("{not json", {}, "config.json"),
        ("[1, 2]", {}, "config.json"),
        ("", {}, "config.json"),
    ],
)
def test_a_config_that_is_no_llama_is_refused(tmp_path, tensors, config, extra, named):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({**tensors, **extra}, str(tmp_path / "model.safetensors"))
    assert_refused(lambda: load_model(str(tmp_path), "cpu"), str(tmp_path), named)


def spoil(file: Path, how: str) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    if how == "half":
        file.write_bytes(raw[: len(raw) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "garbage":
        file.write_bytes(raw[:8] + b"x" * (len(raw) - 8))
    elif how == "list":
        file.write_bytes((16).to_bytes(8, "little") + b"[1, 2]".ljust(16) + raw)
    else:
        header["model.norm.weight"]["data_offsets"] = [0, 4] if how == "short tensor" else [-400000, -399744]
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize("how", ["half", "empty", "garbage", "list", "short tensor", "negative offset"])
def test_a_spoiled_weight_file_is_refused_before_a_byte_of_weights_moves(tmp_path, tensors, how):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, str(tmp_path / "model.safetensors"))
    spoil(tmp_path / "model.safetensors", how)
    assert_refused(lambda: load_model(str(tmp_path), "cpu"), "model.safetensors")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            " has no torch: run `make lab` or another of the",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "may not have so much memory: lower the pools: Cannot allocate",
        ),
    ],
)
def test_what_the_machine_lacks_is_one_line(error, said, capfd, monkeypatch):
    def run_env(args):
        raise error

    monkeypatch.setattr("neo_lite.__main__.run_env", run_env)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # which the test's own output would not survive
    assert main(["env"]) == 1
    err = capfd.readouterr().err
    assert said in err and err.startswith("neo_lite: ") and err.count("\n") == 1


def test_a_missing_module_of_our_own_is_a_bug_and_shows(monkeypatch):
    def run_env(args):
        raise ModuleNotFoundError("No module named 'neo_lite.gone'", name="neo_lite.gone")

    monkeypatch.setattr("neo_lite.__main__.run_env", run_env)
    with pytest.raises(ModuleNotFoundError):
        main(["env"])


# ---- In a process of its own ----


def start(cache: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "neo_lite", "generate", "--model", "random:tiny", "--prompt", "hi", *arguments]
    environment = {**os.environ, "NEO_LITE_CACHE": str(cache), "PYTHONPATH": str(ROOT), **env}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_the_run_after_an_interrupted_compile_works(compiler, tmp_path, sent):
    process = start(tmp_path, "--max-tokens", "3", "--mode", "simple")
    assert "compiling" in process.stderr.readline()
    os.killpg(process.pid, sent)
    code, _, err = finish(process)
    assert code == (130 if sent == signal.SIGINT else -sent) and "Traceback" not in err
    code, out, err = finish(start(tmp_path, "--max-tokens", "3", "--mode", "simple"))
    assert (code, out) == (0, "ooo\n"), err


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["-1", "100000", "9" * 20])
def test_a_thread_count_that_no_machine_has_is_refused(tmp_path, threads):
    """In a process of its own: what OpenMP cannot start ends the process, or crashes it."""
    code, out, err = finish(start(tmp_path, "--max-tokens", "3", "--mode", "simple", "--cpu-threads", threads))
    assert (code, out) == (1, "") and f"cpu_threads is {threads}" in err.splitlines()[-1], (code, err)


@pytest.mark.slow
def test_two_compiles_at_once_build_once(compiler, tmp_path):
    both = [start(tmp_path, "--max-tokens", "3", "--mode", "simple") for _ in range(2)]
    results = [finish(process) for process in both]
    assert [(code, out) for code, out, _ in results] == [(0, "ooo\n")] * 2
    assert sum("compiling" in err for _, _, err in results) == 1


@pytest.mark.slow
def test_ctrl_c_in_a_generation_is_one_line(tmp_path):
    process = start(tmp_path, "--max-tokens", "2000", CXX="/nonexistent")
    assert process.stdout.read(3) == "ooo"
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and err.strip().endswith("neo_lite: interrupted") and "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(tmp_path):
    process = start(tmp_path, "--max-tokens", "2000", CXX="/nonexistent")
    process.stdout.read(1)
    process.stdout.close()
    assert "Traceback" not in process.stderr.read() and process.wait(120) == 0


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["cache is a file", "library is empty", "compiler is broken", "disk is full"])
def test_trouble_with_the_machine_is_one_line(compiler, tmp_path, trouble):
    """The line names the path or the compiler; a spoiled build is made again."""
    cache, env, named = tmp_path / "cache", {}, "NEO_LITE_CACHE"
    if trouble == "cache is a file":
        cache.write_text("")
    elif trouble == "library is empty":
        assert finish(start(cache, "--max-tokens", "3"))[0] == 0
        for library in cache.rglob("library.so"):
            library.write_bytes(b"")
        assert finish(start(cache, "--max-tokens", "3", "--mode", "simple"))[:2] == (0, "ooo\n")
        return
    elif trouble == "compiler is broken":
        broken = tmp_path / "g++"
        broken.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo g++ 12 && exit 0\necho "error: broken" >&2; exit 1\n'
        )
        broken.chmod(0o755)
        env, named = {"CXX": str(broken)}, "CXX"
    else:
        if not Path("/dev/full").exists():
            pytest.skip("/dev/full is Linux's")
        named = "No space left"
    process = start(cache, "--max-tokens", "3", "--mode", "simple", **env)
    if trouble == "disk is full":
        finish(process)
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                process.args, stdout=full, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "NEO_LITE_CACHE": str(cache), "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        code, err = done.returncode, done.stderr
    else:
        code, _, err = finish(process)
    lines = [line for line in err.splitlines() if "compiling" not in line]
    assert code == 1 and len(lines) == 1 and named in lines[0], err
