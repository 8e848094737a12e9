#!/bin/sh
# Finds a Python 3.10 to 3.13 and hands over to setup_venv.py. Called by the Makefile:
#   PYTHON=...(or empty) TORCH=(pinned|system) tools/setup.sh --venv .venv --extras lab
# Order: the machine's own python3 when it fits, else the newest; TORCH=system wants one that has torch.
fits() {
    "$1" -c '
import sys, importlib.util
wants_torch = sys.argv[1] == "system"
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) and (not wants_torch or importlib.util.find_spec("torch"))))
' "${TORCH:-pinned}" 2>/dev/null
}

if [ -n "$PYTHON" ]; then
    if fits "$PYTHON"; then exec "$PYTHON" tools/setup_venv.py "$@"; fi
    found=$("$PYTHON" --version 2>&1 | head -n 1)
    echo "set-up: PYTHON=$PYTHON is '$found': neo-lite needs Python 3.10 to 3.13 (with torch if TORCH=system)" >&2
    exit 1
fi
for python in python3 python3.13 python3.12 python3.11 python3.10; do
    if fits "$python"; then exec "$python" tools/setup_venv.py "$@"; fi
done
if [ "$TORCH" = system ]; then
    echo "set-up: TORCH=system, but no python3 (3.10 to 3.13) on PATH has torch: name one with PYTHON=/path/to/python3" >&2
else
    echo "set-up: no Python 3.10 to 3.13 on PATH: install one, or name it with PYTHON=/path/to/python3" >&2
fi
exit 1
