"""What a step's rows look like to a model, and the attention backend's contract.

A step is a flat list of T tokens in S segments; first the prompt chunks, then the verify rows:

    tokens    [ c0 c0 c0 c0 | c1 c1 | r0 n n n | r1 n n n | r2 ]        r: root (the bonus token), n: draft nodes
    segment     0             1       2          3          4
    index       0  1  2  3    0  1    0  1 2 3   0  1 2 3   0           place in its segment

A segment has `base` keys from earlier steps. Token j of it writes key base + j and sees the keys below base plus, in its own
segment, itself and what came before it: all j' <= j where `ancestors` is None (chunks and chains), else its path in the tree.
Its position for rope is base + its depth in the tree, which for chunks and chains is base + j.

A layer with a sliding window w shows a token at position p only what it would see anyway of the positions p - w + 1 to p. Keys
from earlier steps lie at their own positions; a node of a tree lies at base + its depth, so a window cuts the far end of the
node's path and not the nodes written before it:

    keys      0 1 2 3 4 | r a b c d        base 5; a, b: children of r; c: child of a; d: child of c
    position  0 1 2 3 4 | 5 6 6 7 8        window 3: c (position 7) sees r, a, c; d sees a, c, d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention.kv import KVCache, LayerKV


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The ragged rows of one forward pass. Host fields are bounds the scheduler knew; tensors are exact.

    Attributes:
        query_lens: tokens of each segment (host).
        max_key_lens: upper bound of keys each segment sees, its own tokens included (host).
        num_chunks: how many leading segments are prompt chunks (host).
        segment: [T] int64, segment of each token.
        index: [T] int64, place of each token in its segment, counting nodes that earlier passes wrote (`build_layout`).
        positions: [T] int64, rope position of each token.
        base_lens: [S] int64, keys a segment has from earlier steps.
        write_slots: [T] int64, KV slot each token's key and value go to (the scratch page for nodes beyond the limit).
        read_slots: [S, max(max_key_lens)] int64, KV slot of each key of a segment; padding slot 0 beyond its keys.
        ancestors: None, or [T, W] bool: token t sees token w of its own segment. W is the longest verify row, with the nodes
            that earlier passes wrote; chunk tokens' rows are unused, chunks are always causal.
    """

    query_lens: tuple[int, ...]
    max_key_lens: tuple[int, ...]
    num_chunks: int
    segment: Tensor
    index: Tensor
    positions: Tensor
    base_lens: Tensor
    write_slots: Tensor
    read_slots: Tensor
    ancestors: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.segment.shape[0]

    def visible(self) -> Tensor:
        """[T, K] bool: which keys of its segment each token sees; K is read_slots' width. For oracles and dense backends."""
        key = torch.arange(self.read_slots.shape[1], device=self.segment.device)
        base = self.base_lens.index_select(0, self.segment)[:, None]
        own = key - base
        causal = own <= self.index[:, None]
        if self.ancestors is None:
            return causal
        width = self.ancestors.shape[1]
        tree = self.ancestors.gather(1, own.clamp(0, width - 1)) & (own < width)
        return torch.where((self.segment < self.num_chunks)[:, None], causal, (own < 0) | tree)


class AttentionStep(Protocol):
    """Attention of one forward pass: the backend's prepared view of a layout over one model's KV."""

    layout: BatchLayout
    kv: KVCache

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write key and value [T, kv_heads, dim] of `layer` to the cache, then attend.

        Returns [T, heads, value_dim] in query's dtype. A draft node whose key or value is not finite makes its own output NaN
        and nobody else's.

        Args:
            layer: which of the KV's layers.
            query: [T, heads, dim]; heads is a multiple of kv_heads.
            key, value: [T, kv_heads, dim] and [T, kv_heads, value_dim].
            scale: of the scores.
            window: positions a token sees, its own included; None: all.
            softcap: scores s become softcap * tanh(s / softcap) before the mask; None: they stay.
        """
        ...


class AttentionBackend(Protocol):
    """Makes `AttentionStep`s. One file a backend; the file's name is the value of --attention-backend."""

    def check(self, layers: Sequence[LayerKV]) -> None:
        """Raise `ConfigError` for a model whose KV this backend does not take; called before anything is allocated."""
        ...

    def begin(self, layout: BatchLayout, kv: KVCache) -> AttentionStep:
        """Prepare what all layers of this pass share."""
        ...
