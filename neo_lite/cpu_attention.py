"""Decode attention on the CPU: a rung of `kernels/`, compiled for one shape, and how it is called.

One build for each (head_dim, group, block size, dtypes), made on first use (`kernel_build`); nothing is compiled at import.
`attention` calls a `Kernel` directly on a machine without CUDA; `pipeline` gives its `entry_point` and `args` to a node
on a CUDA stream. ctypes releases the GIL while a kernel runs. The arguments are described in `kernels/attention.h`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neo_lite.config import DTYPE_BYTES, NeoLiteError
from neo_lite.kernel_build import KERNELS_DIR, build_library
from neo_lite.kernel_build import CompilerMissing as CompilerMissing  # raised by `load_kernel`: its callers' to import
from neo_lite.machine import usable_cores

RUNGS = ("scalar", "openmp", "simd", "flash")  # of the ladder, each faster than the one before
DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
TENSORS = ("q", "k_new", "v_new", "k_cache", "v_cache", "k_scale", "v_scale", "block_table", "seq_lens", "out")


@dataclass(frozen=True)
class KernelSpec:
    """What a build is specialised for. `rung`: a file of `kernels/` by its stem, or the path of your own .cpp."""

    head_dim: int
    group: int  # query heads that share a KV head
    block_size: int
    dtype: str  # of q, k_new, v_new and out: float32, float16, bfloat16
    kv_dtype: str | None = None  # of the caches: None (as `dtype`) or int8
    rung: str = "flash"

    def __post_init__(self) -> None:
        if self.head_dim < 8 or self.head_dim % 8:
            raise NeoLiteError(f"head_dim {self.head_dim} has no CPU kernel: use a multiple of 8")
        if self.group < 1 or self.block_size < 1:
            raise NeoLiteError(f"group {self.group} and block_size {self.block_size}: both must be at least 1")
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise NeoLiteError(f"dtype {self.dtype!r} has no CPU kernel: use float32, float16 or bfloat16")
        if self.kv_dtype not in (None, self.dtype, "int8"):
            raise NeoLiteError(f"kv_dtype {self.kv_dtype!r} beside dtype {self.dtype}: use None or 'int8'")
        if self.source.suffix != ".cpp" or not self.source.is_file():
            raise NeoLiteError(f"rung {self.rung!r} is unknown: use {', '.join(RUNGS)}, or the path of a .cpp file")

    @property
    def source(self) -> Path:
        return Path(self.rung).resolve() if self.rung.endswith(".cpp") else KERNELS_DIR / f"{self.rung}.cpp"

    @property
    def defines(self) -> list[str]:
        numbers = [f"-DHEAD_DIM={self.head_dim}", f"-DGROUP={self.group}", f"-DBLOCK_SIZE={self.block_size}"]
        return [*numbers, f"-DDTYPE_{self.dtype.upper()}", *(["-DKV_INT8"] if self.kv_dtype == "int8" else [])]


class AttentionArgs(ctypes.Structure):
    """The struct of `kernels/attention.h`. `tensors` keeps alive what it points at."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int32) for name in ("batch", "q_heads", "kv_heads", "table_width", "num_threads")),
        ("q_stride", ctypes.c_int32), ("new_stride", ctypes.c_int32),
        ("scale", ctypes.c_float), ("start_s", ctypes.c_double), ("end_s", ctypes.c_double),
    ]  # fmt: skip
    tensors: tuple[torch.Tensor | None, ...]


