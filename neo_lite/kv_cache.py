"""The two KV pools, and the copies between them. Called by the pipeline.

Layout of K and of V, the same on both devices: [layer, block, kv_head, block_size, head_dim]. One tile (a head of a
block: 16 tokens x 128 x 2 bytes) is a 4 KiB page, and the CPU kernel reads the tiles of a block one after the other.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from neo_lite.attention import has_triton
from neo_lite.config import EngineConfig, ModelConfig, NeoLiteError
from neo_lite.machine import check_memory
from neo_lite.request import OTHER, Device, Move

HUGE_PAGE_BYTES = 2 << 20


class KVPool:
    """K and V of one pool, zeroed: in the model's dtype, or on the host as int8 with a fp16 scale a token and head.

    `tensors` names them: k, v, and for int8 k_scale, v_scale [layer, block, kv_head, block_size].
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, name: str
    ) -> None:
        shape = (model.num_layers, num_blocks, model.num_kv_heads, block_size, model.head_dim)
        self.block_size, self.name, self.device, self.int8 = block_size, name, device, dtype == torch.int8
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"k": (shape, dtype), "v": (shape, dtype)}
        if self.int8:
            shapes |= {"k_scale": (shape[:-1], torch.float16), "v_scale": (shape[:-1], torch.float16)}
        num_bytes = sum(torch.Size(s).numel() * t.itemsize for s, t in shapes.values())
        what = f"the {name} KV pool of {num_blocks * block_size} tokens (lower {name}_kv_tokens)"
        check_memory(num_bytes, what, torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None)
        make = partial(torch.zeros, device=device) if device.type == "cuda" else host_tensor
        self.tensors: dict[str, Tensor] = {n: make(s, dtype=t) for n, (s, t) in shapes.items()}
        self._by_gpu: dict[str, Tensor] = {}
        if device.type == "cpu" and torch.cuda.is_available():
            self._by_gpu = {n: gpu_view(t) for n, t in self.tensors.items()}
        self.one_kernel = torch.cuda.is_available() and has_triton(torch.device("cuda")) and not self.int8

    @property
    def k(self) -> Tensor:
        return self.tensors["k"]

    @property
    def v(self) -> Tensor:
        return self.tensors["v"]

    def scales(self, layer: int) -> dict[str, Tensor]:
        """What an int8 pool's reader needs besides k and v of a layer; nothing for the others."""
        return {n: t[layer] for n, t in self.tensors.items() if n.endswith("scale")}

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Where `slots` [tokens] (block * block_size + place in the block) lie in a layer seen as rows of head_dim numbers:
        [tokens, kv_heads]."""
        blocks, places = np.divmod(slots, self.block_size)
        heads = self.k.shape[2]
        return (blocks[:, None] * heads + np.arange(heads)) * self.block_size + places[:, None]

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Writes k, v [tokens, kv_heads, head_dim] at `slots` [tokens]."""
        self.put(layer, k, v, torch.from_numpy(self.places(slots.cpu().numpy())).to(k.device))

    def put(self, layer: int, k: Tensor, v: Tensor, places: Tensor) -> None:
        """The same, with `places(slots)` worked out before, once for all layers: int64.

        From the GPU into the CPU pool it is a kernel that writes pinned host memory over the link.
        """
        tensors = self.seen(k.is_cuda)
        if self.one_kernel and k.is_cuda:
            from neo_lite import gpu_kernels

            gpu_kernels.store(k, v, tensors["k"][layer], tensors["v"][layer], places)
            return
        for name, x in (("k", k), ("v", v)):
            if self.int8:
                x, scale = quantize(x)
                tensors[name + "_scale"][layer].view(-1)[places] = scale
            tensors[name][layer].view(-1, x.shape[-1])[places] = x

    def seen(self, by_gpu: bool) -> dict[str, Tensor]:
        """The tensors as the GPU or as the host addresses them."""
        return self._by_gpu if by_gpu and self._by_gpu else self.tensors

    def read(self, by_gpu: bool, name: str, layer: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Blocks of one layer's k or v [blocks, kv_heads, block_size, head_dim] in `dtype`."""
        tensors = self.seen(by_gpu)
        x = tensors[name][layer].index_select(0, blocks)
        if self.int8:
            x = x.float() * tensors[name + "_scale"][layer].index_select(0, blocks)[..., None].float()
        return x.to(dtype)

    def write(self, by_gpu: bool, name: str, layer: int, blocks: Tensor, x: Tensor) -> None:
        """Whole blocks, as `read` gives them."""
        tensors = self.seen(by_gpu)
        if self.int8:
            x, scale = quantize(x)
            tensors[name + "_scale"][layer].index_copy_(0, blocks, scale)
        tensors[name][layer].index_copy_(0, blocks, x)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., head_dim] -> int8 and its fp16 scale [...]: the largest number becomes 127, each token and head alone."""
    scale = (x.float().abs().amax(-1) / 127).to(torch.float16)
    safe = torch.where(scale > 0, scale, 1).float()[..., None]
    return (x.float() / safe).round().clamp(-127, 127).to(torch.int8), scale


class KVCache:
    """Both pools. On a machine without a GPU the "gpu" pool is host memory too, served by the torch backends."""

    def __init__(self, model: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.num_layers, self.device = model.num_layers, device
        host = torch.device("cpu")
        on_cpu = torch.int8 if config.cpu_kv_dtype == "int8" else dtype
        self.pools: dict[Device, KVPool] = {
            "gpu": KVPool(model, config.num_gpu_blocks, config.block_size, dtype, device, "gpu"),
            "cpu": KVPool(model, config.num_cpu_blocks, config.block_size, on_cpu, host, "cpu"),
        }

    def prepare(self, *moves: Move) -> Swap:
        """Moves that all go the same way, whose layers can be copied one by one."""
        (to,) = {move.target for move in moves}
        pairs = [pair for move in moves for pair in zip(move.source_blocks, move.target_blocks, strict=True)]
        return Swap(self.pools[OTHER[to]], self.pools[to], *torch.tensor(pairs, device=self.device).T.contiguous())

    def swap(self, move: Move) -> None:
        """Copies a whole request to its new blocks."""
        swap = self.prepare(move)
        for layer in range(self.num_layers):
            swap.layer(layer)


@dataclass(frozen=True)
class Swap:
    """The way of some requests from pool to pool. Both pools are addressed from the device that holds the index tensors."""

    source: KVPool
    target: KVPool
    from_blocks: Tensor  # int64 [blocks]
    to_blocks: Tensor

    def layer(self, layer: int) -> None:
        """Copies one layer's blocks."""
        if self.source.one_kernel and self.target.one_kernel and self.from_blocks.is_cuda:
            from neo_lite import gpu_kernels

            k, v, to_k, to_v = (p.seen(True)[name][layer] for p in (self.source, self.target) for name in "kv")
            gpu_kernels.copy_blocks(k, v, to_k, to_v, self.from_blocks, self.to_blocks)
            return
        on_gpu, dtype = self.from_blocks.is_cuda, (self.source if self.target.int8 else self.target).k.dtype
        for name in ("k", "v"):
            x = self.source.read(on_gpu, name, layer, self.from_blocks, dtype)
            self.target.write(on_gpu, name, layer, self.to_blocks, x)


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed host tensor on 2 MB pages, registered with CUDA where there is one.

    One page-table entry for 2 MB instead of 4 KiB, and registering after the first touch, made a pool 6 times faster to
    set up and 10 to 20 % faster to read than cudaHostAlloc on the 16-core host of an H200.
    """
    size = max(1, torch.Size(shape).numel() * dtype.itemsize)
    if not hasattr(mmap, "MAP_PRIVATE") or not hasattr(mmap, "MADV_HUGEPAGE"):  # Windows, macOS
        return torch.zeros(shape, dtype=dtype)
    # Python maps MAP_SHARED by default, where MADV_HUGEPAGE does nothing; one page more, to start on a 2 MB boundary
    region = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    offset = -whole.data_ptr() % HUGE_PAGE_BYTES
    tensor = whole[offset : offset + size].zero_()  # the first touch, by torch's threads
    if torch.cuda.is_available():
        _register(tensor)
    return tensor.view(dtype).view(shape)


def _register(tensor: Tensor) -> None:
    """Pins pages that exist already, until the tensor's memory goes."""
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(cudart.cudaHostRegister(address, tensor.numel(), 0)) != 0:
        raise NeoLiteError(f"{tensor.numel() / 2**30:.1f} GiB of host memory could not be pinned: lower cpu_kv_tokens")
    weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address)


class _Address:
    """Tells torch of memory that it did not allocate, as CUDA arrays do (it knows no bfloat16: bytes)."""

    def __init__(self, tensor: Tensor) -> None:
        self.keep = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.itemsize,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3
        }  # fmt: skip


def gpu_view(tensor: Tensor) -> Tensor:
    """A pinned host tensor as a CUDA tensor over the same memory: kernels read and write it over the link."""
    return torch.as_tensor(_Address(tensor), device="cuda").view(tensor.dtype).view(tensor.shape)
