"""A Llama in pieces: embed, pre_attention, (attention), post_attention, head.

The cut around attention is the point of the course: everything here is the same for every token and batches well;
attention, between the pieces, depends on each request's KV and may run elsewhere. Called by the pipeline. Weights
come tensor by tensor from `checkpoint`, q, k, v and gate, up fused, so that a layer is four matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from neo_lite.attention import has_triton
from neo_lite.config import ModelConfig, RopeScaling
from neo_lite.request import Request

if TYPE_CHECKING:
    from neo_lite.checkpoint import Checkpoint
    from neo_lite.parallel import Shard

COLD = 1e-6  # a temperature that is as good as 0: greedy
Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin: each [tokens, 1, head_dim]


@dataclass
class LayerWeights:
    """One layer. Matrices are [out, in], as in torch's linear; biases are None where the model has none."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(q_heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    o: torch.Tensor  # [hidden, q_heads * head_dim]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


class Llama:
    """The pieces, over weights on one device in one dtype. `tokenizer` has encode(text) and decode(ids).

    With a `shard` it is one rank's part of the `whole` model: its `config` is smaller, and what it adds up is summed
    over the ranks.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
    ) -> None:
        self.whole, self.shard, self.dtype, self.device = config, shard, dtype, device
        self.config = config = shard.config if shard else config
        self._rotate, self._swiglu = rotate, swiglu
        if has_triton(device):
            from neo_lite import gpu_kernels

            self._rotate, self._swiglu = gpu_kernels.rotate, gpu_kernels.swiglu
        self.tokenizer: Any = None
        self.source = ""
        self.inv_freq = rope_frequencies(config).to(device)
        self.layers = [self._empty_layer() for _ in range(config.num_layers)]
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.lm_head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self.norm = self._empty(config.hidden_size)

    # ---- The pieces, in the order a token meets them ----

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens] -> x [tokens, hidden]."""
        return self.shard.embed(tokens, self.embedding) if self.shard else F.embedding(tokens, self.embedding)

    def rope(self, positions: torch.Tensor) -> Rope:
        """cos and sin of each token's rotation, once for all layers."""
        angles = positions[:, None].float() * self.inv_freq  # [tokens, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def pre_attention(self, layer: int, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm, QKV, RoPE: x [tokens, hidden] -> q [tokens, q_heads, d], k, v [tokens, kv_heads, d], the three side by side in
        one tensor."""
        c, w = self.config, self.layers[layer]
        h = F.rms_norm(x, (c.hidden_size,), w.input_norm, c.rms_norm_eps)
        qkv = F.linear(h, w.qkv, w.qkv_bias).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        self._rotate(qkv[:, : c.num_heads + c.num_kv_heads], rope)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        return q, k, v

    def post_attention(self, layer: int, attn: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Output projection, norm, SwiGLU, both residuals: attn [tokens, q_heads, d], x -> next layer's x."""
        w = self.layers[layer]
        x = x + self._sum(F.linear(attn.flatten(1), w.o, w.o_bias))
        h = F.rms_norm(x, (self.config.hidden_size,), w.post_norm, self.config.rms_norm_eps)
        h = self._swiglu(F.linear(h, w.gate_up, w.gate_up_bias))
        return x + self._sum(F.linear(h, w.down, w.down_bias))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] of the tokens that sample -> logits [n, vocabulary], in the model's dtype."""
        x = F.rms_norm(x, (self.config.hidden_size,), self.norm, self.config.rms_norm_eps)
        logits = F.linear(x, self.lm_head)
        return self.shard.all_gather(logits) if self.shard else logits

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank has the sum over its own heads or columns of the MLP."""
        return self.shard.all_reduce(x) if self.shard else x

    # ---- Weights ----

    def load(self, checkpoint: Checkpoint) -> Llama:
        """Copies each tensor to its place as it comes, so that the host never holds more than one of them."""
        for name, tensor in checkpoint.tensors(device=self.device, dtype=self.dtype):
            if (place := self._place(name)) is not None:
                place.copy_(self.shard.part(name, tensor) if self.shard else tensor)
        self.source = checkpoint.source
        return self

    def _place(self, name: str) -> torch.Tensor | None:
        """Where a tensor of a transformers checkpoint goes: a whole weight, or rows of a fused one."""
        if not name.startswith("model.layers."):
            return (
                {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}.get(name)
                if name != "lm_head.weight"
                else self.lm_head
            )
        index, module, *rest = name.removeprefix("model.layers.").split(".")
        w = self.layers[int(index)]
        if not module.startswith(("self_attn", "mlp")):
            return {"input_layernorm": w.input_norm, "post_attention_layernorm": w.post_norm}[module]
        matrix, kind = rest
        field, rows = self._fused(matrix)
        whole = getattr(w, field + ("_bias" if kind == "bias" else ""))
        return whole[rows]

    def _fused(self, matrix: str) -> tuple[str, slice]:
        c = self.config
        q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        return {
            "q_proj": ("qkv", slice(0, q)), "k_proj": ("qkv", slice(q, q + kv)), "v_proj": ("qkv", slice(q + kv, q + 2 * kv)),
            "gate_proj": ("gate_up", slice(0, inner)), "up_proj": ("gate_up", slice(inner, 2 * inner)),
            "o_proj": ("o", slice(None)), "down_proj": ("down", slice(None)),
        }[matrix]  # fmt: skip

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_layer(self) -> LayerWeights:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention = (lambda n: self._empty(n)) if c.attention_bias else (lambda n: None)
        mlp = (lambda n: self._empty(n)) if c.mlp_bias else (lambda n: None)
        return LayerWeights(
            self._empty(c.hidden_size), self._empty(q + 2 * kv, c.hidden_size), attention(q + 2 * kv),
            self._empty(c.hidden_size, q), attention(c.hidden_size),
            self._empty(c.hidden_size), self._empty(2 * c.intermediate_size, c.hidden_size), mlp(2 * c.intermediate_size),
            self._empty(c.hidden_size, c.intermediate_size), mlp(c.hidden_size),
        )  # fmt: skip


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """RoPE, in place: x [tokens, heads, d]; dimension i and i + d/2 are the two coordinates that one angle turns."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x.copy_(x * cos + torch.cat((-second, first), dim=-1) * sin)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 * intermediate] -> [tokens, intermediate]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians a position of each pair of dimensions, float32 [head_dim / 2]."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / config.rope_theta**steps
    return inv_freq if config.rope_scaling is None else _scale(inv_freq, config.rope_scaling)


def _scale(inv_freq: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    """Llama-3.1: wavelengths past the trained context are stretched by `factor`, short ones kept, a ramp between."""
    turns = s.original_max_position * inv_freq / (2 * torch.pi)  # full turns within the trained context
    ramp = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return (1 - ramp) * inv_freq / s.factor + ramp * inv_freq


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request: logits [n, vocabulary]. A seed gives the same tokens in any batch."""
    tokens = logits.argmax(-1).tolist()
    for i, request in enumerate(requests):
        if request.sampling.temperature > COLD:
            tokens[i] = _draw(logits[i], request)
    return tokens


def _draw(logits: torch.Tensor, request: Request) -> int:
    """One token from the smallest set of tokens whose probability reaches top_p."""
    params = request.sampling
    logits = logits.cpu().double()
    probs, ids = torch.softmax((logits - logits.max()) / params.temperature, -1).sort(descending=True)
    probs[1:][(probs.cumsum(-1) - probs)[1:] >= params.top_p] = 0.0
    generator = torch.Generator().manual_seed((int(params.seed) * 1_000_003 + len(request.output)) % 2**63)
    return int(ids[torch.multinomial(probs, 1, generator=generator)])
