"""Paged blocks of both pools: who holds which, and nothing else knows how many are free.

A request's KV lives whole in one pool, in blocks of `block_size` tokens that need not be neighbours; `block_table[i]`
is the block of tokens i * block_size and on. The engine makes it, the scheduler alone calls it.
"""

from __future__ import annotations

from collections import deque

from neo_lite.request import Device, Move, Request


class Blocks:
    """The allocator of the GPU pool and the CPU pool."""

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.total: dict[Device, int] = {"gpu": num_gpu_blocks, "cpu": num_cpu_blocks}
        self._free: dict[Device, deque[int]] = {d: deque(range(n)) for d, n in self.total.items()}

    def free(self, device: Device) -> int:
        return len(self._free[device])

    def needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fits_ever(self, request: Request, device: Device) -> bool:
        return self.needed(request.max_total_tokens) <= self.total[device]

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Gives `request` room for `num_tokens` tokens; False, and nothing changed, if its pool is too full."""
        free, count = self._free[request.device], self.needed(num_tokens) - len(request.block_table)
        if count > len(free):
            return False
        for _ in range(count):
            request.block_table.append(free.popleft())
        return True

    def move(self, request: Request, target: Device) -> Move:
        """Gives `request` as many blocks in the other pool and frees its own; the caller runs the copy in order."""
        assert target != request.device and len(request.block_table) <= self.free(target)
        source, device = tuple(request.block_table), request.device
        request.device, request.block_table = target, [self._free[target].popleft() for _ in source]
        self._free[device].extend(source)
        request.num_swaps += 1
        return Move(request, target, source, tuple(request.block_table))

    def release(self, request: Request) -> None:
        """Takes all of its blocks back; its KV is lost."""
        self._free[request.device].extend(request.block_table)
        request.block_table = []
        request.num_computed = 0
