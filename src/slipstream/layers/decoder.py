"""The decoder that Llama, Mistral and Qwen2 share: pre-norm blocks of rotary grouped attention and a gated MLP.

h ─┬─ norm ─ qkv ─ rope ─ attention ─ out ─ + ─┬─ norm ─ gate, up ─ silu(gate) * up ─ down ─ + ─►
   └────────────────────────────────────────┘  └─────────────────────────────────────────────┘
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.attention.base import AttentionStep
from slipstream.attention.kv import LayerKV
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Product
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rotary import Rotary, Turn


class Attention:
    """Rotary grouped-query attention of one layer; keys and values go through the pass's `AttentionStep`."""

    __slots__ = ("head_dim", "layer", "num_heads", "num_kv_heads", "out", "qkv", "scale")

    def __init__(self, layer: int, qkv: Product, out: Product, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.layer = layer
        self.qkv = qkv
        self.out = out
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def __call__(self, x: Tensor, turn: Turn, attention: AttentionStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        turned = turn(qkv[:, : heads + kv_heads])
        mixed = attention(self.layer, turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :], self.scale)
        return self.out(mixed.reshape(x.shape[0], heads * self.head_dim))


class GatedMLP:
    """silu(gate) * up, then down."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Product, down: Product) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate).mul_(up))


class Block:
    """One layer of the decoder."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, hidden: Tensor, turn: Turn, attention: AttentionStep) -> Tensor:
        """The residual [T, hidden] before the layer -> behind it, a new tensor (taps keep the old one)."""
        hidden = self.attention(self.attention_norm(hidden), turn, attention).add_(hidden)
        return self.mlp(self.mlp_norm(hidden)).add_(hidden)


class Decoder:
    """A whole decoder; satisfies `models.base.CausalLM`.

    Args:
        embedding: token table [vocab, hidden].
        blocks: the layers, in order.
        norm: the final norm.
        head: [vocab, hidden] product to logits; may share the embedding's weight.
        rotary: frequencies.
        context_len: most positions the model can take.
    """

    def __init__(
        self, embedding: Embedding, blocks: tuple[Block, ...], norm: RMSNorm, head: Product, rotary: Rotary, context_len: int
    ) -> None:
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.context_len = context_len
        self.vocab_size = head.num_outputs
        self.hidden_size = embedding.weight.shape[1]
        self.num_layers = len(blocks)
        self.dtype: torch.dtype = embedding.weight.dtype
        self.kv_layers = tuple(
            LayerKV(block.attention.num_kv_heads, block.attention.head_dim, block.attention.head_dim, self.dtype)
            for block in blocks
        )

    def forward(self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """See `models.base.CausalLM.forward`."""
        hidden = self.embedding(tokens)
        turn = self.rotary.at(attention.layout.positions, self.dtype)
        tapped: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            if index in taps:
                tapped[index] = hidden
            hidden = block(hidden, turn, attention)
        tapped[self.num_layers] = hidden
        states = torch.cat([tapped[index] for index in taps], -1) if taps else None
        return self.norm(hidden), states

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab_size]."""
        return self.head(hidden)
