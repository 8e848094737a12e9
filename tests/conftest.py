"""What all tests share: caches inside the repository, no window for plots, and tools that may be missing.

`NEO_LITE_REQUIRE_TOOLS=1` (set by .ci/run) turns "skipped: no g++-11 here" into a failure, so that CI cannot pass by
lacking a compiler or a browser.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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


def require_tool(name: str, remedy: str = "") -> str:
    """The path of a program; without it the test is skipped with a reason, or fails where tools are mandatory."""
    found = shutil.which(name)
    if found:
        return found
    reason = f"{name} is not on this machine" + (f": {remedy}" if remedy else "")
    if os.environ.get("NEO_LITE_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{reason} (NEO_LITE_REQUIRE_TOOLS=1)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT
