"""Compiles the C++ of `kernels/` at run time, once for each build, and keeps the libraries in the cache folder.

`cpu_attention.load_kernel` calls it with a rung and its constants, `kernel_bench` with the streaming read. Read it when
you want to know how a build can fail and what is done about it: a killed compile, two processes at once, a cache that
moved to another processor, a second OpenMP runtime, no compiler. The sources include no header of torch: a compiler is all
that it takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from neo_lite.config import NeoLiteError
from neo_lite.machine import cache_folder, read_text

_HERE = Path(__file__).resolve().parent
KERNELS_DIR = _HERE / "kernels" if (_HERE / "kernels").is_dir() else _HERE.parent / "kernels"


class CompilerMissing(NeoLiteError):
    """No kernel can be built here; the torch backend computes the same, slower."""


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
    return (folder / "build.json").is_file() and _opens(folder / "library.so")


def _opens(library: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL(str(library)))
    return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that dies with its process: a mere file would outlive a killed build and stop all later ones."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"neo_lite: waiting for another process that compiles this kernel ({path})", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- What a binary depends on ----


def _build_key(source: Path, defines: Sequence[str]) -> str:
    sources = [source, *sorted(KERNELS_DIR.glob("*.h")), *sorted(source.parent.glob("*.h"))]
    parts = [torch.__version__, str(sys.implementation.cache_tag), platform.machine(), _compiler(_cxx()), _cpu_flags()]
    parts += [str(_flags(defines)), str(list(_openmp_flags())), *(path.read_text() for path in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cxx() -> str:
    return os.environ.get("CXX") or "c++"


@functools.cache
def _compiler(cxx: str) -> str:
    """The version text of the compiler; CompilerMissing if there is none."""
    try:
        done = subprocess.run([*shlex.split(cxx), "--version"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        remedy = "install g++ (apt install g++, or conda's cxx-compiler) or set CXX"
        raise CompilerMissing(f"no C++ compiler: {cxx!r} does not run; {remedy}") from error
    return done.stdout


@functools.cache
def _cpu_flags() -> str:
    """What the processor can do: a build for one machine may die of illegal instructions on another."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)", read_text("proc/cpuinfo"), re.MULTILINE)
    return " ".join(sorted(match[1].split())) if match else platform.machine() + platform.processor()


def _flags(defines: Sequence[str]) -> list[str]:
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return ["-std=c++17", "-O3", "-fPIC", tuned, *defines]


def _openmp_library() -> Path | None:
    """The OpenMP runtime that torch has loaded: a second one would bring a second team of threads."""
    # libiomp5 has libgomp's entry points as well
    if paths := re.findall(r"/.*/lib(?:gomp|iomp5)[^/\n]*$", read_text("proc/self/maps"), re.MULTILINE):
        return Path(min(paths))
    dylib = Path(torch.__file__).parent / "lib" / "libomp.dylib"
    return dylib if dylib.is_file() else None


def _openmp_flags() -> Iterator[tuple[list[str], list[str]]]:
    """Flags to compile and to link with, the best first (others where linking fails); with the last: one thread."""
    library, is_clang = _openmp_library(), "clang" in _compiler(_cxx())
    if library and (library.suffix == ".dylib" or not is_clang):
        link = [str(library), f"-Wl,-rpath,{library.parent}"]
        yield (["-Xpreprocessor", "-fopenmp"] if library.suffix == ".dylib" else ["-fopenmp"]), link
    if sys.platform != "darwin":
        yield ["-fopenmp"], ["-fopenmp"]
    yield [], []


# ---- Compiling ----


def _compile(source: Path, defines: Sequence[str], folder: Path) -> None:
    """Builds into `folder`: build.json, and library.so last, whose presence says that the build is whole."""
    shutil.rmtree(folder, ignore_errors=True)  # what a killed build left
    folder.mkdir(parents=True)
    print(f"neo_lite: compiling {source.name} {' '.join(defines)} (once)", file=sys.stderr, flush=True)
    compiled, linked = folder / "compiled.o", folder / "linked.so"
    for cflags, ldflags in _openmp_flags():
        flags = [*_flags(defines), *cflags]
        if said := _complaint([*flags, f"-I{KERNELS_DIR}", "-c", str(source), "-o", str(compiled)]):
            raise _build_error(source, folder, said)
        # a compiler for C links a library that nobody can open
        if not _complaint(["-shared", str(compiled), *ldflags, "-o", str(linked)]) and _opens(linked):
            about = {"source": str(source), "flags": flags, "link": ldflags, "compiler": _compiler(_cxx())}
            (folder / "build.json").write_text(json.dumps(about))
            compiled.unlink()
            os.replace(linked, folder / "library.so")
            return
    raise CompilerMissing(
        f"CXX={_cxx()} makes no library of {source.name}: set CXX to g++ or clang++, with its C++ runtime"
    )


def _complaint(arguments: Sequence[str]) -> str:
    """Runs the compiler; what it says if it fails, else ""."""
    done = subprocess.run([*shlex.split(_cxx()), *arguments], capture_output=True, text=True, errors="replace")
    return (done.stderr or "no message") if done.returncode else ""


def _build_error(source: Path, folder: Path, log: str) -> NeoLiteError:
    (folder / "error.log").write_text(log)
    if "No space left" in log:
        return NeoLiteError(f"the disk of {folder} is full: make room, or set NEO_LITE_CACHE to another folder")
    lines = [line for line in log.splitlines() if "error:" in line] or log.splitlines() or ["no message"]
    remedy = f"correct it, or set CXX if {_cxx()} is at fault; all of it: {folder / 'error.log'}"
    return NeoLiteError(f"{source.name} does not compile: {lines[0].strip()[:200]} ({remedy})")
