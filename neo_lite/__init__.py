"""neo-lite: NEO (CPU offloading of decode attention) rebuilt step by step on a real Llama.

The names below load on first use, so that the scheduler and the simulator work where no torch is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_HOME = {
    "load_model": "api",
    "build_engine": "api",
    "EngineConfig": "config",
    "ModelConfig": "config",
    "NeoLiteError": "config",
    "SamplingParams": "request",
    "Timeline": "timeline",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'neo_lite' has no attribute {name!r}")
    return getattr(import_module(f"neo_lite.{_HOME[name]}"), name)
