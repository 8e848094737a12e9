"""The shapes everything else is computed from: a model, an engine, a machine.

Frozen, torch-free and first in reading order: the scheduler, the simulator and the notebooks use these objects
where no torch is installed. Who calls it: everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
MODES = (
    "gpu-only", "gpu-only-unchunked", "simple", "symmetric", "asymmetric", "fastdecode+", "neo", "neo-released"
)  # fmt: skip


MAX_THREADS = 1024
MAX_SIZE = 2**30  # of a pool, in tokens: a list of free blocks has one entry for each


class NeoLiteError(ValueError):
    """A mistake that its reader can mend: one line that names the value and the remedy."""


def is_int(value: object) -> bool:
    """A whole number, numpy's too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1's long-context RoPE: low frequencies are divided by `factor`, high ones kept, the rest blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama. `head_dim` is its own number: not every Llama has hidden_size / num_heads."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (1: multi-head attention; more: GQA)."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_parameters(self) -> int:
        """Numbers in one layer's matrices (norms and biases, a thousandth of them, left out)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.layer_parameters + embeddings

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """K and V of one token over all layers: 2 x layers x kv_heads x head_dim x bytes (0.5 MiB for Llama-2-7B fp16)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


_LLAMA31: dict[str, Any] = dict(
    rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192), max_position=131072, vocab_size=128256,
    head_dim=128, num_kv_heads=8,
)  # fmt: skip
MODELS: Mapping[str, ModelConfig] = {  # exact shapes, for random weights, the cost model and the simulator
    m.name: m
    for m in (
        ModelConfig("tiny", 2, 64, 4, 2, 16, 160, 512),
        ModelConfig("smollm2", 30, 576, 9, 3, 64, 1536, 49152, 8192, rope_theta=100000.0, tie_word_embeddings=True,
                    bos_token_id=1, eos_token_ids=(2,)),
        ModelConfig("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
        ModelConfig("llama-3.1-8b", 32, 4096, 32, intermediate_size=14336, **_LLAMA31),
        ModelConfig("llama-3.1-70b", 80, 8192, 64, intermediate_size=28672, **_LLAMA31),
    )
}  # fmt: skip


@dataclass(frozen=True)
class HardwareSpec:
    """A machine as a roofline sees it. `sources` says, for every number, where it comes from.

    With `num_gpus`, GPU rates, memory and links are those of each; the CPU's belong to all of them together.
    """

    name: str
    gpu_bytes_per_s: float  # what linear layers read
    gpu_flops_per_s: float  # what matrix products of the model's dtype reach
    gpu_attn_bytes_per_s: float  # what paged decode attention reads
    gpu_memory_bytes: float
    cpu_bytes_per_s: float  # what the CPU kernel reads
    cpu_memory_bytes: float
    cpu_threads: int
    link_bytes_per_s: float  # between host and GPU, one way
    num_gpus: int = 1
    sharpness: float = 1.2  # of the ridge: see cost_model.roofline
    kernel_s: float = 1e-5  # the least a GPU kernel takes
    cpu_dispatch_s: float = 8.2e-5  # copy, host node and copy with nothing in them
    overhead_s: float = 2e-3  # of an iteration: planning, launching, sampling
    all_reduce_bytes_per_s: float = 1e11
    all_reduce_s: float = 1.5e-5
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("name", "sources") and not (is_number(value) and 0 < value < float("inf")):
                raise NeoLiteError(f"{self.name}: {f.name} is {value!r}: give a number above 0")


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs. Pools are counted in tokens (rounded down to whole blocks)."""

    mode: str = "gpu-only"
    cpu_kv_dtype: str = "auto"  # of the CPU pool: auto (the model's) or int8
    block_size: int = 16  # tokens in a block
    gpu_kv_tokens: int = 8192
    cpu_kv_tokens: int = 32768
    max_batched_tokens: int = 2048  # tokens in one iteration's linear stage (bounds the activations)
    max_seqs: int = 256  # requests in one iteration
    cpu_threads: int = 0  # of the CPU kernel; 0: all usable cores

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise NeoLiteError(f"mode {self.mode!r} is unknown: choose one of {', '.join(MODES)}")
        if self.cpu_kv_dtype not in ("auto", "int8"):
            raise NeoLiteError(f"cpu_kv_dtype {self.cpu_kv_dtype!r} is unknown: choose auto or int8")
        for name in ("block_size", "gpu_kv_tokens", "cpu_kv_tokens", "max_batched_tokens", "max_seqs"):
            value = getattr(self, name)
            if not is_int(value) or not 1 <= value <= MAX_SIZE:
                raise NeoLiteError(f"{name} is {value!r}: give a whole number from 1 to {MAX_SIZE}")
            if name.endswith("kv_tokens") and value < self.block_size:
                raise NeoLiteError(f"{name} is {value}: it must hold at least one block (block_size {self.block_size})")
        if not is_int(self.cpu_threads) or not 0 <= self.cpu_threads <= MAX_THREADS:
            raise NeoLiteError(f"cpu_threads is {self.cpu_threads!r}: give 0 (all usable cores) to {MAX_THREADS}")

    @property
    def num_gpu_blocks(self) -> int:
        return self.gpu_kv_tokens // self.block_size

    @property
    def num_cpu_blocks(self) -> int:
        return self.cpu_kv_tokens // self.block_size
