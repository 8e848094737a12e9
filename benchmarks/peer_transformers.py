"""Figure 10b's other side: GPU-only serving here against transformers' own continuous batching, in one run on one machine.

    python benchmarks/peer_transformers.py --model random:llama-3.1-8b --out data/recorded

Both serve the same prompts of random tokens, the same number of output tokens for all (`generate_batch` takes one), the
same KV pool, weights of the same shape, greedy, one after the other in one process. On the whole card: `generate_batch` works
in a thread of its own, to which a part of the GPU (`--num-sms` elsewhere) does not extend. Without the flash-attn package it
attends by SDPA, to the KV of all requests at once under a mask, and is much slower. Writes peer_<card>_<model>.json; a
result of `vllm bench throughput --output-json FILE` on the same machine is added by --vllm-json FILE.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from neo_lite import bench, machine, workload
from neo_lite.api import build_engine, load_model
from neo_lite.config import ModelConfig
from neo_lite.workload import Arrival, random_prompt

PAGE = 256  # transformers' default, below which its cache is slow


def ours(
    args: argparse.Namespace, arrivals: list[Arrival]
) -> tuple[ModelConfig, torch.device, torch.dtype, list[float]]:
    """Seconds of each repeat of this project's engine, SwiftLLM's scheduling; and what the peer has to be like."""
    model = load_model(args.model, args.device, args.dtype)
    engine = build_engine(model, mode="gpu-only-unchunked", gpu_kv_tokens=args.gpu_kv_tokens, cpu_kv_tokens=16,
                          max_batched_tokens=args.max_batched_tokens, max_seqs=512)  # fmt: skip
    bench.serve(engine, [replace(a, output_tokens=min(a.output_tokens, 8)) for a in arrivals[:4]], args.seed)
    seconds = [bench.serve(engine, arrivals, args.seed).seconds for _ in range(args.repeats)]
    return model.config, model.device, model.dtype, seconds


def peer(c: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """The same shape in transformers, random weights."""
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_position, tie_word_embeddings=c.tie_word_embeddings,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def theirs(model: Any, args: argparse.Namespace, arrivals: list[Arrival]) -> list[float]:
    """Seconds of each repeat of `generate_batch`, its own warm-up left out by a run before."""
    prompts = [list(random_prompt(a, model.config.vocab_size, args.seed + i)) for i, a in enumerate(arrivals)]
    names = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
    options = {"num_blocks": -(-args.gpu_kv_tokens // PAGE), "max_batch_tokens": args.max_batched_tokens}
    options["page_size" if "page_size" in names else "block_size"] = PAGE  # its name up to transformers 5.17
    greedy = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}

    def generate(inputs: list[list[int]], tokens: int) -> float:
        start_s = time.perf_counter()
        done = model.generate_batch(
            inputs=inputs, generation_config=transformers.GenerationConfig(max_new_tokens=tokens, **greedy),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**options),
        )  # fmt: skip
        seconds = time.perf_counter() - start_s
        lengths = {len(answer.generated_tokens) for answer in done.values()}
        assert len(done) == len(inputs) and lengths == {tokens}, f"{len(done)} answers of {lengths} tokens"
        return seconds

    generate(prompts[:4], 8)
    return [generate(prompts, arrivals[0].output_tokens) for _ in range(args.repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workload", default="synthetic:1000,200")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--gpu-kv-tokens", type=int, default=26400)
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vllm-json", type=Path, help="what `vllm bench throughput --output-json` wrote on this machine"
    )
    parser.add_argument("--out", type=Path, default=Path("data/recorded"))
    args = parser.parse_args()
    drawn = workload.parse(args.workload, args.requests, seed=args.seed)
    tokens = round(statistics.mean(a.output_tokens for a in drawn))
    arrivals = [replace(a, output_tokens=tokens) for a in drawn]
    config, device, dtype, seconds = ours(args, arrivals)
    gc.collect()
    runs = {f"transformers {metadata.version('transformers')}": theirs(peer(config, device, dtype), args, arrivals)}
    per_s = {name: args.requests / statistics.median(times) for name, times in runs.items()}
    if args.vllm_json:
        per_s["vLLM"] = json.loads(args.vllm_json.read_text())["requests_per_second"]
    stamp = machine.stamp()
    result = {
        "what": "GPU-only serving over a peer's, the same prompts and outputs, the same KV pool", "command": command(args),
        "source": "recorded", "stamp": stamp, "model": args.model, "dtype": str(dtype)[6:], "mode": "gpu-only-unchunked",
        "ran_on": bench.ran_on(device, stamp, 0), "workload": args.workload, "requests": args.requests,
        "output_tokens": tokens, "gpu_kv_tokens": args.gpu_kv_tokens, "max_batched_tokens": args.max_batched_tokens,
        "page_size": PAGE, "seed": args.seed, "warm_up_requests": 4, "repeats": args.repeats, "seconds": seconds,
        "peers_seconds": runs, "requests_per_s": args.requests / statistics.median(seconds), "peers_per_s": per_s,
    }  # fmt: skip
    card = torch.cuda.get_device_name().split()[-1].lower() if device.type == "cuda" else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"peer_{card}_{config.name}.json"
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(f"wrote {path}: {result['requests_per_s']:.3g} requests/s here, {per_s}")


def command(args: argparse.Namespace) -> str:
    options = (f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if k not in ("out", "vllm_json"))
    return "python benchmarks/peer_transformers.py " + " ".join(options)


if __name__ == "__main__":
    main()
