"""Decode attention on the CPU: compiles a rung of `kernels/` for one shape, loads it and calls it.

One build for each (head_dim, group, block size, dtypes), made on first use and cached; nothing is compiled at import.
`attention` calls a `Kernel` directly on a machine without CUDA; `pipeline` gives its `entry_point` and `args` to a node
on a CUDA stream. ctypes releases the GIL while a kernel runs. The arguments are described in `kernels/attention.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neo_lite.config import DTYPE_BYTES, NeoLiteError
from neo_lite.machine import cache_folder, usable_cores

RUNGS = ("scalar", "openmp", "simd", "flash")  # of the ladder, each faster than the one before
DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
_HERE = Path(__file__).resolve().parent
KERNELS_DIR = _HERE / "kernels" if (_HERE / "kernels").is_dir() else _HERE.parent / "kernels"
_environment = threading.RLock()  # os.environ is one for all threads
_attempts = itertools.count()  # torch refuses to rebuild a name that it has seen


class CompilerMissing(NeoLiteError):
    """No kernel can be built here; the torch backend computes the same, slower."""


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
            raise NeoLiteError(
                f"rung {self.rung!r} is unknown: use one of {', '.join(RUNGS)}, or the path of a .cpp file"
            )

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
        *((name, ctypes.c_void_p) for name in ("q", "k_new", "v_new", "k_cache", "v_cache", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("block_table", "seq_lens", "out")),
        *((name, ctypes.c_int32) for name in ("batch", "q_heads", "kv_heads", "table_width", "num_threads")),
        ("scale", ctypes.c_float), ("start_s", ctypes.c_double), ("end_s", ctypes.c_double),
    ]  # fmt: skip
    tensors: tuple[torch.Tensor | None, ...]


# ---- Building ----
@functools.cache
def _compiler(cxx: str) -> str:
    """The version text of the compiler; CompilerMissing if there is none."""
    try:
        done = subprocess.run([*shlex.split(cxx), "--version"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        remedy = "install g++ (apt install g++, or conda's cxx-compiler) or set CXX"
        raise CompilerMissing(f"no C++ compiler: {cxx!r} does not run; {remedy}") from error
    return done.stdout


def _cxx() -> str:
    return os.environ.get("CXX") or "c++"


@functools.cache
def _cpu_flags() -> str:
    """What the processor can do: a build for one machine may die of illegal instructions on another."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    return platform.machine() + platform.processor()


def _openmp_library() -> Path | None:
    """The OpenMP runtime that torch has loaded: a second one would bring a second team of threads."""
    with contextlib.suppress(OSError):
        mapped = {
            line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line
        }
        for path in sorted(Path(name) for name in mapped):
            if path.name.startswith(("libgomp", "libiomp5")):  # libiomp5 has libgomp's entry points as well
                return path
    dylib = Path(torch.__file__).parent / "lib" / "libomp.dylib"
    return dylib if dylib.is_file() else None


def _openmp_flags() -> Iterator[tuple[list[str], list[str]]]:
    """Flags to compile and to link with, the best first (others where linking fails); with the last: one thread."""
    library, is_clang = _openmp_library(), "clang" in _compiler(_cxx())
    if library and (library.suffix == ".dylib" or not is_clang):
        link = [shlex.quote(str(library)), f"-Wl,-rpath,{shlex.quote(str(library.parent))}"]
        yield (["-Xpreprocessor", "-fopenmp"] if library.suffix == ".dylib" else ["-fopenmp"]), link
    if sys.platform != "darwin":
        yield ["-fopenmp"], ["-fopenmp"]
    yield [], []


def _flags(defines: Sequence[str]) -> list[str]:
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return ["-O3", tuned, *defines]


