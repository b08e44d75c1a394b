"""Paged attention in plain torch: the oracle for faster backends, and a usable one on the CPU.

All verify rows go through one batched product per layer, each padded to the longest row; each prompt chunk goes on its own.
Keys and values are read only through `read_slots`, which points at the zero page behind a row's keys, so whatever else the
cache holds (NaN included) is never multiplied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import KVCache, LayerKV, from_rows, to_rows

KEYS_STEP = 32  # verify rows are given a multiple of so many keys


class ReferenceBackend:
    """`AttentionBackend` in plain torch."""

    def check(self, layers: Sequence[LayerKV]) -> None:
        """It takes everything."""

    def begin(self, layout: BatchLayout, kv: KVCache) -> ReferenceStep:
        """Prepare one pass. Masks are made at the first layer of each window, in its dtype."""
        return ReferenceStep(layout, kv)


def build() -> ReferenceBackend:
    """The backend, for the registry."""
    return ReferenceBackend()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prompt chunk: its tokens [start, stop) of the pass, the slots of its keys, and which of them each token sees."""

    start: int
    stop: int
    slots: Tensor | None  # None: the chunk starts its prompt, its keys are its own tokens'
    bias: Tensor | None  # [1, 1, tokens, keys]; None: plain causal


@dataclass(frozen=True, slots=True)
class _Rows:
    """All verify rows, R of W tokens each: shorter rows are filled up with repeats of their first token.

    Attributes:
        start: first token of the rows in the pass.
        num_rows, width, num_keys: R, W, K.
        gather: [R * W] token of each place, counted from `start`; None where all rows have W tokens.
        scatter: the place of each token; None likewise.
        slots: [R * kv_heads * K] rows of the cache seen as [num_slots * kv_heads, dim].
        bias: [R * kv_heads, 1 or groups * W, K], 0 or -inf.
    """

    start: int
    num_rows: int
    width: int
    num_keys: int
    gather: Tensor | None
    scatter: Tensor | None
    slots: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all layers of one shape and window share."""

    chunks: tuple[_Chunk, ...]
    rows: _Rows | None


class ReferenceStep:
    """`AttentionStep` in plain torch."""

    def __init__(self, layout: BatchLayout, kv: KVCache) -> None:
        self.layout = layout
        self.kv = kv
        self._longest = max(layout.max_key_lens)
        self._plans: dict[tuple[int, int, int | None], _Plan] = {}

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
        """See `AttentionStep.__call__`."""
        if window is not None and window >= self._longest:
            window = None
        shape = (query.shape[1], key.shape[1], window)
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = _plan(self.layout, *shape, query.dtype)
        sick = None
        if plan.rows is not None and plan.rows.width > 1:
            key, value, sick = _without_sick_nodes(plan.rows.start, key, value)
        keys, values = self.kv.layer(layer)
        key_rows, value_rows = to_rows(key, keys.dtype), to_rows(value, values.dtype)
        keys.index_copy_(0, self.layout.write_slots, key_rows)
        values.index_copy_(0, self.layout.write_slots, value_rows)
        if keys.dtype != query.dtype:  # a chunk's own tokens, too, are seen as they are stored
            key, value = from_rows(key_rows, query.dtype), from_rows(value_rows, query.dtype)
        parts = [_attend_chunk(chunk, query, key, value, keys, values, scale, softcap) for chunk in plan.chunks]
        if plan.rows is not None:
            mixed = _attend_rows(plan.rows, query, keys, values, scale, softcap)
            parts.append(mixed if sick is None else mixed.masked_fill(sick[:, None, None], math.nan))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plan(layout: BatchLayout, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> _Plan:
    ends = tuple(itertools.accumulate(layout.query_lens))
    chunks = tuple(
        _plan_chunk(layout, segment, ends[segment] - layout.query_lens[segment], ends[segment], window, dtype)
        for segment in range(layout.num_chunks)
    )
    if len(layout.query_lens) == layout.num_chunks:
        return _Plan(chunks, None)
    start = ends[layout.num_chunks - 1] if layout.num_chunks else 0
    return _Plan(chunks, _plan_rows(layout, start, heads // kv_heads, kv_heads, window, dtype))


def _without_sick_nodes(start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with zeros for verify tokens, from `start` on, whose own are not finite, and which these are.

    A node that a token does not see has weight 0, and 0 * NaN is NaN: a rejected node would spoil its whole row. Its own output
    becomes NaN instead, so that it still fails where it is accepted.
    """
    sick = ~(key[start:].isfinite().flatten(1).all(1) & value[start:].isfinite().flatten(1).all(1))
    here = sick[:, None, None]
    key = torch.cat([key[:start], key[start:].masked_fill(here, 0)])
    value = torch.cat([value[:start], value[start:].masked_fill(here, 0)])
    return key, value, sick


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)


def _plan_chunk(layout: BatchLayout, segment: int, start: int, stop: int, window: int | None, dtype: torch.dtype) -> _Chunk:
    num_keys = layout.max_key_lens[segment]
    fresh = num_keys == stop - start  # an upper bound of base + tokens: so the base is 0
    if fresh and (window is None or window >= num_keys):
        return _Chunk(start, stop, None, None)
    key = torch.arange(num_keys, device=layout.segment.device)
    last = (layout.base_lens[segment] + layout.index[start:stop])[:, None]
    visible = key <= last
    if window is not None:
        visible &= key > last - window
    return _Chunk(start, stop, None if fresh else layout.read_slots[segment, :num_keys], _bias(visible, dtype)[None, None])