class Kernel:
    """A loaded build. Call it with tensors, or hand `entry_point` and `args(...)` to a CUDA stream."""

    def __init__(self, spec: KernelSpec, build: Path) -> None:
        self.spec, self.build = spec, build
        self._library = ctypes.CDLL(str(build / "library.so"))
        self._run, self._check = self._library.neo_attention, self._library.neo_check
        self._run.argtypes, self._run.restype = [ctypes.c_void_p], None
        self._check.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.neo_isa.restype = ctypes.c_char_p
        if self._library.neo_args_size() != ctypes.sizeof(AttentionArgs) or not hasattr(self._library, "neo_calls"):
            raise NeoLiteError(f"{spec.source}: its attention.h is not neo_lite's; take over kernels/attention.h")
        self.entry_point: int = ctypes.cast(self._run, ctypes.c_void_p).value or 0
        self.calls_entry_point: int = ctypes.cast(self._library.neo_calls, ctypes.c_void_p).value or 0
        self.isa: str = self._library.neo_isa().decode()
        self.last_s = (0.0, 0.0)  # start and end of the last call, by the kernel's clock (time.perf_counter's on Linux)
        own, kv, ints = DTYPES[spec.dtype], DTYPES[spec.kv_dtype or spec.dtype], torch.int32
        scales = torch.float16 if kv == torch.int8 else None  # None: not to be given
        self._dtypes = (own, own, own, kv, kv, scales, scales, ints, ints, own)  # of TENSORS

    @property
    def description(self) -> str:
        about = json.loads((self.build / "build.json").read_text())
        threads = "OpenMP" if about["link"] else "one thread: no OpenMP found"
        return f"{self.spec.source.name}, {self.isa}, {threads}, {' '.join(about['flags'])}"

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                 seq_lens: torch.Tensor, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:  # fmt: skip
        """Attention of one new token per sequence; arguments as in `args`. Returns `out`."""
        out = torch.empty_like(q) if out is None else out
        self.run(self.args(q, k_cache, v_cache, block_table, seq_lens, out, **options))
        return out

    def run(self, args: AttentionArgs) -> None:
        """One call with arguments made before."""
        self._run(ctypes.byref(args))
        self.last_s = (args.start_s, args.end_s)

    def args(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
             seq_lens: torch.Tensor, out: torch.Tensor, *, scale: float | None = None, num_threads: int = 0,
             k_new: torch.Tensor | None = None, v_new: torch.Tensor | None = None,
             k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None) -> AttentionArgs:  # fmt: skip
        """Validated arguments; a NeoLiteError names the one that is wrong.

        q, out [batch, q_heads, head_dim]; k_new, v_new [batch, kv_heads, head_dim]: stored at seq_len - 1 first (the rows of
        q, and of both of these, may lie apart, as in the fused projection);
        caches [num_blocks, kv_heads, block_size, head_dim], scales (int8 only, fp16) the same without head_dim;
        block_table [batch, width] and seq_lens [batch] int32. num_threads 0: OMP_NUM_THREADS, else all usable cores.
        """
        tensors = (q, k_new, v_new, k_cache, v_cache, k_scale, v_scale, block_table, seq_lens, out)
        try:
            (batch, q_heads, head_dim), (blocks, kv_heads, _, _), (_, width) = q.shape, k_cache.shape, block_table.shape
        except (AttributeError, ValueError):  # None, or another number of dimensions
            message = "q must be [batch, q_heads, head_dim], k_cache have 4 dimensions and block_table 2"
            raise NeoLiteError(message) from None
        self._validate(tensors, batch, blocks, kv_heads, width)
        args = AttentionArgs(
            *[None if t is None else t.data_ptr() for t in tensors], batch, q_heads, kv_heads, width,
            num_threads or _default_threads(), q.stride(0), 0 if k_new is None else k_new.stride(0),
            head_dim**-0.5 if scale is None else scale,
        )  # fmt: skip
        args.tensors = tensors
        self.check(args)
        return args

    def check(self, args: AttentionArgs) -> None:
        """Whether the lengths and the blocks of each sequence are sound, as they are now; raises NeoLiteError where not."""
        _, _, _, k_cache, *_ = args.tensors
        assert k_cache is not None
        wrong = self._check(ctypes.byref(args), k_cache.shape[0])
        if wrong:
            raise self._wrong_sequence(abs(wrong) - 1, wrong > 0, args)

    def _validate(
        self, tensors: tuple[torch.Tensor | None, ...], batch: int, blocks: int, kv_heads: int, width: int
    ) -> None:
        """Every tensor in its shape and dtype, those of an option only with it. In the way of every call: 3 us."""
        spec = self.spec
        queries, news = (batch, kv_heads * spec.group, spec.head_dim), (batch, kv_heads, spec.head_dim)
        cache, scales = (blocks, kv_heads, spec.block_size, spec.head_dim), (blocks, kv_heads, spec.block_size)
        shapes = (queries, news, news, cache, cache, scales, scales, (batch, width), (batch,), queries)
        no_news = tensors[1] is None and tensors[2] is None
        for name, tensor, shape, dtype in zip(TENSORS, tensors, shapes, self._dtypes):
            if tensor is None:
                if dtype is not None and not (no_news and shape is news):
                    raise NeoLiteError(f"{name} is missing: give a {str(dtype)[6:]} tensor of shape {list(shape)}")
            elif dtype is None:
                raise NeoLiteError(f"{name} is given, but the cache is {spec.dtype}: only int8 has scales")
            elif tensor.shape != shape or tensor.dtype is not dtype or not _lies_well(name, tensor) or tensor.is_cuda:
                raise _wrong_tensor(name, tensor, shape, dtype)
        if batch > 1 and not no_news and tensors[1].stride(0) != tensors[2].stride(0):  # type: ignore[union-attr]
            raise NeoLiteError(
                "k_new and v_new have rows of different strides: take both from one tensor, or copy both"
            )

    def _wrong_sequence(self, b: int, length: bool, args: AttentionArgs) -> NeoLiteError:
        """The message for what neo_check found in sequence b."""
        _, _, _, k_cache, _, _, _, block_table, seq_lens, _ = args.tensors
        assert k_cache is not None and block_table is not None and seq_lens is not None
        if length:
            room = args.table_width * self.spec.block_size
            return NeoLiteError(f"seq_lens[{b}] is {int(seq_lens[b])}: block_table has room for 0 to {room} tokens")
        used = block_table[b, : -(-int(seq_lens[b]) // self.spec.block_size)].tolist()
        bad = next(block for block in used if not 0 <= block < k_cache.shape[0])
        return NeoLiteError(f"block_table[{b}] holds block {bad}: k_cache has blocks 0 to {k_cache.shape[0] - 1}")


def _lies_well(name: str, tensor: torch.Tensor) -> bool:
    """Contiguous; but what the fused projection gives, only within each sequence's row."""
    return tensor.is_contiguous() or (
        name in ("q", "k_new", "v_new") and tensor[0].is_contiguous() and tensor.stride(0) > 0
    )


def _wrong_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> NeoLiteError:
    if tensor.shape != shape:
        return NeoLiteError(f"{name} has shape {list(tensor.shape)}: it must be {list(shape)}")
    if tensor.dtype != dtype:
        return NeoLiteError(f"{name} is {str(tensor.dtype)[6:]}: this kernel was built for {str(dtype)[6:]}")
    if not _lies_well(name, tensor):
        return NeoLiteError(f"{name} has strides {list(tensor.stride())}: it must be contiguous; call .contiguous()")
    return NeoLiteError(f"{name} is on {tensor.device}: the CPU kernel needs it in host memory")


@functools.cache
def _default_threads() -> int:
    """OMP_NUM_THREADS where it is set, as for torch (parallel tests and ranks share the cores), else all usable cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked), usable_cores()) if asked.isdigit() and int(asked) else usable_cores()


@functools.cache
def _load(spec: KernelSpec, _text: str) -> Kernel:
    return Kernel(spec, build_library(spec.source, spec.defines))


def load_kernel(spec: KernelSpec) -> Kernel:
    """The kernel for a shape: from memory, from the cache, or compiled now. CompilerMissing where it can't be built."""
    return _load(spec, spec.source.read_text() if spec.rung.endswith(".cpp") else "")
