"""The machine report on faked machines (cgroup v1 and v2, containers, macOS, a T4, no torch) and on this one."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from neo_lite import machine
from neo_lite.config import NeoLiteError
from neo_lite.machine import GIB


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes files of a machine's /proc and /sys; 64 cores, all in the affinity mask, no cgroup until written."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.delenv("NEO_LITE_HOST_MEMORY_GIB", raising=False)

    def place(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return place


CG = "sys/fs/cgroup"
NOTHING = {"proc/self/cgroup": "0::/\n"}
V1 = "3:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({**NOTHING, f"{CG}/cpu.max": "max 100000\n"}, 64),
        ({**NOTHING, f"{CG}/cpu.max": "400000 100000\n"}, 4),
        ({**NOTHING, f"{CG}/cpu.max": "150000 100000\n"}, 2),
        ({**NOTHING, f"{CG}/cpu.max": "10000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", f"{CG}/a/cpu.max": "300000 100000\n",
          f"{CG}/a/b/cpu.max": "max 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/../b\n", f"{CG}/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": V1, f"{CG}/cpu/job/cpu.cfs_quota_us": "200000\n",
          f"{CG}/cpu/job/cpu.cfs_period_us": "100000\n"}, 2),
        ({"proc/self/cgroup": V1, f"{CG}/cpu/cpu.cfs_quota_us": "500000\n",  # /job is the host's name for it
          f"{CG}/cpu/cpu.cfs_period_us": "100000\n"}, 5),
        ({"proc/self/cgroup": V1, f"{CG}/cpu/cpu.cfs_quota_us": "-1\n", f"{CG}/cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)  # fmt: skip
def test_usable_cores_by_quota(fake, files, cores):
    fake(files)
    assert machine.usable_cores() == cores


def test_usable_cores_by_affinity_and_without_it(fake, monkeypatch):
    fake({**NOTHING, f"{CG}/cpu.max": "800000 100000\n"})
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine.usable_cores() == 2
    monkeypatch.delattr(machine.os, "sched_getaffinity")  # macOS
    assert machine.usable_cores() == 8
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    assert machine.usable_cores() == 1


MEMINFO = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nMemAvailable: {8 << 20} kB\n"}
V2 = {**NOTHING, f"{CG}/memory.max": f"{4 * GIB}\n", f"{CG}/memory.current": f"{3 * GIB}\n"}


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 8),
        ({**NOTHING, f"{CG}/memory.max": "max\n", f"{CG}/memory.current": "7\n"}, 8),
        (V2, 1),
        ({**V2, f"{CG}/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 9\n"}, 3),
        ({**V2, f"{CG}/memory.current": f"{5 * GIB}\n"}, 0),
        ({**V2, f"{CG}/memory.max": f"{32 * GIB}\n"}, 8),
        ({"proc/self/cgroup": V1, f"{CG}/memory/job/memory.limit_in_bytes": f"{6 * GIB}\n",
          f"{CG}/memory/job/memory.usage_in_bytes": f"{4 * GIB}\n",
          f"{CG}/memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n"}, 3),
        ({"proc/self/cgroup": V1, f"{CG}/memory/memory.limit_in_bytes": "9223372036854771712\n",
          f"{CG}/memory/memory.usage_in_bytes": "1\n"}, 8),
    ],
)  # fmt: skip
def test_available_memory(fake, files, gib):
    fake({**MEMINFO, **files})
    assert machine.available_memory_bytes() == gib * GIB


def test_the_override_replaces_what_the_kernel_says(fake, monkeypatch):
    fake({**MEMINFO, **V2, "proc/self/status": f"Name: x\nVmRSS:\t {2 << 20} kB\n"})
    monkeypatch.setenv("NEO_LITE_HOST_MEMORY_GIB", "12.5")
    assert machine.available_memory_bytes() == 10.5 * GIB
    for text in ("lots", "nan", "inf", "1e999", "-1", "0"):
        monkeypatch.setenv("NEO_LITE_HOST_MEMORY_GIB", text)
        with pytest.raises(NeoLiteError, match=f"NEO_LITE_HOST_MEMORY_GIB is '{text}': give a number of GiB"):
            machine.available_memory_bytes()


def test_macos_has_three_quarters_of_its_memory(fake, monkeypatch):
    monkeypatch.setattr(machine.os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 8 * GIB // 16384}.get)
    assert machine.available_memory_bytes() == 6 * GIB


def test_check_memory_names_asked_available_and_what_fits():
    machine.check_memory(GIB, "the pool", GIB)
    with pytest.raises(NeoLiteError, match=r"^the pool needs 3\.00 GiB, of 2\.00 GiB available: at most 2\.00 GiB"):
        machine.check_memory(3 * GIB, "the pool", 2 * GIB)
    with pytest.raises(NeoLiteError, match="2,048 tokens would fit"):
        machine.check_memory(3 * GIB, "the pool", 2 * GIB, unit=("tokens", 1 << 20))
    with pytest.raises(NeoLiteError, match="needs"):
        machine.check_memory(1 << 60, "the pool")
    small = r"^the pool needs 1\.50 MiB, of 4\.00 KiB available: at most 4\.00 KiB would fit$"
    with pytest.raises(NeoLiteError, match=small):
        machine.check_memory(3 << 19, "the pool", 4096)
    with pytest.raises(NeoLiteError, match="needs 7 bytes, of 0 bytes available"):
        machine.check_memory(7, "the pool", 0)


def test_cpu_names(fake, monkeypatch):
    fake({"proc/cpuinfo": "processor\t: 0\nmodel name\t: Xeon 9\nmodel name\t: other\n"})
    assert machine.cpu_name() == "Xeon 9"
    fake({"proc/cpuinfo": "processor\t: 0\nCPU part\t: 0xd0c\n"})
    monkeypatch.setattr(machine, "_run", lambda *command: "Apple M9" if command[0] == "sysctl" else "")
    assert machine.cpu_name() == "Apple M9"
    monkeypatch.setattr(machine, "_run", lambda *command: "")
    assert machine.cpu_name() == machine.platform.machine()


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NEO_LITE_CACHE", str(tmp_path))
    assert machine.cache_folder() == tmp_path
    monkeypatch.setenv("NEO_LITE_CACHE", "")
    assert machine.cache_folder() == machine.Path.home() / ".cache" / "neo_lite"
    monkeypatch.setattr(machine.os.path, "expanduser", lambda path: str(path))  # of a user without a home
    for name in ("", "~nosuchuser/cache"):
        monkeypatch.setenv("NEO_LITE_CACHE", name)
        with pytest.raises(NeoLiteError, match="set NEO_LITE_CACHE to a folder"):
            machine.cache_folder()


def test_the_compiler_is_the_one_that_makes_the_kernels(tmp_path, monkeypatch):
    for name, text in (("c++", "clang 99"), ("mine", "mine 1.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.compiler() == f"{tmp_path}/c++ (clang 99)"
    monkeypatch.setenv("CXX", "mine -O3")
    assert machine.compiler() == f"{tmp_path}/mine (mine 1.0)"
    monkeypatch.setenv("CXX", "/no/such/g++")
    assert machine.compiler() is None, "whatever else there may be, no kernel is made with it"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert machine.compiler() is None


def fake_torch(major: int, minor: int, name: str, count: int = 1) -> SimpleNamespace:
    card = SimpleNamespace(name=name, multi_processor_count=40, total_memory=15 * GIB, major=major, minor=minor)
    cuda = SimpleNamespace(
        is_available=lambda: True, get_device_properties=lambda index: card, device_count=lambda: count
    )
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.8"))


def test_a_t4_and_an_h200_are_told_what_they_can_do(monkeypatch):
    report = {"torch": "2.11", "kernel": "none, torch computes attention on the CPU: no C++ compiler"}
    report |= {"versions": {"numpy": "2.4"}}
    monkeypatch.setattr(machine, "_torch", lambda: fake_torch(7, 5, "Tesla T4"))
    course = machine.course({**report, "gpu": machine.gpu()})
    assert "T4" in course["all notebooks"] and course["GPU timelines"].startswith("yes")
    assert course["bfloat16 on the GPU"].startswith("no") and "fp16" in course["bfloat16 on the GPU"]
    assert course["Triton kernels"].startswith("no") and "SDPA" in course["Triton kernels"]
    assert course["CPU attention in C++"].startswith("no") and "g++" in course["CPU attention in C++"]
    monkeypatch.setattr(machine, "_torch", lambda: fake_torch(9, 0, "H200", count=2))
    card = machine.gpu(partition_sms=8)
    assert (card["partition_sms"], card["sms"], card["capability"]) == (8, 40, [9, 0])
    course = machine.course({**report, "gpu": card})
    assert course["bfloat16 on the GPU"] == course["Triton kernels"] == "yes"
    assert course["tensor parallel"] == "yes, on 2 GPUs"


def test_no_torch_and_no_kernel_are_reported_not_raised(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "neo_lite.cpu_attention", None)
    monkeypatch.setattr(machine, "_version", lambda package: "not installed")
    report = machine.env_report()
    assert report["gpu"] is None and report["read_bandwidth"]["gb_per_s"] is None
    assert report["kernel"].startswith("none")
    assert "install torch" in report["course"]["all notebooks"]
    machine.print_env(report, io.StringIO())


def test_a_kernel_that_does_not_compile_gives_its_remedy(monkeypatch):
    def load_kernel(spec):
        raise NeoLiteError("no C++ compiler: install g++")

    kernels = SimpleNamespace(KernelSpec=lambda **shape: shape, load_kernel=load_kernel)
    monkeypatch.setattr(importlib, "import_module", lambda name: kernels)
    assert machine.kernel_build().endswith("no C++ compiler: install g++")


def test_this_machine_has_a_report(monkeypatch):
    monkeypatch.setattr(machine, "kernel_build", lambda: "not built in this test")
    report = machine.env_report()
    assert json.loads(json.dumps(report)) == report
    assert 1 <= report["usable_cores"] <= os.cpu_count()
    assert report["available_memory_bytes"] > 0
    assert report["read_bandwidth"]["gb_per_s"] > 0 and report["read_bandwidth"]["method"] == "torch sum, fp32"
    text = io.StringIO()
    machine.print_env(report, text)
    assert report["cpu"] in text.getvalue() and all(line in text.getvalue() for line in report["course"])


def test_measuring_bandwidth_leaves_torchs_threads_as_they_were():
    import torch

    before = torch.get_num_threads()
    measured = machine.measure_read_bandwidth(threads=before + 1, repeats=1)
    assert torch.get_num_threads() == before and measured["threads"] == before + 1
    assert measured["bytes"] > 64 << 20


def test_the_code_version_is_the_commit_of_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "neo_lite").mkdir()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "neo_lite" / "machine.py"))
    (tmp_path / "neo_lite" / "machine.py").write_text("1")
    before = machine.code_version()
    assert re.fullmatch(r"0\.1\.0, sources [0-9a-f]{12}", before), "without git: the version, and what was run"
    (tmp_path / "neo_lite" / "machine.py").write_text("2")
    assert machine.code_version() != before
    (tmp_path / "file").write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y.z"]
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert head.startswith(machine.code_version()) and len(machine.code_version()) >= 7
    (tmp_path / "file").write_text("2")
    assert machine.code_version().endswith("-dirty")


def test_importing_machine_does_not_import_torch():
    code = "import sys, neo_lite.machine; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=machine.Path(machine.__file__).parent.parent).returncode == 0
    )
