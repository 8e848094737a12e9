"""The two KV pools, and the copies between them. Called by the pipeline.

Layout of K and of V, the same on both devices: [layer, block, kv_head, block_size, head_dim]. One tile (a head of a
block: 16 tokens x 128 x 2 bytes) is a 4 KiB page, and the CPU kernel reads the tiles of a block one after the other.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from neo_lite.config import EngineConfig, ModelConfig, NeoLiteError
from neo_lite.machine import check_memory
from neo_lite.request import Device, Move

HUGE_PAGE_BYTES = 2 << 20


class KVPool:
    """K and V of one pool, in the model's dtype, zeroed."""

    def __init__(self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, name: str) -> None:
        shape = (model.num_layers, num_blocks, model.num_kv_heads, block_size, model.head_dim)
        self.block_size, self.name, self.device = block_size, name, device
        num_bytes = 2 * torch.Size(shape).numel() * dtype.itemsize
        what = f"the {name} KV pool of {num_blocks * block_size} tokens (lower {name}_kv_tokens)"
        if device.type == "cuda":
            check_memory(num_bytes, what, torch.cuda.mem_get_info(device)[0])
            self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        else:
            check_memory(num_bytes, what)
            self.k, self.v = (host_tensor(shape, dtype) for _ in range(2))

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes k, v [tokens, kv_heads, head_dim] at `slots` [tokens] (block * block_size + place in the block)."""
        blocks, places = slots // self.block_size, slots % self.block_size
        self.k[layer][blocks, :, places] = k
        self.v[layer][blocks, :, places] = v


class KVCache:
    """Both pools. On a machine without a GPU the "gpu" pool is host memory too, served by the torch backends."""

    def __init__(self, model: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.num_layers = model.num_layers
        host = torch.device("cpu")
        self.pools: dict[Device, KVPool] = {
            "gpu": KVPool(model, config.num_gpu_blocks, config.block_size, dtype, device, "gpu"),
            "cpu": KVPool(model, config.num_cpu_blocks, config.block_size, dtype, host, "cpu"),
        }

    def swap(self, move: Move) -> None:
        """Copies a whole request to its new blocks, layer by layer."""
        for layer in range(self.num_layers):
            self.swap_layer(move, layer)

    def swap_layer(self, move: Move, layer: int) -> None:
        """Copies one layer of a request's blocks between the pools."""
        source, target = self.pools["cpu" if move.target == "gpu" else "gpu"], self.pools[move.target]
        from_blocks = torch.tensor(move.source_blocks, device=source.device)
        to_blocks = torch.tensor(move.target_blocks, device=target.device)
        for a, b in ((source.k, target.k), (source.v, target.v)):
            b[layer].index_copy_(0, to_blocks, a[layer].index_select(0, from_blocks).to(target.device))


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
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


def _register(tensor: torch.Tensor) -> None:
    """Pins pages that exist already, until the tensor's memory goes."""
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(cudart.cudaHostRegister(address, tensor.numel(), 0)) != 0:
        raise NeoLiteError(f"{tensor.numel() / 2**30:.1f} GiB of host memory could not be pinned: lower cpu_kv_tokens")
    weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address)
