"""Installs what this Python lacks of neo-lite's dependencies and leaves torch, numpy and ipywidgets as they are.

Called by the first cell of every notebook (Colab) and by `make ... TORCH=system`: both are machines whose torch was
chosen to fit their GPU, and whose running kernel has these packages loaded already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

KEPT = ("torch", "torchvision", "torchaudio", "triton", "numpy", "ipywidgets")


def wanted(extras: list[str]) -> list[str]:
    """The requirements of pyproject.toml: the core's and those of the extras."""
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return project["dependencies"] + [line for extra in extras for line in optional[extra]]


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_missing(line: str) -> bool:
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate():
        return False
    version = installed_version(requirement.name)
    return version is None or not requirement.specifier.contains(version, prereleases=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help="comma-separated extras of pyproject.toml, such as lab,test")
    extras = [extra for extra in parser.parse_args().extras.split(",") if extra]
    missing = sorted({line for line in wanted(extras) if is_missing(line)})
    too_old = [line for line in missing if Requirement(line).name in KEPT and installed_version(Requirement(line).name)]
    if too_old:
        have = ", ".join(f"{Requirement(line).name} {installed_version(Requirement(line).name)}" for line in too_old)
        print(f"neo-lite needs {', '.join(too_old)} but finds {have}, which it does not touch: upgrade it yourself")
        return 1
    if not missing:
        return 0
    print(f"installing {', '.join(missing)}", flush=True)
    kept = [f"{name}=={version}\n" for name in KEPT if (version := installed_version(name))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(kept)
        constraints.flush()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name, *missing]
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
