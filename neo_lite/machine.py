"""What machine is this: its cores, memory, bandwidth, GPU and compiler, and what it can run of the course.

Torch-free at the top, like everything above it. Who calls it: `cpu_attention` (cores), whoever allocates much
(`check_memory`), everything that records a result (`stamp`), and `python -m neo_lite env` (`env_report`).
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neo_lite.config import NeoLiteError

GIB = 1 << 30
ROOT = Path("/")  # of /proc and /sys; tests fake it


def cache_folder() -> Path:
    """Where anything built or downloaded at run time goes: $NEO_LITE_CACHE, else ~/.cache/neo_lite."""
    name = os.environ.get("NEO_LITE_CACHE") or "~/.cache/neo_lite"
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise NeoLiteError(f"the cache folder {name} lies in no known home: set NEO_LITE_CACHE to a folder") from None


def usable_cores() -> int:
    """Cores this process may use: the least of os.cpu_count, the affinity mask and the cgroups' quotas (rounded up)."""
    cores = os.cpu_count() or 1
    return max(1, min(cores, len(_affinity()) or cores, *map(math.ceil, _cpu_quotas())))


def _affinity() -> set[int]:
    """The cores that the affinity mask allows; none where there is no such mask (macOS)."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def available_memory_bytes() -> int:
    """Bytes that this process can still allocate: the least of MemAvailable and what each cgroup's limit leaves.

    In some virtual machines MemTotal and MemAvailable grow as memory is used, so that /proc/meminfo says too little.
    There $NEO_LITE_HOST_MEMORY_GIB, the memory that this process may hold in all, tells the truth and replaces both.
    macOS: three quarters of the physical memory (it has no MemAvailable; the rest is the system's).
    """
    if override := os.environ.get("NEO_LITE_HOST_MEMORY_GIB"):
        if not re.fullmatch(r"\d{1,9}(\.\d*)?", override) or not float(override):
            raise NeoLiteError(f"NEO_LITE_HOST_MEMORY_GIB is {override!r}: give a number of GiB above 0")
        return max(0, int(float(override) * GIB) - (_proc_bytes("VmRSS", "proc/self/status") or 0))
    available = _proc_bytes("MemAvailable", "proc/meminfo")
    return total_memory_bytes() * 3 // 4 if available is None else max(0, min([available, *_cgroup_memory_left()]))


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(asked_bytes: int, what: str, available: int | None = None, unit: tuple[str, int] = ("", 0)) -> None:
    """Raises NeoLiteError (asked, available, what would fit) unless `what` fits into `available` bytes (None: of this
    host). `unit`: a name and its bytes, such as ("tokens", 49152), to say in it what would fit."""
    available = available_memory_bytes() if available is None else available
    if asked_bytes > available:
        fits = f"{available // unit[1]:,} {unit[0]}" if unit[1] else f"at most {_size(available)}"
        raise NeoLiteError(f"{what} needs {_size(asked_bytes)}, of {_size(available)} available: {fits} would fit")


def check_writable(option: str, name: str) -> None:
    """Raises NeoLiteError unless the file that `option` names can be written: before a long run that would end in vain."""
    path = Path(name)
    if name and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise NeoLiteError(f"{option} {name} cannot be written: name a file in a folder that exists")


def _size(num_bytes: int) -> str:
    """In the largest unit that shows something: 3.00 GiB, 1.50 MiB, 12 bytes."""
    for name, unit in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"


def read_text(path: str | Path) -> str:
    """What the kernel says in a file of /proc or /sys; empty where it says nothing."""
    try:
        return (ROOT / path).read_text(errors="replace")
    except OSError:
        return ""


def _proc_bytes(name: str, path: str) -> int | None:
    """The bytes in a line such as "MemAvailable:   16384 kB"."""
    match = re.search(rf"{name}:\s+(\d+) kB", read_text(path))
    return int(match[1]) * 1024 if match else None


def _cgroups(controller: str) -> Iterator[Path]:
    """This process's cgroup and all its ancestors, v1 or v2: a limit on any of them holds. The path in
    /proc/self/cgroup may be the host's and not exist inside a container, whose own group is then the mount's root."""
    for line in read_text("proc/self/cgroup").splitlines() or ["0::/"]:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            mount = Path("sys/fs/cgroup") / ("" if number == "0" else controller)
            parts = [part for part in path.split("/") if part and part != ".."]
            yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _cpu_quotas() -> Iterator[float]:
    """Cores allowed by each cgroup that sets a quota (v2 cpu.max: "150000 100000"; v1: two files; "max", -1: none)."""
    for folder in _cgroups("cpu"):
        words = read_text(folder / "cpu.max").split()
        words = words or [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _cgroup_memory_left() -> Iterator[int]:
    """Bytes each cgroup with a limit still allows; its page cache that can be dropped does not count as used."""
    for folder in _cgroups("memory"):
        limit = (read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")).strip()
        usage = (read_text(folder / "memory.current") or read_text(folder / "memory.usage_in_bytes")).strip()
        if limit.isdigit() and usage.isdigit():
            cache = re.findall(r"^(?:total_)?inactive_file (\d+)", read_text(folder / "memory.stat"), re.MULTILINE)
            yield int(limit) - int(usage) + max(map(int, cache), default=0)


def _run(*command: str) -> str:
    """First line of a command's output, empty if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""


def cpu_name() -> str:
    match = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", read_text("proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()


def code_version() -> str:
    """The commit (with -dirty if files differ from it) in a checkout, else `sources_version`."""
    folder = Path(__file__).parent.parent
    commit = _run("git", "-C", str(folder), "describe", "--always", "--dirty") if (folder / ".git").exists() else ""
    return commit or sources_version()


def sources_version() -> str:
    """The version and a hash of the sources, which tells apart two edits of one commit, too."""
    folder = Path(__file__).parent
    sources = sorted([*folder.glob("*.py"), *folder.parent.glob("kernels/*")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.is_file())).hexdigest()
    return f"{importlib.import_module('neo_lite').__version__}, sources {digest[:12]}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):  # OSError: a library that it needs is missing
        return None


def gpu(partition_sms: int | None = None) -> dict[str, Any] | None:
    """The first CUDA device, None without one. `partition_sms`: multiprocessors of the green context in use, if any (it
    sets $NEO_LITE_NUM_SMS): a result measured on part of a GPU says so."""
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(0)
    part = partition_sms or int(os.environ.get("NEO_LITE_NUM_SMS", 0)) or None
    return {
        "name": card.name, "count": torch.cuda.device_count(), "sms": card.multi_processor_count,
        "partition_sms": part, "memory_bytes": card.total_memory, "capability": [card.major, card.minor],
        "cuda": torch.version.cuda,
    }  # fmt: skip


def stamp(partition_sms: int | None = None) -> dict[str, Any]:
    """The hardware and software that a recorded result was made on; plain values for JSON."""
    return {
        "gpu": gpu(partition_sms), "cpu": cpu_name(), "usable_cores": usable_cores(),
        "ram_bytes": total_memory_bytes(), "platform": platform.platform(), "python": platform.python_version(),
        "torch": _version("torch"), "neo_lite": code_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def measure_read_bandwidth(threads: int = 0, repeats: int = 5) -> dict[str, Any]:
    """Host memory's streaming read: the best of `repeats` sums over a buffer four times the last-level cache.
    Returns GB/s, method, threads and bytes. A sum in torch is a lower bound of what a tuned kernel reads."""
    torch = _torch()
    if torch is None:
        return {"gb_per_s": None, "method": "not measured: torch is not installed"}
    size = min(max(4 * last_level_cache_bytes(), GIB // 4), GIB, available_memory_bytes() // 4)
    threads, before = threads or usable_cores(), torch.get_num_threads()
    torch.set_num_threads(threads)
    buffer = torch.ones(size // 4, dtype=torch.float32)  # ones: untouched zeros would all be one cached page
    times_s = timeit.repeat(buffer.sum, number=1, repeat=repeats)
    torch.set_num_threads(before)
    speed = round(buffer.nbytes / min(times_s) / 1e9, 1)
    return {"gb_per_s": speed, "method": "torch sum, fp32", "threads": threads, "bytes": buffer.nbytes}


def last_level_cache_bytes() -> int:
    """Of all cores that this process may use: each of their last-level caches once; 32 MiB where sysfs does not tell."""
    caches: dict[str, int] = {}
    for core in _affinity():
        folder = f"sys/devices/system/cpu/cpu{core}/cache/index3"
        if match := re.match(r"(\d+)K", read_text(f"{folder}/size")):
            caches[read_text(f"{folder}/shared_cpu_list")] = int(match[1]) * 1024
    return sum(caches.values()) or 32 << 20


def command_line(name: str, args: argparse.Namespace, launcher: str = "") -> str:
    """The command that gives these settings, for results to name; what only says how to print is left out."""
    shown = {k: v for k, v in vars(args).items() if k not in ("command", "json", "trace") and v != ""}
    options = " ".join(f"--{k.replace('_', '-')} {shlex.quote(str(v))}" for k, v in shown.items())
    return f"python -m {launcher}neo_lite {name} {options}"


def compiler() -> str | None:
    """Path and version of the C++ compiler that makes the kernels: $CXX, else c++; None if it is not there."""
    path = shutil.which((os.environ.get("CXX") or "c++").split()[0])
    version = _run(path, "--version") if path else None
    return f"{path} ({version})" if version else None


def kernel_build() -> str:
    """Which build of the CPU attention kernel is active for the bundled model's shape (compiles it on first use)."""
    try:
        kernels = importlib.import_module("neo_lite.cpu_attention")
        spec = kernels.KernelSpec(head_dim=64, group=3, block_size=16, dtype="float32")
        return kernels.load_kernel(spec).description
    except (ImportError, NeoLiteError) as error:
        return f"none, torch computes attention on the CPU: {error}"


def env_report() -> dict[str, Any]:
    """Everything `python -m neo_lite env` prints; plain values for JSON."""
    affinity = len(_affinity()) or None
    report = {
        **stamp(),
        "cores": {"cpu_count": os.cpu_count(), "affinity": affinity, "cgroup_quota": min(_cpu_quotas(), default=None)},
        "available_memory_bytes": available_memory_bytes(),
        "read_bandwidth": measure_read_bandwidth(),
        "versions": {name: _version(name) for name in ("transformers", "numpy", "gguf", "ipywidgets")},
        "compiler": compiler(),
        "kernel": kernel_build(),
    }
    return {**report, "course": course(report)}


def course(report: dict[str, Any]) -> dict[str, str]:
    """What this machine can run of the course: feature -> yes or no, and why."""
    card, torch_there = report["gpu"], report["torch"] != "not installed"
    new, several = bool(card and card["capability"][0] >= 8), bool(card and card["count"] > 1)
    why_not = f"no, {card['name']} is below compute capability 8.0" if card else "no GPU"
    kernel = "no, torch computes it: install g++ or clang++, or set CXX"
    return {
        "scheduler, simulator": "no: install numpy" if report["versions"]["numpy"] == "not installed" else "yes",
        "all notebooks": f"yes, on {card['name'] if card else 'the CPU'}" if torch_there else "no: install torch",
        "CPU attention in C++": kernel if report["kernel"].startswith("none") else "yes",
        "GPU timelines": "yes, measured here" if card else "no GPU: recorded measurements, labelled as such",
        "bfloat16 on the GPU": "yes" if new else f"{why_not}: fp16 there" if card else why_not,
        "Triton kernels": "yes" if new else f"{why_not}: SDPA there" if card else why_not,
        "tensor parallel": f"yes, on {card['count']} GPUs" if several else "no second GPU: two processes on the CPU",
    }


def print_env(report: dict[str, Any], file: Any = None) -> None:
    """The report for a person."""
    cores, card, read = report["cores"], report["gpu"], report["read_bandwidth"]
    limits = f"affinity {cores['affinity'] or 'unknown'}, cgroup {cores['cgroup_quota'] or 'no limit'}"
    free = report["available_memory_bytes"] / GIB
    rows = {
        "platform": report["platform"],
        "CPU": report["cpu"],
        "usable cores": f"{report['usable_cores']} (machine {cores['cpu_count']}, {limits})",
        "memory": f"{report['ram_bytes'] / GIB:.1f} GiB, {free:.1f} GiB available",
        "memory read": f"{read['gb_per_s']} GB/s ({read['method']})" if read["gb_per_s"] else read["method"],
        "GPU": f"{card['name']}, {card['sms']} SMs, {card['memory_bytes'] / GIB:.0f} GiB" if card else "none",
        **{name: report[name] for name in ("python", "torch", "neo_lite")},
        **report["versions"],
        "compiler": report["compiler"] or "none: install g++ or clang++, or set CXX",
        "CPU kernel": report["kernel"],
    }
    for title, value in rows.items():
        print(f"{title:14}{value}", file=file)
    print("\nOf the course, this machine runs:", file=file)
    for title, value in report["course"].items():
        print(f"  {title:22}{value}", file=file)
