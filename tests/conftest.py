"""What all tests share: caches inside the repository, no window for plots, and tools that may be missing.

`NEO_LITE_REQUIRE_TOOLS=1` (set by .ci/run) turns "skipped: no g++-11 here" into a failure, so that CI cannot pass by
lacking a compiler or a browser.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("NEO_LITE_CACHE", str(ROOT / ".cache" / "neo_lite"))
os.environ.setdefault("MPLCONFIGDIR", str(ROOT / ".cache" / "matplotlib"))
os.environ.setdefault("MPLBACKEND", "Agg")
# Two default torch processes on two cores slow each other many times over, and xdist starts one for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a timed assertion fails on a busy machine. The same examples in every CI run.
settings.register_profile("neo-lite", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("neo-lite")


def missing(reason: str) -> NoReturn:
    """Skips with a reason, or fails where tools are mandatory."""
    if os.environ.get("NEO_LITE_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{reason} (NEO_LITE_REQUIRE_TOOLS=1)", pytrace=False)
    pytest.skip(reason)


def require_tool(name: str, remedy: str = "") -> str:
    """The path of a program, or `missing`."""
    found = shutil.which(name)
    if found:
        return found
    missing(f"{name} is not on this machine" + (f": {remedy}" if remedy else ""))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C++ compiler that the package itself would take; tests that build kernels ask for it."""
    from neo_lite import machine

    found = machine.compiler()
    if found is None:
        missing("no C++ compiler (CXX, else c++) is on this machine")
    return found
