"""The allocator: no block is held twice, none is lost, and a refusal changes nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from neo_lite.blocks import Blocks
from neo_lite.request import OTHER, Request, SamplingParams

SIZES = st.integers(1, 40)


def held(requests: list[Request], device: str) -> list[int]:
    return [b for r in requests if r.device == device for b in r.block_table]


@settings(max_examples=200, deadline=None)
@given(
    gpu=SIZES, cpu=SIZES, block_size=st.sampled_from([1, 4, 16]),
    steps=st.lists(st.tuples(st.sampled_from(["grow", "move", "release"]), st.integers(0, 3), st.integers(1, 200)), max_size=60),
)  # fmt: skip
def test_every_block_is_free_or_held_once(gpu, cpu, block_size, steps):
    blocks = Blocks(gpu, cpu, block_size)
    requests = [Request(i, (1,)) for i in range(4)]
    for action, i, tokens in steps:
        request = requests[i]
        before, device = list(request.block_table), request.device
        if action == "grow":
            room = blocks.needed(tokens) - len(request.block_table) <= blocks.free(device)
            assert blocks.grow(request, tokens) == room
            assert request.block_table[: len(before)] == before
            assert (len(request.block_table) >= blocks.needed(tokens)) if room else request.block_table == before
        elif action == "release":
            blocks.release(request)
            assert request.block_table == [] and request.num_computed == 0
        elif len(before) <= blocks.free(OTHER[device]):
            move = blocks.move(request, OTHER[device])
            assert move.source_blocks == tuple(before) and move.target_blocks == tuple(request.block_table)
            assert request.device == OTHER[device]
        for pool, total in (("gpu", gpu), ("cpu", cpu)):
            mine = held(requests, pool)
            assert len(set(mine)) == len(mine) and all(0 <= b < total for b in mine)
            assert blocks.free(pool) + len(mine) == total


def test_blocks_needed_at_the_boundaries():
    blocks = Blocks(8, 8, 16)
    assert [blocks.needed(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_the_last_sampled_token_needs_no_room():
    request = Request(0, tuple(range(10)), SamplingParams(max_tokens=7))
    assert Blocks(1, 1, 16).fits_ever(request, "gpu")
    assert not Blocks(1, 1, 16).fits_ever(Request(0, tuple(range(10)), SamplingParams(max_tokens=8)), "gpu")
