"""Attention over a paged KV cache: one signature, five backends. Called by the pipeline, once a layer and part.

    backend(q, k, v, k_cache, v_cache, view) -> out

    q        [tokens, q_heads, head_dim]   the new tokens' queries, sequence after sequence
    k, v     [tokens, kv_heads, head_dim]  the same tokens' keys and values; already stored wherever they are kept
    k_cache  [blocks, kv_heads, block_size, head_dim]  one layer of one pool (v_cache too)
    view     which tokens belong to which sequence, and where its KV lies
    out      [tokens, q_heads, head_dim]

A decode is a sequence with one new token; its KV is read through the block table. A whole prompt attends to its own
fresh k and v, and never looks into the pool, so that it also serves one whose KV leaves for the other device; a later
chunk finds all of them there. Each query head h uses KV head h // group_size (GQA).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from neo_lite.config import NeoLiteError
from neo_lite.cpu_attention import Kernel, KernelSpec, load_kernel

Backend = Callable[..., Tensor]


@dataclass(frozen=True)
class View:
    """The sequences of one call."""

    query_lens: tuple[int, ...]  # new tokens of each sequence
    seq_lens: Tensor  # int32 [sequences]: tokens it attends to, the new ones included
    block_table: Tensor  # int32 [sequences, width]: unused entries are 0 and never read
    lens: tuple[int, ...] = ()  # seq_lens as the host knows them: asking the GPU would wait for it, in every layer

    def __post_init__(self) -> None:
        if len(self.lens) != len(self.query_lens):
            object.__setattr__(self, "lens", tuple(self.seq_lens.tolist()))


def reference(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, view: View) -> Tensor:
    """The definition, one sequence and one token at a time, in float64: what the others are tested against."""
    out, row = torch.empty_like(q), 0
    group = q.shape[1] // k_cache.shape[1]
    for i, count in enumerate(view.query_lens):
        seq_len = view.lens[i]
        keys, values = (c.double().repeat_interleave(group, dim=1) for c in gather(k_cache, v_cache, view, i))
        for position in range(seq_len - count, seq_len):
            scores = torch.einsum("hd,thd->ht", q[row].double(), keys[: position + 1]) * q.shape[2] ** -0.5
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values[: position + 1]).to(q.dtype)
            row += 1
    return out


def prefill(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, view: View) -> Tensor:
    """Causal attention of each prompt, or of a later chunk of one, through torch's SDPA (its flash kernel on a GPU)."""
    out, row = torch.empty_like(q), 0
    for i, (count, seq_len) in enumerate(zip(view.query_lens, view.lens)):
        part = slice(row, row := row + count)
        keys, values = (k[part], v[part]) if count == seq_len else gather(k_cache, v_cache, view, i)
        out[part] = _sdpa(q[part], keys, values, causal=count > 1)
    return out


def gathered_decode(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, view: View) -> Tensor:
    """A decode for each sequence: SDPA over its gathered blocks, padded to the longest. Runs anywhere, copies all."""
    if not view.query_lens:
        return torch.empty_like(q)
    keys, values = (c[view.block_table.long()].transpose(2, 3).flatten(1, 2) for c in (k_cache, v_cache))
    valid = torch.arange(keys.shape[1], device=q.device) < view.seq_lens[:, None]  # [sequences, width * block_size]
    # what was never written may be NaN, and 0 x NaN is NaN: the mask alone does not keep it out
    keys, values = (x.masked_fill_(~valid[..., None, None], 0.0).transpose(1, 2) for x in (keys, values))
    q = q.unflatten(1, (keys.shape[1], -1))  # the query heads of a group as so many queries of one KV head: no copies
    return F.scaled_dot_product_attention(q, keys, values, valid[:, None, None]).flatten(1, 2)


def triton_decode(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, view: View) -> Tensor:
    """The same in place, on a GPU with Triton (compute capability 8.0 and up)."""
    from neo_lite.gpu_kernels import paged_decode

    return paged_decode(q, k_cache, v_cache, view.block_table, view.seq_lens)


def gpu_decode_backend(device: torch.device, block_size: int = 16) -> Backend:
    """Triton from compute capability 8.0 on, where a block holds a power of two of tokens; else gathered SDPA."""
    return triton_decode if has_triton(device) and block_size & (block_size - 1) == 0 else gathered_decode


def has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device) >= (8, 0)


def capability(device: torch.device) -> tuple[int, int]:
    """The card's compute capability. $NEO_LITE_ASSUME=sm75 makes a newer card run what a T4 would run: fp16, no Triton,
    no flash kernel."""
    assumed = os.environ.get("NEO_LITE_ASSUME", "")
    if assumed not in ("", "sm75"):
        raise NeoLiteError(f"NEO_LITE_ASSUME is {assumed!r}: leave it out, or say sm75")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new prompt length, in tens of milliseconds
    torch.backends.cuda.enable_flash_sdp(not assumed)
    return (7, 5) if assumed else torch.cuda.get_device_capability(device)


def cpu_kernel_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, view: View, threads: int = 0, **scales: Tensor
) -> Tensor:
    """The same, on host tensors, through the C++ kernel: each byte of KV is read once, in place.

    `scales`: k_scale and v_scale of an int8 cache [blocks, kv_heads, block_size].
    """
    kernel = kernel_for(q, k_cache)
    return kernel(q, k_cache, v_cache, view.block_table, view.seq_lens, num_threads=threads, **scales)


def kernel_for(q: Tensor, k_cache: Tensor) -> Kernel:
    """The build for these shapes; compiles on its first use. Raises CompilerMissing where there is no compiler."""
    _, kv_heads, block_size, head_dim = k_cache.shape
    kv_dtype = "int8" if k_cache.dtype == torch.int8 else None
    return load_kernel(KernelSpec(head_dim, q.shape[1] // kv_heads, block_size, str(q.dtype)[6:], kv_dtype))


def gather(k_cache: Tensor, v_cache: Tensor, view: View, i: int) -> tuple[Tensor, Tensor]:
    """K and V of sequence i as [seq_len, kv_heads, head_dim]; the tail of its last block, never written, cut off."""
    seq_len, block_size = view.lens[i], k_cache.shape[2]
    blocks = view.block_table[i, : -(-seq_len // block_size)]
    k, v = (c.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, :seq_len] for c in (k_cache, v_cache))
    return k.transpose(0, 1), v.transpose(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """[new, q_heads, d] x [all, kv_heads, d] -> [new, q_heads, d]; the new tokens are the last of all."""
    new, total, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    # is_causal would align the first query with the first key; an explicit mask would keep torch from its flash kernel
    mask = causal_lower_right(new, total) if causal and new < total else None
    if group > 1 and q.is_cuda and capability(q.device) < (8, 0):
        # without the flash kernel, torch's memory-efficient one is left, which knows no GQA (or a third, which writes out
        # all scores)
        k, v, group = *(x.repeat_interleave(group, dim=1) for x in (k, v)), 1
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=group > 1)
    return out.squeeze(0).transpose(0, 1)
