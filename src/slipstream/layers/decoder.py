"""The decoder that our model types share: pre-norm blocks of grouped attention and a gated MLP.

h ─┬─ norm ─ qkv ─ (norm) ─ rope ─ attention ─ out ─ (norm) ─ + ─┬─ norm ─ gate, up ─ act(gate) * up ─ down ─ (norm) ─ + ─►
   └─────────────────────────────────────────────────────────────┘└────────────────────────────────────────────────────┘

What is in brackets only some types have: norms of each query and key head, norms behind the attention and the MLP. Layers differ
in their window and in which rotary embedding they turn by, if any.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.attention.kv import LayerKV
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Product
from slipstream.layers.norm import HeadNorm, RMSNorm
from slipstream.layers.rotary import Rotary, Turn
from slipstream.types import nothing


class Attention:
    """Grouped-query attention of one layer; keys and values go through the pass's `AttentionStep`.

    Args:
        layer: its place in the decoder.
        qkv: [T, hidden] -> queries, keys and values, head by head.
        out: back to the residual.
        num_heads, num_kv_heads, head_dim: sizes.
        scale: of the scores.
        head_norm: of queries and keys before they turn, or None.
        rotary: which of the decoder's rotary embeddings turns them; None: none does.
        window, softcap: see `AttentionStep.__call__`.
    """

    __slots__ = (
        "head_dim", "head_norm", "layer", "num_heads", "num_kv_heads", "out", "qkv", "rotary", "scale", "softcap", "window",
    )  # fmt: skip

    def __init__(
        self,
        layer: int,
        qkv: Product,
        out: Product,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        head_norm: HeadNorm | None,
        rotary: int | None,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self.layer = layer
        self.qkv = qkv
        self.out = out
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.head_norm = head_norm
        self.rotary = rotary
        self.window = window
        self.softcap = softcap

    def __call__(self, x: Tensor, turns: tuple[Turn, ...], attention: AttentionStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        if self.rotary is not None:
            qk = turns[self.rotary](qk)
        mixed = attention(
            self.layer, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :], self.scale, self.window, self.softcap
        )
        return self.out(mixed.reshape(x.shape[0], heads * self.head_dim))


class GatedMLP:
    """act(gate) * up, then down."""

    __slots__ = ("down", "inner")

    def __init__(self, inner: Product, down: Product) -> None:
        self.inner = inner
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.inner(x))


class Block:
    """One layer of the decoder; the two `after` norms only where a type has them."""

    __slots__ = ("after_attention", "after_mlp", "attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        after_attention: RMSNorm | None = None,
        after_mlp: RMSNorm | None = None,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.after_attention = after_attention
        self.after_mlp = after_mlp

    def __call__(self, hidden: Tensor, turns: tuple[Turn, ...], attention: AttentionStep) -> Tensor:
        """The residual [T, hidden] before the layer -> behind it, a new tensor (taps keep the old one)."""
        mixed = self.attention(self.attention_norm(hidden), turns, attention)
        if self.after_attention is not None:
            mixed = self.after_attention(mixed)
        hidden = mixed.add_(hidden)
        out = self.mlp(self.mlp_norm(hidden))
        if self.after_mlp is not None:
            out = self.after_mlp(out)
        return out.add_(hidden)


class Decoder:
    """A whole decoder; satisfies `models.base.CausalLM`.

    Args:
        embedding: token table [vocab, hidden].
        blocks: the layers, in order.
        norm: the final norm.
        head: [vocab, hidden] product to logits; may share the embedding's weight.
        rotaries: the rotary embeddings that layers choose from.
        context_len: most positions the model can take.
        logit_softcap: logits l become cap * tanh(l / cap); None: they stay.
        kv_dtype: of keys and values; None: the embedding's.
    """

    def __init__(
        self,
        embedding: Embedding,
        blocks: tuple[Block, ...],
        norm: RMSNorm,
        head: Product,
        rotaries: tuple[Rotary, ...],
        context_len: int,
        logit_softcap: float | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.rotaries = rotaries
        self.context_len = context_len
        self.logit_softcap = logit_softcap
        self.vocab_size = head.num_outputs
        self.hidden_size = embedding.hidden_size
        self.num_layers = len(blocks)
        self.dtype: torch.dtype = embedding.dtype
        self.kv_layers = tuple(
            LayerKV(block.attention.num_kv_heads, block.attention.head_dim, block.attention.head_dim, kv_dtype or self.dtype)
            for block in blocks
        )

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.base.CausalLM.forward`."""
        computes()
        hidden = self.embedding(tokens)
        turns = tuple(rotary.at(attention.layout.positions, self.dtype) for rotary in self.rotaries)
        tapped: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            if index in taps:
                tapped[index] = hidden
            hidden = block(hidden, turns, attention)
        tapped[self.num_layers] = hidden
        states = torch.cat([tapped[index] for index in taps], -1) if taps else None
        return self.norm(hidden), states

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab_size]."""
        logits = self.head(hidden)
        return logits if self.logit_softcap is None else (logits / self.logit_softcap).tanh_().mul_(self.logit_softcap)
