"""The layers of EAGLE heads: one decoder layer that looks at the target's states and at the token that follows each.

    EAGLE-1/2   s = f (the target's last state, normed)            h = fc(emb | s)
                r = h + attention(h);  s' = r + mlp(norm(r))       logits: the target's head on s'

    EAGLE-3     s = fc(f) (three of the target's states)           h = norm(emb) | norm(s)
                r = s + attention(h);  s' = r + mlp(norm(r))       logits: the head's own, on norm(s')

f and s at position t go with emb, the embedding of token t + 1; s' foretells token t + 2, and stands for s one position further
where the target has not been: that is how a head goes on by itself. Keys and values lie at position t.

Li et al., EAGLE (2024), EAGLE-2 (2024), EAGLE-3 (2025).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.attention.cpu import CpuStep
from slipstream.attention.kv import LayerKV
from slipstream.kernels.cpu.matrix import PackedMatrix
from slipstream.layers.decoder import Attention, GatedMLP
from slipstream.layers.embedding import Embedding
from slipstream.layers.fused import bare_layer
from slipstream.layers.linear import Product
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rotary import Rotary


class DraftHead(Protocol):
    """What the drafter asks of a head."""

    hidden_size: int
    dtype: torch.dtype
    taps: tuple[int, ...]  # target layers whose states it looks at
    kv_layer: LayerKV
    num_parameters: int  # what it shares with the target is not counted
    weight_bytes: int  # of these parameters, as they are held
    target_ids: Tensor | None  # [draft vocabulary] int64: the target's id of each of its own; None: they are the same

    def states(self, taps: Tensor) -> Tensor:
        """The target's states [T, len(taps) * hidden] -> s [T, hidden]."""
        ...

    def forward(self, tokens: Tensor, states: Tensor, attention: AttentionStep) -> Tensor:
        """One step of T tokens: `tokens` [T] int64 are those that follow; s [T, hidden] -> s' [T, hidden]."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """s' [N, hidden] -> [N, draft vocabulary]."""
        ...


class HeadLayer:
    """The part both kinds share: attention, then the MLP behind its norm. One call of our kernels where they know its parts.

    Args:
        attention: takes what the kind prepared for it.
        mlp_norm, mlp: behind the attention.
        rotary: with the head's own base; never the target's.
        dtype, kv_dtype: what the head computes in, and keeps keys and values in.
    """

    def __init__(
        self,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        rotary: Rotary,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self.kv_layer = LayerKV(attention.num_kv_heads, attention.head_dim, attention.head_dim, kv_dtype)
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._rotary = rotary
        self._kernel = bare_layer(attention, mlp_norm, mlp) if dtype == torch.float32 else None

    def __call__(self, x: Tensor, residual: Tensor, attention: AttentionStep) -> Tensor:
        """x [T, in] and the residual [T, hidden] -> s' [T, hidden]."""
        layout = attention.layout
        if self._kernel is not None and isinstance(attention, CpuStep):
            out = residual.clone(memory_format=torch.contiguous_format)
            tables = self._rotary.first_tables(max(layout.max_key_lens))
            self._kernel.forward(out, attention.batch, attention.cache, layout.positions, [tables], first=x)
            return out
        turns = (self._rotary.at(layout.positions, self.dtype),)
        residual = self._attention(x, turns, attention).add_(residual)
        return self._mlp(self._mlp_norm(residual)).add_(residual)


class Eagle1Head:
    """The head of EAGLE-1 and EAGLE-2; satisfies `DraftHead`.

    Args:
        embedding: token table.
        fuse: `fc`, of the embedding and the state.
        layer: the rest; it has no norm in front.
        final_norm: the target's.
        to_logits: the target's.
        taps: behind the target's last layer.
    """

    target_ids: Tensor | None = None
    num_parameters = 0
    weight_bytes = 0

    def __init__(
        self,
        embedding: Embedding,
        fuse: Product,
        layer: HeadLayer,
        final_norm: RMSNorm,
        to_logits: Callable[[Tensor], Tensor],
        taps: tuple[int, ...],
    ) -> None:
        self.hidden_size = fuse.num_outputs
        self.dtype = layer.dtype
        self.taps = taps
        self.kv_layer = layer.kv_layer
        self._embedding = embedding
        self._fuse = fuse
        self._layer = layer
        self._final_norm = final_norm
        self._to_logits = to_logits

    def states(self, taps: Tensor) -> Tensor:
        """See `DraftHead.states`."""
        return self._final_norm(taps).to(self.dtype)

    def forward(self, tokens: Tensor, states: Tensor, attention: AttentionStep) -> Tensor:
        """See `DraftHead.forward`."""
        fused = self._fuse(torch.cat((self._embedding(tokens).to(self.dtype), states), -1))
        return self._layer(fused, fused, attention)

    def logits(self, states: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        return self._to_logits(states)


class Eagle3Head:
    """The head of EAGLE-3; satisfies `DraftHead`.

    Args:
        embedding: token table.
        fuse: `fc`, of the target's states.
        embedding_norm, state_norm: in front of the attention.
        layer: attention over both, and the MLP.
        norm: in front of the logits; the state that is fed back is not normed.
        to_logits: product to the draft vocabulary.
        target_ids: see `DraftHead`.
        taps: target layers.
    """

    num_parameters = 0
    weight_bytes = 0

    def __init__(
        self,
        embedding: Embedding,
        fuse: Product,
        embedding_norm: RMSNorm,
        state_norm: RMSNorm,
        layer: HeadLayer,
        norm: RMSNorm,
        to_logits: Callable[[Tensor], Tensor],
        target_ids: Tensor | None,
        taps: tuple[int, ...],
    ) -> None:
        self.hidden_size = fuse.num_outputs
        self.dtype = layer.dtype
        self.taps = taps
        self.kv_layer = layer.kv_layer
        self.target_ids = target_ids
        self._embedding = embedding
        self._fuse = fuse
        self._embedding_norm = embedding_norm
        self._state_norm = state_norm
        self._layer = layer
        self._norm = norm
        self._to_logits = to_logits

    def states(self, taps: Tensor) -> Tensor:
        """See `DraftHead.states`."""
        return self._fuse(taps.to(self.dtype))

    def forward(self, tokens: Tensor, states: Tensor, attention: AttentionStep) -> Tensor:
        """See `DraftHead.forward`."""
        embedded = self._embedding_norm(self._embedding(tokens).to(self.dtype))
        return self._layer(torch.cat((embedded, self._state_norm(states)), -1), states, attention)

    def logits(self, states: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        if isinstance(self._to_logits, PackedMatrix) and self._norm.weight.dtype == torch.float32:
            return self._to_logits.of_norm(states, self._norm.weight, self._norm.eps)
        return self._to_logits(self._norm(states))