def _plan_rows(layout: BatchLayout, start: int, groups: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> _Rows:
    device, first = layout.segment.device, layout.num_chunks
    lens = layout.query_lens[first:]
    num_rows, width = len(lens), max(lens)
    # Each new shape is a new kernel, made on the spot and kept: without steps, one for every length that ever occurs.
    num_keys = -(-max(layout.max_key_lens[first:]) // KEYS_STEP) * KEYS_STEP

    gather = scatter = None
    if min(lens) < width:
        starts = [end - length for end, length in zip(itertools.accumulate(lens), lens, strict=True)]
        places = [begin + (i if i < length else 0) for begin, length in zip(starts, lens, strict=True) for i in range(width)]
        gather = torch.tensor(places, device=device)
        scatter = torch.tensor([row * width + i for row, length in enumerate(lens) for i in range(length)], device=device)

    slots = layout.read_slots[first:, :num_keys]
    slots = functional.pad(slots, (0, num_keys - slots.shape[1]))  # the padding page
    head = torch.arange(kv_heads, device=device)[:, None]
    fine = (slots[:, None] * kv_heads + head).flatten()

    key = torch.arange(num_keys, device=device)
    base = layout.base_lens[first:, None, None]
    own = key - base  # [R, 1, K] place of each key in its row, below 0 for earlier ones
    node = torch.arange(width, device=device)[:, None]
    # Places and depths are counted from the base: a key of an earlier step at place -3 has depth -3.
    query_depth, key_depth = node, own
    if layout.ancestors is None or layout.ancestors.shape[1] == 1:
        visible = own <= node
    else:
        tree = layout.ancestors[start:]
        tree = (tree if gather is None else tree.index_select(0, gather)).view(num_rows, width, -1)
        nodes = tree.shape[2]
        place = own.clamp(0, nodes - 1)
        visible = (own < 0) | (tree.gather(2, place.expand(-1, width, -1)) & (own < nodes))
        if window is not None:
            if nodes > width:
                raise ValueError(f"a tree over several passes must have no window, but got {window}")
            # The places of a shorter row's own nodes come first, so that its filling does not matter here.
            depth = tree.sum(2) - 1  # [R, W]
            query_depth = depth[:, :, None]
            key_depth = torch.where(own < 0, own, depth[:, None].gather(2, own.clamp(0, width - 1)))
    if window is not None:
        visible = visible & (key_depth > query_depth - window)
    bias = _bias(visible, dtype)  # [R, W, K]
    if width > 1:
        bias = bias.repeat(1, groups, 1)  # rows of the product are ordered group, token
    bias = bias[:, None].expand(-1, kv_heads, -1, -1).reshape(num_rows * kv_heads, -1, num_keys)
    return _Rows(start, num_rows, width, num_keys, gather, scatter, fine, bias)


def _attend_chunk(
    chunk: _Chunk,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    query = query[chunk.start : chunk.stop]
    if chunk.slots is None:
        key, value = key[chunk.start : chunk.stop], value[chunk.start : chunk.stop]
    else:
        key = from_rows(keys.index_select(0, chunk.slots), query.dtype)
        value = from_rows(values.index_select(0, chunk.slots), query.dtype)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    if softcap is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=chunk.bias, is_causal=chunk.bias is None, scale=scale
        )
    else:
        bias = chunk.bias
        if bias is None:
            bias = _bias(query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(), query.dtype)
        out = (_capped(query @ key.transpose(2, 3), scale, softcap) + bias).softmax(-1) @ value
    return out[0].transpose(0, 1)


def _capped(scores: Tensor, scale: float, softcap: float) -> Tensor:
    return (scores * (scale / softcap)).tanh_() * softcap


def _attend_rows(rows: _Rows, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
    query = query[rows.start :]
    if rows.gather is not None:
        query = query.index_select(0, rows.gather)
    kv_heads, heads = keys.shape[1], query.shape[1]
    groups, batch = heads // kv_heads, rows.num_rows * kv_heads
    # [R, W, kv, G, D] -> [R * kv, G * W, D]; a view where W is 1.
    query = query.reshape(rows.num_rows, rows.width, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, groups * rows.width, -1)
    key = from_rows(keys.view(-1, keys.shape[2]).index_select(0, rows.slots), query.dtype).view(batch, rows.num_keys, -1)
    value = from_rows(values.view(-1, values.shape[2]).index_select(0, rows.slots), query.dtype).view(batch, rows.num_keys, -1)
    if softcap is None:
        scores = torch.baddbmm(rows.bias, query, key.transpose(1, 2), alpha=scale)
    else:
        scores = _capped(torch.bmm(query, key.transpose(1, 2)), scale, softcap) + rows.bias
    weights = scores.softmax(-1)
    out = torch.bmm(weights, value).view(rows.num_rows, kv_heads, groups, rows.width, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows.num_rows * rows.width, heads, -1)
    return out if rows.scatter is None else out.index_select(0, rows.scatter)
