# Set-up: idle where neo_lite is installed. Elsewhere (Colab) it fetches the course and installs only what is missing.
import sys
from importlib.util import find_spec
from subprocess import check_call

if find_spec("neo_lite") is None:
    check_call("test -d neo-lite || git clone -q --depth 1 -b v0.1.0 https://github.com/neo-lite/neo-lite", shell=True)
    check_call([sys.executable, "neo-lite/tools/install_missing.py"])
    sys.path.insert(0, "neo-lite")
from neo_lite import machine

machine.print_env(machine.env_report())
