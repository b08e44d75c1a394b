"""The rows of a step that sample, with their drafts, and where tokens are sampled in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.attention.layout import tree_ancestors
from slipstream.sampling.nodes import Nodes
from slipstream.speculate.base import Draft


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that sample, with their drafts, as `verify` sees them. S rows, N nodes in all.

    Attributes:
        slots: [S] int64. base_lens: [S] int64, position of each root. limits: [S] int64.
        roots: [S] int64, token at the root.
        draft: W nodes a row (rows without draft have num_nodes 0).
        ancestors: [S, W + 1, W + 1] bool for trees, None for chains.
        flat_row, flat_node: [N] int64, row and node of each row of logits. row_ids: flat_row on the host.
        flat_index: [S, W + 1] int64, row of logits of each node (the root's where the node has none).
        depth: D, the deepest path of this step (host).
        history: [num_slots, context + 2] int64 with the root already in it. max_history_len: bound of base_lens + 1 (host).
    """

    slots: Tensor
    base_lens: Tensor
    limits: Tensor
    roots: Tensor
    draft: Draft
    ancestors: Tensor | None
    flat_row: Tensor
    flat_node: Tensor
    flat_index: Tensor
    row_ids: tuple[int, ...]
    depth: int
    history: Tensor
    max_history_len: int


def draft_paths(draft: Draft, ancestors: Tensor | None, depth: int) -> tuple[Tensor, Tensor]:
    """Tokens below the root on the way to each node: paths [S, W + 1, depth] int64 (-1 behind), depths [S, W + 1] int64."""
    rows, width = draft.tokens.shape
    device = draft.tokens.device
    nodes = torch.arange(width + 1, device=device)
    if ancestors is None:
        steps = torch.arange(depth, device=device)
        tokens = draft.tokens[:, None, :depth].expand(rows, width + 1, depth)
        return torch.where(steps < nodes[:, None], tokens, -1), nodes.expand(rows, -1)
    depths = ancestors.sum(2) - 1
    # Node a sits at place depth(a) - 1 of the path of each of its descendants; everything else goes to a column that is cut off.
    place = torch.where(ancestors, depths[:, None, :] - 1, depth)
    place = torch.where(nodes == 0, depth, place).clamp(max=depth)
    tokens = torch.cat([draft.tokens.new_full((rows, 1), -1), draft.tokens], 1)[:, None, :].expand(rows, width + 1, width + 1)
    paths = draft.tokens.new_full((rows, width + 1, depth + 1), -1).scatter(2, place, tokens)
    return paths[:, :, :depth], depths


def sampling_nodes(rows: SampledRows) -> Nodes:
    """The step's N nodes as the sampler sees them."""
    base = rows.base_lens
    if rows.draft.tokens.shape[1]:
        paths, depths = draft_paths(rows.draft, rows.ancestors, rows.depth)
        path, depth = paths[rows.flat_row, rows.flat_node], depths[rows.flat_row, rows.flat_node]
    else:
        path, depth = base.new_empty((rows.flat_row.shape[0], 0)), torch.zeros_like(base)
    position = base.index_select(0, rows.flat_row) + depth + 1
    return Nodes(rows.flat_row, position, path, depth, rows.slots, rows.history, base + 1, rows.max_history_len, rows.row_ids)


def row_ancestors(draft: Draft) -> Tensor | None:
    """`tree_ancestors` of a draft, or None for a chain."""
    return None if draft.parents is None else tree_ancestors(draft.parents)


def counted_nodes(draft: Draft) -> Tensor:
    """[S, W] bool: node j + 1 is no padding."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.num_nodes[:, None]
