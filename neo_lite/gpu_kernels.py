"""What torch has no fast kernel for, in Triton: paged decode attention, RoPE in place, SwiGLU, and KV into and between the
pools. Called by `attention`, `model`, `kv_cache`.

All are limited by the card's memory bandwidth. Attention reads each byte of KV once, in place. One program reads a
split of one sequence's tokens in a few KV heads, for all query heads of their groups, with a running softmax; sequences
are split until there are ten programs for each multiprocessor, and a second kernel merges the splits (flash decoding).
How many splits depends on the number of sequences alone, and each sequence is shared out by its own length on the GPU: a
CUDA graph serves all lengths. On 8 SMs of an H200, 20 requests of 1,200 tokens are read at 531 to 573 GB/s in a CUDA
graph, at 515 launch by launch (a plain sum: 930).
Steps on the way: one head at a time, 64 tokens from addresses that each thread works out, 435; the number of the next
block read one step ahead, so that nothing waits for it, and one address for a block, 454 to 503; four heads of a block
at once, which lie side by side, in one product, whose entries for other heads' queries are masked out, 524; masks only in
the last step, without them 469; two stages instead of three, so that six programs fit a multiprocessor. TMA, products of
the transposes (wgmma), a persistent loop over sequences, and products without tensor cores gave less.

RoPE and SwiGLU took torch 7.5 of the 41 ms of a layer's 4,000 prefill tokens there, in seven kernels; here they take 0.8.
Through torch's indexing, storing the KV of 1,000 prompt tokens took 4.4 ms more of an iteration's 300. A swap of 1,000
tokens adds 2 to 5 ms to an iteration. Needs compute capability 8.0; below it torch serves.
Triton launches nothing for a grid of no programs, so that no tokens need no case of their own.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

TILE = 64  # rows of K, of all its heads, that a program reads in one step
WARPS, STAGES = 2, 2
LEAST = 64  # tokens of a split
PROGRAMS_PER_SM = 10


@triton.jit
def _share(seq_len, splits, LEAST: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens of one split of a sequence: equal shares, in whole steps."""
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, splits), STEP) * STEP, LEAST)


