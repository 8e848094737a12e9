"""`python -m neo_lite …`: what a notebook can do, from a shell. Errors are one line; the exit code says the rest."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from neo_lite.config import MODELS, MODES, NeoLiteError
from neo_lite.request import Request, SamplingParams


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0: done, 1: refused with a reason, 130: interrupted."""
    try:
        args = parser().parse_args(argv)
        return args.command(args)
    except NeoLiteError as error:
        print(f"neo_lite: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nneo_lite: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if str(error.name).startswith("neo_lite"):
            raise
        print(f"neo_lite: {sys.executable} has no {error.name}: run `make lab` or another of the README's commands once, then"
              " .venv/bin/python -m neo_lite", file=sys.stderr)  # fmt: skip
        return 1
    except (OSError, UnicodeEncodeError) as error:  # a full disk, a letter that the terminal's encoding lacks
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python flushes again at its end
        full = isinstance(error, OSError) and error.errno == errno.ENOMEM
        what = "this process may not have so much memory: lower the pools" if full else "the output cannot be written"
        print(f"neo_lite: {what}: {str(error).partition('] ')[2] or error}", file=sys.stderr)
        return 1


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a --help away."""

    def error(self, message: str) -> NoReturn:
        raise NeoLiteError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    top = OneLineParser(prog="python -m neo_lite", description="offloaded LLM serving, step by step")
    commands = top.add_subparsers(required=True, metavar="command")
    env = commands.add_parser("env", help="what this machine is, and what of the course it can run")
    env.add_argument("--json", action="store_true")
    env.set_defaults(command=run_env)
    generate = commands.add_parser("generate", help="generate text, tokens streaming as they come")
    _generate_arguments(generate)
    kernel = commands.add_parser("kernel-bench", help="every rung of the CPU kernel against this machine's memory")
    add_kernel_bench_arguments(kernel)
    kernel.set_defaults(command=run_kernel_bench)
    bench = commands.add_parser("bench", help="throughput and latency of a seeded batch of requests, offered at once")
    add_bench_arguments(bench)
    bench.set_defaults(command=run_bench)
    profile = commands.add_parser("profile", help="measure stage times on this machine, for the cost model")
    add_profile_arguments(profile)
    profile.set_defaults(command=run_profile)
    simulate = commands.add_parser("simulate", help="the same engine and scheduler on a virtual clock, on any machine")
    add_simulate_arguments(simulate)
    simulate.set_defaults(command=run_simulate)
    figures = commands.add_parser("figures", help="the paper's figures: its points, simulated and recorded ones")
    add_figures_arguments(figures)
    figures.set_defaults(command=run_figures)
    for command in (generate, bench):
        command.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share the model")
        command.add_argument("--executor", default="torch", help="what started them: torch (torchrun), or ray")
    return top


def add_bench_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="random:llama-3.1-8b", help="default: %(default)s")
    p.add_argument("--device", default="auto", help="default: %(default)s")
    p.add_argument("--dtype", default="auto", help="default: %(default)s")
    p.add_argument("--mode", default="gpu-only", help=f"(default: gpu-only) several with commas: {', '.join(MODES)}")
    p.add_argument("--profile", default="", help="stage times for the modes that weigh them (else measured first)")
    p.add_argument("--num-sms", type=int, default=0, help="multiprocessors of the GPU to use (0: all)")
    p.add_argument("--cpu-threads", type=int, default=0, help="default: %(default)s")
    p.add_argument("--gpu-kv-tokens", type=int, default=26400, help="default: %(default)s")
    p.add_argument("--cpu-kv-gib", type=float, default=0.0, help="0: what the load can use, 16 at most")
    p.add_argument("--max-batched-tokens", type=int, default=2048, help="default: %(default)s")
    p.add_argument("--workload", default="synthetic:1000,200",
                   help="synthetic:PROMPT,OUTPUT tokens, each +- 10 %%; osc, azure-code, azure-conv, trace:FILE.csv")  # fmt: skip
    p.add_argument("--requests", type=int, default=60, help="default: %(default)s")
    p.add_argument("--rate", type=float, default=float("inf"), help="requests a second (default: all at once)")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--trace", default="", help="write a Chrome/Perfetto trace of the last iterations to this file")
    p.add_argument("--json", action="store_true")


def add_kernel_bench_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--shape", default="llama-2-7b", choices=("llama-2-7b", "llama-3.1-8b", "smollm2"))
    p.add_argument("--dtype", default="fp16", choices=("fp16", "bf16", "fp32", "int8"), help="of the KV")
    p.add_argument("--threads", type=int, default=0, help="0: all usable cores")
    p.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    p.add_argument("--quality", action="store_true", help="also what int8 costs on smollm2: perplexity, greedy tokens")
    p.add_argument("--json", action="store_true")


def add_profile_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="smollm2", help="smollm2 (default), random:<shape>, a local folder or a hub id")
    p.add_argument("--device", default="auto", help="default: %(default)s")
    p.add_argument("--dtype", default="auto", help="default: %(default)s")
    p.add_argument("--num-sms", type=int, default=0, help="multiprocessors of the GPU to use (0: all)")
    p.add_argument("--cpu-threads", type=int, default=0, help="default: %(default)s")
    p.add_argument("--gpu-kv-tokens", type=int, default=16384, help="default: %(default)s")
    p.add_argument("--cpu-kv-tokens", type=int, default=32768, help="default: %(default)s")
    p.add_argument("--max-batched-tokens", type=int, default=2048, help="default: %(default)s")
    p.add_argument("--out", required=True, help="the file to write")


def run_profile(args: argparse.Namespace) -> int:
    """Measures the stage times of a model here, and says how far interpolation between them is off."""
    from neo_lite import bench, machine, profiler
    from neo_lite.api import load_model
    from neo_lite.config import EngineConfig
    from neo_lite.pipeline import Pipeline
    from neo_lite.timeline import Timeline

    bench.partition(args.num_sms)
    config = EngineConfig(
        gpu_kv_tokens=args.gpu_kv_tokens, cpu_kv_tokens=args.cpu_kv_tokens, cpu_threads=args.cpu_threads,
        max_batched_tokens=args.max_batched_tokens,
    )  # fmt: skip
    machine.check_writable("--out", args.out or ".")
    model = load_model(args.model, args.device, args.dtype)
    start_s = time.perf_counter()
    profile = profiler.measure(Pipeline(model, config, Timeline(enabled=False)), thorough=True)
    profile.save(Path(args.out))
    errors = profile.stamp["held_out"]
    print(f"{args.out}: {profile.model} in {profile.dtype} on {profile.source}, {profile.threads} threads")
    seconds, median = time.perf_counter() - start_s, errors.pop("all")
    print(f"measured in {seconds:.0f} s; median error at points held out: {median:.1%}")
    print("  " + ", ".join(f"{name} {error:.1%}" for name, error in errors.items()))
    return 0


def add_simulate_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--hardware", default="h200-8sm-14t",
                   help="a preset (an unknown one lists them), here, or a profile's file; default: %(default)s")  # fmt: skip
    p.add_argument("--model", default="llama-3.1-8b", help="the shape of a model: " + ", ".join(MODELS))
    p.add_argument("--dtype", default="auto", help="auto (a profile's own, else float16), float16, bfloat16, float32")
    p.add_argument("--policy", default="neo", help=f"{', '.join(MODES)} (default: neo)")
    p.add_argument(
        "--workload", default="synthetic:1000,200", help="default: %(default)s; osc, azure-code, trace:FILE.csv"
    )
    p.add_argument("--rate", type=float, default=float("inf"), help="requests a second (default: all at once)")
    p.add_argument("--requests", type=int, default=300, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--gpu-kv-tokens", type=int, default=0, help="0: what the card holds beside weights and activations")
    p.add_argument("--cpu-kv-gib", type=float, default=0.0, help="0: half of the host's memory")
    p.add_argument("--max-batched-tokens", type=int, default=2048, help="default: %(default)s")
    p.add_argument("--max-seqs", type=int, default=512, help="default: %(default)s")
    p.add_argument("--trace", default="", help="write a Chrome/Perfetto trace of a few iterations to this file")
    p.add_argument("--json", action="store_true")


def run_simulate(args: argparse.Namespace) -> int:
    """The same engine and scheduler on a virtual clock: no GPU, no weights."""
    from tqdm import tqdm

    from neo_lite import hardware, machine, simulator, workload
    from neo_lite.cost_model import Profile

    if args.dtype == "auto":
        args.dtype = (Path(args.hardware).is_file() and Profile.load(args.hardware).dtype) or "float16"
    model, costs, config = hardware.setting(
        args.hardware, args.model, args.dtype, args.gpu_kv_tokens, args.cpu_kv_gib,
        mode=args.policy, max_batched_tokens=args.max_batched_tokens, max_seqs=args.max_seqs,
    )  # fmt: skip
    arrivals = workload.parse(args.workload, args.requests, args.rate, args.seed)
    machine.check_writable("--trace", args.trace)
    with tqdm(total=len(arrivals), unit=" requests", delay=2, leave=False) as bar:
        result = simulator.simulate(model, costs, config, arrivals, progress=lambda done: bar.update(done - bar.n))
    if args.trace:
        middle = len(result.iterations) // 2
        Path(args.trace).write_text(json.dumps(result.timeline(middle, middle + 24).chrome_trace()))
    row = {
        "command": machine.command_line("simulate", args), "source": "simulated", "hardware": args.hardware,
        "stage_times": costs.source, "model": model.name, "dtype": args.dtype, "policy": args.policy, "workload": args.workload,
        "lengths": workload.source(args.workload), "rate_per_s": args.rate if args.rate < float("inf") else None,
        "seed": args.seed, "gpu_kv_tokens": config.gpu_kv_tokens, "cpu_kv_tokens": config.cpu_kv_tokens, **result.summary(),
    }  # fmt: skip
    print(json.dumps(row) if args.json else "\n".join(f"{k:24}{v}" for k, v in row.items()))
    return 0


def add_figures_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("names", nargs="*", help="such as 6c 10a (default: all; an unknown one lists them)")
    p.add_argument("--source", default="recorded", choices=("simulated", "recorded", "measured"),
                   help="beside the paper's points: simulated ones, recorded too, measured here too")  # fmt: skip
    p.add_argument("--out", default="out/figures", help="the folder for .svg and .png")
    p.add_argument("--fresh", action="store_true", help="simulate again what the figures show, on all cores")


def run_figures(args: argparse.Namespace) -> int:
    from neo_lite import figures

    return figures.main(args)


def run_kernel_bench(args: argparse.Namespace) -> int:
    from neo_lite import kernel_bench

    return kernel_bench.main(args)


def run_bench(args: argparse.Namespace) -> int:
    from neo_lite import bench, launch

    return launch.run(args, bench.main)


def _generate_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="smollm2", help="smollm2 (default), random:<shape>, a local folder or a hub id")
    p.add_argument("--prompt", required=True)
    p.add_argument("--max-tokens", type=int, default=48, help="default: %(default)s")
    p.add_argument("--mode", default="gpu-only", help=f"{', '.join(MODES)} (default: gpu-only)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda")
    p.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    p.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    p.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--gpu-kv-tokens", type=int, default=8192, help="default: %(default)s")
    p.add_argument("--cpu-kv-tokens", type=int, default=8192, help="default: %(default)s")
    p.add_argument("--cpu-threads", type=int, default=0, help="threads of the CPU kernel (0: all usable cores)")
    p.add_argument("--json", action="store_true", help="one object: text, tokens, timings")
    p.set_defaults(command=run_generate)


def run_env(args: argparse.Namespace) -> int:
    from neo_lite import machine

    report = machine.env_report()
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        machine.print_env(report)
    return 0


def run_generate(args: argparse.Namespace) -> int:
    from neo_lite import launch

    return launch.run(args, generate)


def generate(args: argparse.Namespace, ranks: Any = None) -> int:
    """Streams the text of one prompt; with --json prints one object at the end instead."""
    from neo_lite.api import build_engine, load_model
    from neo_lite.config import EngineConfig
    from neo_lite.neo import POLICIES, Neo

    start_s = time.perf_counter()
    config = EngineConfig(
        mode=args.mode, gpu_kv_tokens=args.gpu_kv_tokens, cpu_kv_tokens=args.cpu_kv_tokens, cpu_threads=args.cpu_threads
    )
    check_text(args.prompt)
    sampling = SamplingParams(args.max_tokens, args.temperature, args.top_p, args.seed)
    model = load_model(args.model, args.device, args.dtype, ranks)
    if issubclass(POLICIES[args.mode], Neo):
        print("neo_lite: measuring the stage times that this mode weighs (seconds to half a minute)", file=sys.stderr)
    engine = build_engine(model, config)
    request = engine.add(model.tokenizer.encode(args.prompt), sampling)
    load_s = time.perf_counter() - start_s
    text = _stream(engine, request, model.tokenizer, quiet=args.json)
    if args.json:
        print(json.dumps(_result(args, model, request, text, load_s), allow_nan=False))
    return 0


def check_text(prompt: str) -> None:
    if not prompt:
        raise NeoLiteError("the prompt is empty: give --prompt some text")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise NeoLiteError(f"the prompt {prompt!r} is not UTF-8: write it in UTF-8") from None


def _stream(engine: Any, request: Request, tokenizer: Any, quiet: bool) -> str:
    """Prints text as it becomes certain: a character whose bytes are not all there yet waits for its next token."""
    shown, tokens = "", []
    for token in engine.stream(request):
        tokens.append(token)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not quiet and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if not quiet:
        print(text[len(shown) :])
    return text


def _result(args: argparse.Namespace, model: Any, request: Request, text: str, load_s: float) -> dict[str, Any]:
    from neo_lite import metrics

    tpot_s = metrics.tpot_s(request) if len(request.output) > 1 else None
    return {
        "text": text, "tokens": request.output, "prompt_tokens": len(request.prompt), "finish_reason": request.finish_reason,
        "mode": args.mode, "model": args.model, "source": model.source, "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "timings": {"load_s": load_s, "ttft_s": metrics.ttft_s(request), "tpot_s": tpot_s},
    }  # fmt: skip


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"neo_lite: {message}\n"
    sys.exit(main())
