"""Machines as rooflines, from data/hardware.json: every number with its source, achievable rates, not peaks. Torch-free.

Calibrated only against datasheets, measurements and the paper's GPU-only curves, never against NEO's. `find` gives a preset
by its name, `costs_of` the cost model of a model on it: a shipped profile where somebody measured one, else the roofline.
Called by `python -m neo_lite simulate`, the notebooks and the explorer.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from neo_lite import machine
from neo_lite.config import DTYPE_BYTES, MAX_SIZE, MODELS, EngineConfig, HardwareSpec, ModelConfig, NeoLiteError
from neo_lite.cost_model import Curve, Profile

Part = Mapping[str, tuple[float, str]]  # field -> its value and where that comes from
_HERE = Path(__file__).parent
DATA_DIR = (_HERE if (_HERE / "data").is_dir() else _HERE.parent) / "data"


def _spec(name: str, *parts: Part) -> HardwareSpec:
    merged = {key: value for part in (_FILE["parts"]["common"], *parts) for key, value in part.items()}
    values: dict[str, Any] = {key: value for key, (value, _) in merged.items()}
    return HardwareSpec(name, **values, sources={key: source for key, (_, source) in merged.items()})


_FILE = json.loads((DATA_DIR / "hardware.json").read_text())
HARDWARE: Mapping[str, HardwareSpec] = {
    name: _spec(name, *(_FILE["parts"][part] for part in parts)) for name, parts in _FILE["presets"].items()
}


def find(name: str) -> HardwareSpec:
    """A preset, or `here`: the machine at hand, measured now. Raises NeoLiteError."""
    if name != "here" and name not in HARDWARE:
        known = f"here, the file of a profile, or {', '.join(HARDWARE)}"
        raise NeoLiteError(f"hardware {name!r} is unknown: choose {known}")
    return here() if name == "here" else HARDWARE[name]


def costs_of(spec: HardwareSpec, model: ModelConfig, dtype: str = "float16") -> Profile:
    """Of a model on a machine: the profile shipped for the two if there is one, else the roofline."""
    path = DATA_DIR / "profiles" / f"{spec.name}_{model.name}_{dtype}.json"
    return Profile.load(path) if path.exists() else roofline(spec, model, dtype)


WIDTHS = sorted({round(2 ** (i / 4)) for i in range(4 * 17 + 1)})  # 1 to 131,072, four points an octave


def roofline(hardware: HardwareSpec, model: ModelConfig, dtype: str = "float16", ranks: int = 0) -> Profile:
    """The profile of a machine that nobody has measured, at points close enough to interpolate between.

    A stage takes ((bytes / bandwidth)^p + (FLOPs / rate)^p)^(1/p): p = infinity is the textbook's roofline, and
    `hardware.sharpness` what a GPU was seen to do near the ridge. Each of `ranks` (0: all GPUs) has its share of heads,
    columns and of the host's memory bandwidth, and a link of its own.
    """
    h, size, ranks = hardware, DTYPE_BYTES[dtype], ranks or hardware.num_gpus
    weights = model.layer_parameters / ranks
    kv_bytes = 2 * model.num_kv_heads * model.head_dim * size / ranks  # of one token in one layer
    head = model.vocab_size * model.hidden_size / ranks
    width = model.num_heads * model.head_dim / ranks

    def time_s(num_bytes: float, flops: float) -> float:
        p = h.sharpness
        return ((num_bytes / h.gpu_bytes_per_s) ** p + (flops / h.gpu_flops_per_s) ** p) ** (1 / p)

    def all_reduce_s(n: int) -> float:
        return 2 * (h.all_reduce_s + n * model.hidden_size * size / h.all_reduce_bytes_per_s) if ranks > 1 else 0.0

    cpu_bytes_per_s, link = h.cpu_bytes_per_s / ranks, h.link_bytes_per_s
    return Profile(
        model.num_layers,
        linear=Curve([(n, time_s(weights * size, 2 * weights * n)) for n in WIDTHS]),
        prefill_attn=Curve([(n, 2 * width * n * n / h.gpu_flops_per_s + h.kernel_s) for n in WIDTHS]),
        gpu_attn=Curve([(n, n * kv_bytes / h.gpu_attn_bytes_per_s + h.kernel_s) for n in WIDTHS]),
        cpu_attn=Curve([(n, n * kv_bytes / cpu_bytes_per_s + h.cpu_dispatch_s) for n in WIDTHS]),
        head=Curve([(n, time_s(head * size, 2 * head * n)) for n in WIDTHS[:45]]),
        transfer=Curve([(1.0, 0.0), (link * ranks, 1.0)]), all_reduce=Curve([(n, all_reduce_s(n)) for n in WIDTHS]),
        cpu_request_tokens=2 * width * size / link * cpu_bytes_per_s / kv_bytes, overhead_s=h.overhead_s,
        model=model.name, dtype=dtype, threads=h.cpu_threads, stamp={"hardware": h.name, **asdict(h)},
    )  # fmt: skip


def gpu_kv_tokens(spec: HardwareSpec, model: ModelConfig, dtype: str, max_batched_tokens: int) -> int:
    """What the card holds beside weights and activations, as vLLM counts: nine tenths of it, less 256 MiB for CUDA.

    The paper's cards: 864 tokens of Llama-2-7B on a T4, 26,400 of Llama-3.1-8B on an A10G.
    """
    rows = 2 * model.intermediate_size + 4 * model.hidden_size  # numbers alive at the widest point of a layer
    activations, weights = max_batched_tokens * rows * 2 + 2**28, model.weight_bytes(dtype)
    free = 0.9 * spec.gpu_memory_bytes - activations - weights / spec.num_gpus
    tokens = int(spec.num_gpus * free / model.kv_bytes_per_token(dtype))
    if tokens < 16:
        holds = f"{spec.name} holds {spec.num_gpus * spec.gpu_memory_bytes / 2**30:.1f} GiB"
        needs = f"{model.name} in {dtype} needs {weights / 2**30:.1f} GiB and {activations / 2**30:.1f} GiB to work in"
        raise NeoLiteError(f"{holds} and {needs}: choose a larger card or a smaller model")
    return tokens


def setting(
    name: str, model: str, dtype: str = "float16", gpu_kv: int = 0, cpu_kv_gib: float = 0.0, **config: Any
) -> tuple[ModelConfig, Profile, EngineConfig]:  # fmt: skip
    """What the simulator takes, from names: a preset or a profile's file, a model's shape, settings of `EngineConfig`.

    0 for a pool: what the card holds beside weights and activations, and half of the host's memory.
    """
    shape = MODELS.get(model.removeprefix("random:"))
    if shape is None:
        raise NeoLiteError(f"model {model!r} is unknown: choose one of {', '.join(MODELS)}")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise NeoLiteError(f"dtype {dtype!r} is unknown: choose float16, bfloat16 or float32")
    if not 0 <= cpu_kv_gib < 2**40:  # nan, too
        raise NeoLiteError(f"cpu_kv_gib is {cpu_kv_gib}: give GiB above 0, or 0 for half of the host's memory")
    cpu_bytes = cpu_kv_gib * 2**30
    if Path(name).is_file():
        costs = Profile.load(name).check(shape.name, dtype)
        if not gpu_kv or not cpu_bytes:
            raise NeoLiteError(f"{name} says nothing of memory: give --gpu-kv-tokens and --cpu-kv-gib")
    else:
        spec = find(name)
        costs = costs_of(spec, shape, dtype)
        most = gpu_kv_tokens(spec, shape, dtype, config.get("max_batched_tokens", EngineConfig.max_batched_tokens))
        half = min(spec.cpu_memory_bytes / 2, MAX_SIZE * shape.kv_bytes_per_token(dtype))
        gpu_kv, cpu_bytes = gpu_kv or min(most, MAX_SIZE), cpu_bytes or half
    cpu_kv_tokens = int(cpu_bytes / shape.kv_bytes_per_token(dtype))
    return shape, costs, EngineConfig(gpu_kv_tokens=gpu_kv, cpu_kv_tokens=cpu_kv_tokens, **config)


# ---- The machine at hand ----


def here() -> HardwareSpec:
    """This machine, measured in about two seconds: a CPU takes the place of the GPU where there is none."""
    gb_per_s = machine.measure_read_bandwidth()["gb_per_s"]
    read = gb_per_s * 1e9 if gb_per_s else _numpy_read_bytes_per_s()
    host: Part = {
        "cpu_bytes_per_s": (read, "streaming read, measured now"),
        "cpu_memory_bytes": (machine.available_memory_bytes(), "available now"),
        "cpu_threads": (machine.usable_cores(), "usable cores"),
    }
    return _spec("here", _gpu_here() or _cpu_as_gpu(read), host)


def _gpu_here() -> Part | None:
    torch, card = machine._torch(), machine.gpu()
    if card is None:
        return None
    sync = torch.cuda.synchronize
    a = torch.empty(4096, 4096, dtype=torch.float16, device="cuda").normal_()
    big, pinned = torch.empty(2**28, dtype=torch.float32, device="cuda"), torch.empty(2**26, pin_memory=True)
    copy = 2 * big.nbytes / _best_s(lambda: (big.clone(), sync()))
    return {
        "gpu_bytes_per_s": (copy, "a copy of 1 GiB, measured now"),
        "gpu_flops_per_s": (2 * 4096**3 / _best_s(lambda: (a @ a, sync())), "torch fp16 matmul at 4096, measured now"),
        "gpu_attn_bytes_per_s": (0.59 * copy, _FILE["parts"]["t4"]["gpu_attn_bytes_per_s"][1]),
        "gpu_memory_bytes": (card["memory_bytes"], "torch.cuda"),
        "link_bytes_per_s": (pinned.nbytes / _best_s(lambda: (pinned.cuda(), sync())), "a pinned copy, measured now"),
    }


def _cpu_as_gpu(read: float) -> Part:
    a = np.ones((1024, 1024), dtype=np.float32)
    flops_per_s = 2 * 1024**3 / _best_s(lambda: a @ a)
    return {
        "gpu_bytes_per_s": (read, "no GPU here: the CPU's streaming read"),
        "gpu_flops_per_s": (flops_per_s, "no GPU here: numpy fp32 matmul at 1024, measured now"),
        "gpu_attn_bytes_per_s": (read, "no GPU here: the CPU's streaming read"),
        "gpu_memory_bytes": (machine.available_memory_bytes() / 2, "no GPU here: half of the available memory"),
        "link_bytes_per_s": (read / 2, "no GPU here: a copy reads and writes"),
    }


def _numpy_read_bytes_per_s() -> float:
    buffer = np.ones(2**26, dtype=np.float32)
    return buffer.nbytes / _best_s(buffer.sum)


def _best_s(work: Callable[[], object]) -> float:
    """The fastest of four runs, the first to warm up."""
    return min(timeit.repeat(work, number=1, repeat=4)[1:])
