"""Builds of C++ at run time, and every way that one can go wrong."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from neo_lite import kernel_build
from neo_lite.config import NeoLiteError

SOURCE = 'extern "C" int answer() { return %s; }\n'


def build_in_new_process(cache: Path, source: Path, **environment: str) -> subprocess.Popen:
    program = (
        "import ctypes, sys, pathlib; from neo_lite.kernel_build import build_library as b\n"
        f"print(ctypes.CDLL(str(b(pathlib.Path({str(source)!r})) / 'library.so')).answer())"
    )
    settings = os.environ | {"NEO_LITE_CACHE": str(cache), **environment}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=settings, start_new_session=True, **pipes)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEO_LITE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "answer.cpp"
    path.write_text(SOURCE % 42)
    return path


@pytest.fixture
def slow_compiler(tmp_path: Path) -> str:
    """A compiler that says when it has begun, and takes its time."""
    path = tmp_path / "slow-g++"
    path.write_text(f'#!/bin/sh\ncase "$*" in *-c*) touch {tmp_path}/begun; sleep 3;; esac\nexec c++ "$@"\n')
    path.chmod(0o755)
    return str(path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_compile_leaves_the_next_run_working(
    source: Path, slow_compiler: str, tmp_path: Path, how: int
) -> None:
    killed = build_in_new_process(tmp_path / "cache", source, CXX=slow_compiler)
    wait_for(tmp_path / "begun")
    os.killpg(killed.pid, how)
    assert killed.wait(60) != 0
    left = [path for path in (tmp_path / "cache").rglob("*") if path.name in ("lock", "library.so", "build.json")]
    assert not [path for path in left if path.name != "lock"]  # nothing that could pass for a build
    out, err = build_in_new_process(tmp_path / "cache", source, CXX=slow_compiler).communicate(timeout=120)
    assert out == "42\n", err


@pytest.mark.slow
def test_two_processes_compile_once_and_the_second_says_what_it_waits_for(
    source: Path, slow_compiler: str, tmp_path: Path
) -> None:
    first = build_in_new_process(tmp_path / "cache", source, CXX=slow_compiler)
    wait_for(tmp_path / "begun")
    second = build_in_new_process(tmp_path / "cache", source, CXX=slow_compiler)
    (out, _), (other, err) = first.communicate(timeout=120), second.communicate(timeout=120)
    assert out == other == "42\n", err
    assert "waiting for another process" in err and "compiling" not in err


def test_other_processor_flags_or_an_edited_source_give_another_build(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def answer() -> int:
        return ctypes.CDLL(str(kernel_build.build_library(source) / "library.so")).answer()

    assert answer() == answer() == 42 and capsys.readouterr().err.count("compiling") == 1
    source.write_text(SOURCE % 43)
    assert answer() == 43
    before = kernel_build.build_library(source)
    monkeypatch.setattr(kernel_build, "_cpu_flags", lambda: "fpu avx1024")
    assert kernel_build.build_library(source) != before
    source.with_name("mine.h").write_text("// a header beside the source counts as well")
    assert kernel_build.build_library(source) != before


def test_an_error_in_a_source_is_shown_in_one_line_and_can_be_mended(source: Path) -> None:
    source.write_text(SOURCE % "no_such_name")
    for _ in range(2):  # a failure is not kept: a second try compiles again
        with pytest.raises(NeoLiteError, match=r"answer.cpp does not compile: .*no_such_name"):
            kernel_build.build_library(source)
    source.write_text(SOURCE % 7)
    assert ctypes.CDLL(str(kernel_build.build_library(source) / "library.so")).answer() == 7


def test_no_compiler_is_one_line_with_a_remedy(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++")
    with pytest.raises(kernel_build.CompilerMissing, match="install g\\+\\+") as error:
        kernel_build.build_library(source)
    assert "\n" not in str(error.value)


def test_a_compiler_may_have_flags_of_its_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -DVALUE=6")
    source.write_text(SOURCE % "VALUE")
    assert ctypes.CDLL(str(kernel_build.build_library(source) / "library.so")).answer() == 6


@pytest.mark.parametrize("compiler", ["cc", "true"])
def test_a_compiler_that_makes_no_cpp_library_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """cc links C++ without its runtime and does not complain; `true` never does."""
    monkeypatch.setenv("CXX", compiler)
    source.write_text('#include <stdexcept>\nextern "C" int answer() { throw std::runtime_error(""); }\n')
    with pytest.raises(
        kernel_build.CompilerMissing, match=f"CXX={compiler} makes no library of answer.cpp: set CXX to g"
    ):
        kernel_build.build_library(source)


def test_a_full_disk_is_not_the_sources_fault(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.write_text(
        '#!/bin/sh\ncase "$*" in *-c*) echo "fatal error: No space left on device" >&2; exit 1;; esac\nexec c++ "$@"\n'
    )
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    with pytest.raises(NeoLiteError, match="the disk of .* is full: make room, or set NEO_LITE_CACHE"):
        kernel_build.build_library(source)
