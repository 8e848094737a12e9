"""The front door: a model by its name, an engine around it. Called by notebooks, the command line and benchmarks."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from neo_lite import machine
from neo_lite.checkpoint import open_checkpoint
from neo_lite.config import EngineConfig, NeoLiteError
from neo_lite.cost_model import Profile
from neo_lite.engine import Engine
from neo_lite.model import Llama
from neo_lite.neo import POLICIES, Neo
from neo_lite.pipeline import Pipeline
from neo_lite.profiler import measure
from neo_lite.timeline import Timeline

if TYPE_CHECKING:
    from neo_lite.parallel import Ranks


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a torch device that exists; raises NeoLiteError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(name, (str, torch.device)) or not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise NeoLiteError(f"device {name!r} is unknown: choose auto, cpu or cuda")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NeoLiteError(f"device {name!r}: torch {torch.__version__} sees no CUDA GPU here: choose cpu or auto")
    if (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise NeoLiteError(f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0")
    if device.index is not None:
        torch.cuda.set_device(device)  # streams, events and pinned memory belong to the current one
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU; on a GPU bfloat16 from compute capability 8.0, else float16."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    if name not in ("float32", "float16", "bfloat16"):
        raise NeoLiteError(f"dtype {name!r} is unknown: choose auto, float32, float16 or bfloat16")
    return getattr(torch, name)


def load_model(name: str = "smollm2", device: str = "auto", dtype: str = "auto", ranks: Ranks | None = None) -> Llama:
    """A Llama by name: smollm2, random:<shape>, a local folder, or a hub id; as one of `ranks`, this one's part of it.
    Raises NeoLiteError with the remedy."""
    target = resolve_device(ranks.device if ranks else device)
    kind = resolve_dtype(dtype, target)
    checkpoint = open_checkpoint(name)
    shard = ranks.shard(name, kind, checkpoint.config) if ranks else None
    free = torch.cuda.mem_get_info(target)[0] if target.type == "cuda" else None
    shape = shard.config if shard and free else checkpoint.config  # all ranks of a host share its memory
    machine.check_memory(shape.num_parameters * kind.itemsize, f"the weights of {name} in {str(kind)[6:]}", free)
    model = Llama(checkpoint.config, kind, target, shard)
    model.tokenizer = checkpoint.tokenizer()  # before the weights, which may take minutes
    return model.load(checkpoint)


def build_engine(
    model: Llama, config: EngineConfig | None = None, timeline: Timeline | None = None, costs: Profile | None = None,
    **changes: Any,
) -> Engine:  # fmt: skip
    """An engine on real devices: `build_engine(model, mode="simple", gpu_kv_tokens=4096)`.

    A mode that weighs stage times measures them first, unless `costs` brings a profile of this model and machine.
    """
    known = [f.name for f in fields(EngineConfig)]
    if unknown := [name for name in changes if name not in known]:
        raise NeoLiteError(f"setting {unknown[0]!r} is unknown: choose from {', '.join(known)}")
    if not isinstance(config, (EngineConfig, type(None))):
        raise NeoLiteError(f"config is {config!r}: give an EngineConfig, or settings by name such as mode='simple'")
    config = replace(config or EngineConfig(), **changes)
    timeline = timeline or Timeline(enabled=False)
    if costs is not None:
        stamp = machine.stamp() if "gpu" in costs.stamp else None  # a roofline and a toy are of no machine at hand
        costs.check(model.whole.name, str(model.dtype)[6:], stamp, config.cpu_threads or machine.usable_cores())
    pipeline = model.shard.pipeline(model, config, timeline) if model.shard else Pipeline(model, config, timeline)
    if issubclass(POLICIES[config.mode], Neo) and costs is None:
        costs = model.shard.together(measure, pipeline) if model.shard else measure(pipeline)
    return Engine(config, model.whole, pipeline, timeline=timeline, costs=costs)
