"""Both pools: what is stored comes back, a swap moves a request whole or layer by layer and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from neo_lite.config import MODELS, EngineConfig, NeoLiteError
from neo_lite.kv_cache import KVCache, host_tensor
from neo_lite.request import Move, Request
from neo_lite.rows import blocks_of

TINY = MODELS["tiny"]


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16])
def cache(request):
    config = EngineConfig(block_size=4, gpu_kv_tokens=32, cpu_kv_tokens=48)
    cache = KVCache(TINY, config, request.param, torch.device("cpu"))
    for pool in cache.pools.values():
        pool.k.fill_(torch.nan), pool.v.fill_(torch.nan)
    return cache


def test_layout(cache):
    assert cache.pools["gpu"].k.shape == (2, 8, 2, 4, 16) and cache.pools["cpu"].v.shape == (2, 12, 2, 4, 16)


def test_store_writes_each_token_in_its_slot_and_no_other(cache):
    pool = cache.pools["gpu"]
    k, v = (torch.randn(3, 2, 16).to(pool.k.dtype) for _ in "kv")
    pool.store(1, k, v, torch.tensor([0, 7, 30]))
    for i, (block, place) in enumerate([(0, 0), (1, 3), (7, 2)]):
        assert torch.equal(pool.k[1, block, :, place], k[i]) and torch.equal(pool.v[1, block, :, place], v[i])
    assert (~pool.k.isnan()).sum() == k.numel() and pool.k[0].isnan().all()


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_swap_moves_whole_blocks_and_only_those(cache, target):
    source, to = ("gpu", "cpu") if target == "cpu" else ("cpu", "gpu")
    for tensor in (cache.pools[source].k, cache.pools[source].v):
        tensor.copy_(torch.randn(tensor.shape))
    before = cache.pools[source].k.clone()
    move = Move(Request(0, (1,)), target, (5, 1, 3), (2, 7, 0))
    cache.prepare(move).layer(1)
    assert cache.pools[to].k[0].isnan().all(), "one layer is one layer"
    cache.swap(move)
    for a, b in zip(move.source_blocks, move.target_blocks, strict=True):
        assert torch.equal(cache.pools[to].k[:, b], cache.pools[source].k[:, a])
        assert torch.equal(cache.pools[to].v[:, b], cache.pools[source].v[:, a])
    assert cache.pools[to].k[:, 1].isnan().all() and torch.equal(cache.pools[source].k, before)


def test_host_tensor_is_zeroed_aligned_and_shaped():
    tensor = host_tensor((3, 5), torch.bfloat16)
    assert tensor.shape == (3, 5) and tensor.dtype == torch.bfloat16 and not tensor.any()
    assert tensor.data_ptr() % (2 << 20) == 0
    tensor += 1
    assert tensor.sum() == 15


def test_a_pool_that_does_not_fit_is_refused_before_it_is_touched():
    with pytest.raises(NeoLiteError, match=r"cpu KV pool of \d+ tokens.*needs .* GiB, of .* GiB available"):
        KVCache(
            MODELS["llama-2-7b"],
            EngineConfig(gpu_kv_tokens=16, cpu_kv_tokens=10**9),
            torch.float16,
            torch.device("cpu"),
        )


def test_int8_keeps_each_number_to_half_a_step_and_never_requantises():
    config = EngineConfig(block_size=4, gpu_kv_tokens=32, cpu_kv_tokens=48, cpu_kv_dtype="int8")
    cache = KVCache(TINY, config, torch.float32, torch.device("cpu"))
    pool, blocks = cache.pools["cpu"], torch.tensor([3])
    first, second = torch.randn(3, 2, 16), 1000 * torch.randn(1, 2, 16)
    pool.store(0, first, first, torch.tensor([12, 13, 14]))
    before = pool.read(False, "k", 0, blocks, torch.float32)[0, :, :3].clone()
    pool.store(0, second, second, torch.tensor([15]))
    after = pool.read(False, "k", 0, blocks, torch.float32)[0]
    assert torch.equal(after[:, :3], before), "a large neighbour changes nothing"
    step = torch.cat((first, second)).abs().amax(-1, keepdim=True) / 127
    assert ((after.transpose(0, 1) - torch.cat((first, second))).abs() <= 0.51 * step).all()
    zero = torch.zeros(1, 2, 16)
    pool.store(0, zero, zero, torch.tensor([0]))
    assert (pool.read(False, "v", 0, torch.tensor([0]), torch.float32)[0, :, 0] == 0).all()


def test_swaps_quantise_on_the_way_to_the_cpu_and_not_on_the_way_back():
    config = EngineConfig(block_size=4, gpu_kv_tokens=32, cpu_kv_tokens=48, cpu_kv_dtype="int8")
    cache = KVCache(TINY, config, torch.float32, torch.device("cpu"))
    gpu, cpu = cache.pools["gpu"], cache.pools["cpu"]
    gpu.k.normal_(), gpu.v.normal_()
    cache.swap(Move(Request(0, (1,)), "cpu", (5, 1), (2, 7)))
    once = cpu.read(False, "k", 1, torch.tensor([2, 7]), torch.float32)
    assert 0 < (once - gpu.k[1][[5, 1]]).norm() < 0.01 * once.norm()
    cache.swap(Move(Request(0, (1,)), "gpu", (2, 7), (0, 3)))
    assert torch.equal(gpu.k[1][[0, 3]], once)


def test_several_moves_of_one_way_are_one_swap():
    config = EngineConfig(block_size=4, gpu_kv_tokens=32, cpu_kv_tokens=48)
    cache = KVCache(TINY, config, torch.float32, torch.device("cpu"))
    source, to = cache.pools["gpu"], cache.pools["cpu"]
    source.k.copy_(torch.randn(source.k.shape))
    moves = Move(Request(0, (1,)), "cpu", (5, 1), (2, 7)), Move(Request(1, (1,)), "cpu", (3,), (0,))
    cache.prepare(*moves).layer(1)
    for a, b in zip((5, 1, 3), (2, 7, 0), strict=True):
        assert torch.equal(to.k[1, b], source.k[1, a])
    assert not to.k[0].any() and not to.k[1, 1].any()
    with pytest.raises(ValueError):
        cache.prepare(moves[0], Move(Request(2, (1,)), "gpu", (1,), (1,)))


def test_a_block_table_is_converted_anew_only_where_it_changed():
    request = Request(0, (1,), block_table=[4, 2])
    first = blocks_of(request)
    assert first.tolist() == [4, 2] and blocks_of(request) is first
    request.block_table += [9]
    assert blocks_of(request).tolist() == [4, 2, 9]
    request.block_table = [7, 8, 1]  # as after a move: as many, others
    assert blocks_of(request).tolist() == [7, 8, 1]