def _build_key(source: Path, defines: Sequence[str]) -> str:
    """Names a build by everything that its binary depends on."""
    sources = [source, *sorted(KERNELS_DIR.glob("*.h")), *sorted(source.parent.glob("*.h"))]
    parts = [torch.__version__, str(sys.implementation.cache_tag), platform.machine(), _compiler(_cxx()), _cpu_flags()]
    parts += [str(_flags(defines)), str(list(_openmp_flags())), *(path.read_text() for path in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that dies with its process: torch's own, a file, outlives a killed build and stops all later ones."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"neo_lite: waiting for another process that compiles this kernel ({path})", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _build_environment() -> Iterator[None]:
    """ninja on PATH even where only `.venv/bin/python` was called, and torch's opinion of compilers kept to itself."""
    changes = {"TORCH_DONT_CHECK_COMPILER_ABI": "1"}
    with contextlib.suppress(ImportError):
        import ninja

        changes["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])
    if not shutil.which("ninja", path=changes.get("PATH")):
        raise CompilerMissing("ninja is missing, which builds the CPU kernels: pip install ninja")
    with _environment:
        saved = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in saved.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value


def _run_build(source: Path, folder: Path, cflags: Sequence[str], ldflags: Sequence[str]) -> Path:
    """One compilation in an empty folder; the library's path."""
    # its warning that a CUDA toolkit has no GPU is no business of a CPU kernel
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils import cpp_extension

    name = f"neo_{source.stem}_{next(_attempts)}"
    with _build_environment():
        cpp_extension.load(
            name, [str(source)], extra_cflags=list(cflags), extra_ldflags=list(ldflags), with_cuda=False,
            extra_include_paths=[str(KERNELS_DIR)], build_directory=str(folder), is_python_module=False,
        )  # fmt: skip
    return folder / f"{name}.so"


def _compile(source: Path, defines: Sequence[str], folder: Path) -> None:
    """Builds into `folder`: library.so, and build.json last, whose presence says that the build is whole."""
    shutil.rmtree(folder, ignore_errors=True)  # what a killed build left, torch's lock file included
    folder.mkdir(parents=True)
    print(f"neo_lite: compiling {source.name} {' '.join(defines)} (once)", file=sys.stderr, flush=True)
    for cflags, ldflags in _openmp_flags():
        flags = [*_flags(defines), *cflags]
        slim = ["-Wl,--as-needed"] if sys.platform == "linux" else []  # not linked with all of torch
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as work:
            try:
                library = _run_build(source, Path(work), flags, [*slim, *ldflags])
            except (RuntimeError, OSError) as error:
                if list(Path(work).glob("*.o")):
                    continue  # compiled, but this OpenMP runtime does not link
                raise _build_error(source, folder, str(error)) from None
            os.replace(library, folder / "library.so")
        about = {"source": str(source), "flags": flags, "link": ldflags, "compiler": _compiler(_cxx())}
        (folder / "build.part").write_text(json.dumps(about))
        os.replace(folder / "build.part", folder / "build.json")
        return
    raise NeoLiteError(f"{source}: compiles but does not link with {_cxx()}; is its C++ runtime installed?")


def _build_error(source: Path, folder: Path, log: str) -> NeoLiteError:
    (folder / "error.log").write_text(log)
    lines = [line for line in log.splitlines() if "error:" in line] or log.splitlines() or ["no message"]
    remedy = f"correct it, or set CXX if {_cxx()} is at fault; all of it: {folder / 'error.log'}"
    return NeoLiteError(f"{source.name} does not compile: {lines[0].strip()[:200]} ({remedy})")


def build_library(source: Path, defines: Sequence[str] = ()) -> Path:
    """The folder of library.so, compiled from one C++ source now unless the cache has it. CompilerMissing if it can't be."""
    folder = cache_folder() / "kernels" / f"{source.stem}-{_build_key(source, defines)}"
    try:
        if not _loads(folder):
            with _locked(folder.with_suffix(".lock")):
                if not _loads(folder):  # another process may have built it meanwhile
                    _compile(source, defines, folder)
    except OSError as error:
        remedy = "set NEO_LITE_CACHE to a folder that can be written"
        raise NeoLiteError(f"the cache {folder.parent} cannot be used ({error.strerror or error}): {remedy}") from None
    return folder


def _loads(folder: Path) -> bool:
    """A whole build, whose library is one: a full disk or a copied cache may leave another thing."""
    if not all((folder / part).is_file() for part in ("build.json", "library.so")):
        return False
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL(str(folder / "library.so")))
    return False


# ---- Calling ----
class Kernel:
    """A loaded build. Call it with tensors, or hand `entry_point` and `args(...)` to a CUDA stream."""

    def __init__(self, spec: KernelSpec, build: Path) -> None:
        self.spec, self.build = spec, build
        self._library = ctypes.CDLL(str(build / "library.so"))
        self._run, self._check = self._library.neo_attention, self._library.neo_check
        self._run.argtypes, self._run.restype = [ctypes.c_void_p], None
        self._check.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.neo_isa.restype = ctypes.c_char_p
        if self._library.neo_args_size() != ctypes.sizeof(AttentionArgs):
            raise NeoLiteError(f"{spec.source}: AttentionArgs differs from neo_lite's; take over kernels/attention.h")
        self.entry_point: int = ctypes.cast(self._run, ctypes.c_void_p).value or 0
        self.isa: str = self._library.neo_isa().decode()
        self.last_s = (0.0, 0.0)  # start and end of the last call, by the kernel's clock (time.perf_counter's on Linux)
        self._dtype = DTYPES[spec.dtype]
        self._kv_dtype = DTYPES[spec.kv_dtype or spec.dtype]

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

        q, out [batch, q_heads, head_dim]; k_new, v_new [batch, kv_heads, head_dim]: stored at seq_len - 1 first;
        caches [num_blocks, kv_heads, block_size, head_dim], scales (int8 only, fp16) the same without head_dim;
        block_table [batch, width] and seq_lens [batch] int32. num_threads 0: OMP_NUM_THREADS, else all usable cores.
        """
        tensors = (q, k_new, v_new, k_cache, v_cache, k_scale, v_scale, block_table, seq_lens, out)
        self._validate(tensors)
        batch, q_heads, head_dim = q.shape
        args = AttentionArgs(
            *(None if t is None else t.data_ptr() for t in tensors), batch, q_heads, k_cache.shape[1],
            block_table.shape[1], num_threads or _default_threads(), head_dim**-0.5 if scale is None else scale,
        )  # fmt: skip
        args.tensors = tensors
        wrong = self._check(ctypes.byref(args), k_cache.shape[0])
        if wrong:
            raise self._wrong_sequence(abs(wrong) - 1, wrong > 0, args)
        return args

    def _validate(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        q, k_new, v_new, k_cache, v_cache, k_scale, v_scale, block_table, seq_lens, out = tensors
        spec = self.spec
        if (
            q is None
            or q.dim() != 3
            or k_cache is None
            or k_cache.dim() != 4
            or block_table is None
            or block_table.dim() != 2
        ):
            raise NeoLiteError("q must be [batch, q_heads, head_dim], k_cache have 4 dimensions and block_table 2")
        batch, q_heads, _ = q.shape
        num_blocks, kv_heads = k_cache.shape[:2]
        cache = (num_blocks, kv_heads, spec.block_size, spec.head_dim)
        _expect("q", q, (batch, kv_heads * spec.group, spec.head_dim), self._dtype)
        _expect("out", out, (batch, kv_heads * spec.group, spec.head_dim), self._dtype)
        _expect("k_cache", k_cache, cache, self._kv_dtype)
        _expect("v_cache", v_cache, cache, self._kv_dtype)
        _expect("block_table", block_table, (batch, block_table.shape[1]), torch.int32)
        _expect("seq_lens", seq_lens, (batch,), torch.int32)
        for name, tensor in (("k_new", k_new), ("v_new", v_new)):
            if tensor is not None or (k_new is None) != (v_new is None):
                _expect(name, tensor, (batch, kv_heads, spec.head_dim), self._dtype)
        for name, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
            if self._kv_dtype == torch.int8:
                _expect(name, tensor, cache[:3], torch.float16)
            elif tensor is not None:
                raise NeoLiteError(
                    f"{name} is given, but the cache is {spec.kv_dtype or spec.dtype}: only int8 has scales"
                )

    def _wrong_sequence(self, b: int, length: bool, args: AttentionArgs) -> NeoLiteError:
        """The message for what neo_check found in sequence b."""
        _, _, _, k_cache, _, _, _, block_table, seq_lens, _ = args.tensors
        assert k_cache is not None and block_table is not None and seq_lens is not None
        if length:
            room = args.table_width * self.spec.block_size
            return NeoLiteError(
                f"seq_lens[{b}] is {int(seq_lens[b])}: it must be 0 to {room}, what block_table has room for"
            )
        used = block_table[b, : -(-int(seq_lens[b]) // self.spec.block_size)].tolist()
        bad = next(block for block in used if not 0 <= block < k_cache.shape[0])
        return NeoLiteError(f"block_table[{b}] holds block {bad}: k_cache has blocks 0 to {k_cache.shape[0] - 1}")


def _expect(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        raise NeoLiteError(f"{name} is missing: give a {str(dtype)[6:]} tensor of shape {list(shape)}")
    if tensor.shape != shape:
        raise NeoLiteError(f"{name} has shape {list(tensor.shape)}: it must be {list(shape)}")
    if tensor.dtype != dtype:
        raise NeoLiteError(f"{name} is {str(tensor.dtype)[6:]}: this kernel was built for {str(dtype)[6:]}")
    if not tensor.is_contiguous():
        raise NeoLiteError(f"{name} has strides {list(tensor.stride())}: it must be contiguous; call .contiguous()")
    if tensor.is_cuda:
        raise NeoLiteError(f"{name} is on {tensor.device}: the CPU kernel needs it in host memory")


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
