"""Every backend against the definition, on pools whose unwritten slots are NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_lite import attention
from neo_lite.attention import View


def paged(seq_lens, query_lens, q_heads, kv_heads, head_dim, block_size, dtype=torch.float32, seed=0):
    """q, the new tokens' k, v, both caches (NaN where nothing was written, blocks in random order) and the view."""
    g = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in seq_lens]
    order = torch.randperm(sum(needed) + 2, generator=g).tolist()
    table = torch.zeros(len(seq_lens), max(needed, default=1), dtype=torch.int32)
    k_cache, v_cache = (torch.full((len(order), kv_heads, block_size, head_dim), torch.nan, dtype=dtype) for _ in "kv")
    new: dict[str, list] = {"k": [], "v": []}
    for i, n in enumerate(seq_lens):
        table[i, : needed[i]] = torch.tensor([order.pop() for _ in range(needed[i])], dtype=torch.int32)
        for name, cache in (("k", k_cache), ("v", v_cache)):
            rows = torch.randn(n, kv_heads, head_dim, generator=g).to(dtype)
            for t in range(n):
                cache[table[i, t // block_size], :, t % block_size] = rows[t]
            new[name].append(rows[n - query_lens[i] :])
    q = torch.randn(sum(query_lens), q_heads, head_dim, generator=g).to(dtype)
    k, v = (torch.cat(new[n]) if seq_lens else torch.empty(0, kv_heads, head_dim, dtype=dtype) for n in "kv")
    return q, k, v, k_cache, v_cache, View(tuple(query_lens), torch.tensor(seq_lens, dtype=torch.int32), table)


def check(backend, case, tolerance):
    expected, out = attention.reference(*case), backend(*case)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert not out.isnan().any()
    assert (out - expected).norm() <= tolerance * expected.norm()


SHAPES = st.tuples(
    st.sampled_from([1, 2, 3]), st.sampled_from([1, 3, 4]), st.sampled_from([16, 64]), st.sampled_from([1, 8, 16])
)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seq_lens=st.lists(st.integers(1, 70), max_size=5), seed=st.integers(0, 99))
def test_gathered_decode_equals_the_reference(shape, seq_lens, seed):
    kv, group, dim, block = shape
    check(attention.gathered_decode, paged(seq_lens, [1] * len(seq_lens), kv * group, kv, dim, block, seed=seed), 1e-5)


@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES, lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=4), seed=st.integers(0, 99)
)
def test_prefill_equals_the_reference_for_first_and_later_chunks(shape, lens, seed):
    kv, group, dim, block = shape
    queries, before = [a for a, _ in lens], [b for _, b in lens]
    seq_lens = [a + b for a, b in lens]
    check(attention.prefill, paged(seq_lens, queries, kv * group, kv, dim, block, seed=seed + sum(before)), 1e-5)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([(3, 3, 64, 16), (2, 1, 16, 8), (1, 4, 16, 1)]), seq_lens=st.lists(st.integers(1, 200), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_cpu_kernel_equals_the_reference(compiler, shape, seq_lens, dtype, seed):
    kv, group, dim, block = shape
    case = paged(seq_lens, [1] * len(seq_lens), kv * group, kv, dim, block, dtype, seed)
    check(attention.cpu_kernel_decode, case, {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3}[dtype])


def test_the_reference_is_softmax_attention():
    """Against torch's own, on a cache of one sequence laid out by hand."""
    q, k, v, k_cache, v_cache, view = paged([5], [5], 4, 2, 16, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(attention.reference(q, k, v, k_cache, v_cache, view), expected[0].transpose(0, 1), atol=1e-6)


@pytest.mark.parametrize("backend", [attention.gathered_decode, attention.prefill])
def test_an_empty_batch_gives_an_empty_answer(backend):
    assert backend(*paged([], [], 4, 2, 16, 4)).shape == (0, 4, 16)