@triton.jit
def _visit(q, k_ptr, v_ptr, mask, other, live, scale, top, total, acc):  # type: ignore[no-untyped-def]
    """One step: reads K and V, and moves the running softmax on. `live`: the scores that count, [ROWS, columns]."""
    k = tl.load(k_ptr, mask, other, eviction_policy="evict_first")
    v = tl.load(v_ptr, mask, other, eviction_policy="evict_first")
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.44269504)  # 2^x is cheaper than e^x
    scores = tl.where(live, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total * fade + tl.sum(weights, 1), acc


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    q, k_ptr, v_ptr, table_ptr, first, end, head, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, TAKEN: tl.constexpr, PLACES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Tokens `first` to `end` of a sequence, from `head` on: the running maximum, sum and output of each row of q.

    A step takes STEP tokens of one block; PLACES: the same, padded to what a product needs. Whole steps need no masks.
    """
    ROWS: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = q.shape[1]
    rows, dims, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TAKEN * PLACES)
    tokens = columns % PLACES
    own = rows[:, None] // GROUP == columns[None] // PLACES  # the products of a query with its own head's keys
    lines = columns if PLACES == BLOCK else columns // PLACES * BLOCK + tokens
    offsets = lines[:, None] * DIM + dims[None]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    block = tl.load(table_ptr + first // BLOCK, first < end, 0)
    whole = first + tl.maximum(end - first, 0) // STEP * STEP if PLACES == STEP and DIM == WIDTH else first
    for start in range(first, whole, STEP):
        at = offsets + ((block.to(tl.int64) * HEADS + head) * BLOCK + start % BLOCK) * DIM
        block = tl.load(table_ptr + (start + STEP) // BLOCK, start + STEP < end, 0)
        top, total, acc = _visit(q, k_ptr + at, v_ptr + at, None, None, own, scale, top, total, acc)
    for start in range(whole, end, STEP):
        block = tl.load(table_ptr + start // BLOCK)
        at = offsets + ((block.to(tl.int64) * HEADS + head) * BLOCK + start % BLOCK) * DIM
        valid = (start + tokens < end) & (tokens < STEP)
        mask, live = valid[:, None] & (dims[None] < DIM), own & valid[None]
        top, total, acc = _visit(q, k_ptr + at, v_ptr + at, mask, 0.0, live, scale, top, total, acc)
    return top, total, acc


@triton.jit(do_not_specialize=("q_rows", "width", "splits"))
def _attend(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, max_ptr, sum_ptr, result_ptr, q_rows, width, splits, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr, TAKEN: tl.constexpr, PLACES: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """TAKEN heads side by side. Without splits the result; else out, max, sum [sequences, q_heads, splits], not normalised."""
    head, seq, split = tl.program_id(0) * TAKEN, tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(lens_ptr + seq)
    split_tokens = _share(seq_len, splits, LEAST, STEP)
    first = split * split_tokens
    end = tl.minimum(first + split_tokens, seq_len)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_POW2)
    real = (rows[:, None] < TAKEN * GROUP) & (dims[None] < DIM)
    q = tl.load(q_ptr + (seq * q_rows + head * GROUP + rows[:, None]) * DIM + dims[None], real, 0.0)
    top, total, acc = _read(
        q, k_ptr, v_ptr, table_ptr + seq * width, first, end, head, scale, HEADS, GROUP, DIM, BLOCK, TAKEN, PLACES, STEP
    )
    place = ((seq * HEADS + head) * GROUP + rows) * splits + split
    if SPLIT:
        tl.store(max_ptr + place, top, rows < TAKEN * GROUP)
        tl.store(sum_ptr + place, total, rows < TAKEN * GROUP)
        tl.store(out_ptr + place[:, None] * DIM + dims[None], acc, real)
    else:
        result = (acc / tl.maximum(total, 1e-38)[:, None]).to(result_ptr.dtype.element_ty)
        tl.store(result_ptr + place[:, None] * DIM + dims[None], result, real)


@triton.jit(do_not_specialize=("splits",))
def _merge(  # type: ignore[no-untyped-def]
    out_ptr, max_ptr, sum_ptr, lens_ptr, result_ptr, splits, LEAST: tl.constexpr, STEP: tl.constexpr, Q_HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_POW2: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: the splits weighted by 2^max and divided by the sum of all."""
    seq, q_head, dims = tl.program_id(0), tl.program_id(1), tl.arange(0, DIM_POW2)
    seq_len = tl.load(lens_ptr + seq)
    used = tl.cdiv(seq_len, _share(seq_len, splits, LEAST, STEP))
    top, total = float("-inf"), 0.0
    acc = tl.zeros([DIM_POW2], tl.float32)
    for start in range(0, used, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        place = (seq * Q_HEADS + q_head) * splits + split
        m = tl.load(max_ptr + place, split < used, float("-inf"))
        new_top = tl.maximum(top, tl.max(m, 0))
        fade, weights = tl.exp2(top - new_top), tl.exp2(m - new_top)
        parts = (split[:, None] < used) & (dims[None] < DIM)
        out = tl.load(out_ptr + place[:, None] * DIM + dims[None], parts, 0.0)
        total = total * fade + tl.sum(weights * tl.load(sum_ptr + place, split < used, 0.0), 0)
        acc = acc * fade + tl.sum(weights[:, None] * out, 0)
        top = new_top
    result = (acc / tl.maximum(total, 1e-38)).to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + (seq * Q_HEADS + q_head) * DIM + dims, result, dims < DIM)


def paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """q [sequences, q_heads, head_dim] (rows may be strided), caches [blocks, kv_heads, block_size, head_dim] of a block size
    that is a power of two, block_table and seq_lens int32; a sequence of 0 tokens gives zeros. Returns [sequences, q_heads,
    head_dim]."""
    count, q_heads, dim = q.shape
    _, heads, block, _ = k_cache.shape
    group = q_heads // heads
    assert q.stride()[1:] == (dim, 1) and q.stride(0) % dim == 0 and k_cache.is_contiguous() and v_cache.is_contiguous()
    tile = TILE if q.dtype != torch.float32 and dim <= 128 else TILE // 2
    step = min(block, tile)
    taken = next(n for n in (4, 2, 1) if heads % n == 0 and (n * group <= 16 and n * step <= tile or n == 1))
    splits = max(1, -(-PROGRAMS_PER_SM * multiprocessors() * taken // (count * heads)))
    result = q.new_empty(q.shape)
    out = maxima = sums = result
    if splits > 1:
        out, maxima, sums = (q.new_empty(count * q_heads * splits, n, dtype=torch.float32) for n in (dim, 1, 1))
    sizes = dict(DIM=dim, DIM_POW2=max(16, triton.next_power_of_2(dim)), LEAST=LEAST, STEP=step)
    _attend[(heads // taken, count, splits)](
        q, k_cache, v_cache, block_table, seq_lens, out, maxima, sums, result, q.stride(0) // dim, block_table.stride(0), splits,
        dim**-0.5, HEADS=heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(taken * group)), BLOCK=block, TAKEN=taken,
        PLACES=max(step, 16 // taken), SPLIT=splits > 1, num_warps=WARPS, num_stages=STAGES, **sizes,
    )  # fmt: skip
    if splits > 1:
        at_once = min(16, triton.next_power_of_2(splits))
        _merge[(count, q_heads)](
            out, maxima, sums, seq_lens, result, splits, Q_HEADS=q_heads, AT_ONCE=at_once, num_warps=1, **sizes
        )
    return result


@functools.cache
def multiprocessors() -> int:
    """Of this process's part of the GPU: `bench.partition` says how many those are, the card would name all of them."""
    return int(os.environ.get("NEO_LITE_NUM_SMS") or torch.cuda.get_device_properties(0).multi_processor_count)


@triton.jit(do_not_specialize=("stride",))
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, stride, HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_POW2: tl.constexpr,
    HALF_POW2: tl.constexpr,
):  # fmt: skip
    """All heads of one token; `stride`: heads from one token to the next."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_POW2)[:, None], tl.arange(0, HALF_POW2)[None]
    cos = tl.load(cos_ptr + token * 2 * HALF + dims, dims < HALF, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * 2 * HALF + dims, dims < HALF, 0.0).to(tl.float32)
    place, real = (token * stride + heads) * 2 * HALF + dims, (heads < HEADS) & (dims < HALF)
    first = tl.load(x_ptr + place, real, 0.0).to(tl.float32)
    second = tl.load(x_ptr + place + HALF, real, 0.0).to(tl.float32)
    tl.store(x_ptr + place, (first * cos - second * sin).to(x_ptr.dtype.element_ty), real)
    tl.store(x_ptr + place + HALF, (second * cos + first * sin).to(x_ptr.dtype.element_ty), real)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`model.rotate`: x [tokens, heads, d], whose tokens may lie apart."""
    tokens, heads, dim = x.shape
    assert x.stride()[1:] == (dim, 1) and x.stride(0) % dim == 0
    sizes = dict(HEADS=heads, HALF=dim // 2, HEADS_POW2=triton.next_power_of_2(heads))
    _rotate[(tokens,)](x, *rope, x.stride(0) // dim, HALF_POW2=triton.next_power_of_2(dim // 2), **sizes)
    return x


@triton.jit
def _swiglu(x_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + token * 2 * INNER + dims, dims < INNER, 0.0).to(tl.float32)
    up = tl.load(x_ptr + token * 2 * INNER + INNER + dims, dims < INNER, 0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * INNER + dims, out.to(out_ptr.dtype.element_ty), dims < INNER)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`model.swiglu`: [tokens, 2 * inner] -> [tokens, inner]."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    _swiglu[(tokens, triton.cdiv(inner, 1024))](gate_up, out, INNER=inner, BLOCK=1024)
    return out


@triton.jit(do_not_specialize=("k_stride", "v_stride"))
def _store(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, places_ptr, k_stride, v_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
    HEADS_POW2: tl.constexpr, DIM_POW2: tl.constexpr,
):  # fmt: skip
    """All heads of one token's key and value; strides: heads from one token to the next."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_POW2), tl.arange(0, DIM_POW2)[None]
    places = tl.load(places_ptr + token * HEADS + heads, heads < HEADS, 0).to(tl.int64)[:, None]
    real = (heads[:, None] < HEADS) & (dims < DIM)
    k = tl.load(k_ptr + (token * k_stride + heads[:, None]) * DIM + dims, real)
    v = tl.load(v_ptr + (token * v_stride + heads[:, None]) * DIM + dims, real)
    tl.store(k_cache_ptr + places * DIM + dims, k, real)
    tl.store(v_cache_ptr + places * DIM + dims, v, real)


def store(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, places: torch.Tensor) -> None:
    """`KVPool.put` of one layer: k, v [tokens, kv_heads, head_dim], whose tokens may lie apart; places [tokens, kv_heads].
    The caches may lie in pinned host memory."""
    tokens, heads, dim = k.shape
    assert all(x.stride()[1:] == (dim, 1) and x.stride(0) % dim == 0 for x in (k, v)) and places.is_contiguous()
    sizes = dict(HEADS=heads, DIM=dim, HEADS_POW2=triton.next_power_of_2(heads), DIM_POW2=triton.next_power_of_2(dim))
    _store[(tokens,)](k, v, k_cache, v_cache, places, k.stride(0) // dim, v.stride(0) // dim, **sizes)


@triton.jit
def _copy_blocks(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, to_k_ptr, to_v_ptr, from_blocks_ptr, to_blocks_ptr, SIZE: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """A part of one block's keys and values."""
    block, place = tl.program_id(0), tl.program_id(1) * PART + tl.arange(0, PART)
    source = tl.load(from_blocks_ptr + block).to(tl.int64) * SIZE + place
    target = tl.load(to_blocks_ptr + block).to(tl.int64) * SIZE + place
    k, v = tl.load(k_ptr + source, place < SIZE), tl.load(v_ptr + source, place < SIZE)
    tl.store(to_k_ptr + target, k, place < SIZE)
    tl.store(to_v_ptr + target, v, place < SIZE)


def copy_blocks(
    k: torch.Tensor, v: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor, from_blocks: torch.Tensor, to_blocks: torch.Tensor
) -> None:  # fmt: skip
    """Whole blocks of one layer from pool to pool, [blocks, kv_heads, block_size, head_dim] each: one kernel, since each on a
    stream of its own waits for room beside the compute stream's. Host memory is read and written over the link."""
    size = k[0].numel()
    grid = (len(from_blocks), triton.cdiv(size, 4096))
    _copy_blocks[grid](k, v, to_k, to_v, from_blocks, to_blocks, SIZE=size, PART=4096)
