"""Builds the `BatchLayout` of a forward pass from page tables, lengths and (for trees) parents. No device sync."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import SCRATCH_PAGE


def tree_ancestors(parents: Tensor) -> Tensor:
    """[R, W] parents of nodes 1..W -> [R, W + 1, W + 1] bool: node i's path to the root holds node j (itself included).

    Repeated squaring of the one-step relation: log2 of the width many small matrix products, no loop over nodes.
    """
    rows, width = parents.shape
    reach = torch.eye(width + 1, device=parents.device).expand(rows, -1, -1).clone()
    reach[:, 1:].scatter_(2, parents[:, :, None], 1.0)
    for _ in range(max(1, width.bit_length())):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def build_layout(
    *,
    page_tables: Tensor,
    page_size: int,
    base_lens: Tensor,
    limits: Tensor,
    query_lens: tuple[int, ...],
    max_key_lens: tuple[int, ...],
    num_chunks: int = 0,
    ancestors: Tensor | None = None,
    first_keys: Tensor | None = None,
    num_earlier: int = 0,
) -> BatchLayout:
    """Lay out S segments; the first `num_chunks` are prompt chunks, the rest verify rows.

    A draft tree that grows level by level is one segment over several passes (no chunks, no windows); a pass attends to the nodes
    that the passes before it wrote:

        keys     0 1 2 3 4 | a b | c d         base 5; this pass computes c and d, num_earlier is 2

    Args:
        page_tables: [S, max_pages] int64, padding page beyond a row's pages.
        page_size: tokens a page holds.
        base_lens: [S] int64, keys each segment has from earlier steps.
        limits: [S] int64; positions at or past it are written to the scratch page and read by nobody.
        query_lens: tokens of each segment (host).
        max_key_lens: upper bounds of base + query length (host).
        num_chunks: leading prompt chunks (host).
        ancestors: [R, W + 1, W + 1] bool for the R verify rows of a tree (see `tree_ancestors`), None for chains.
        first_keys: [S] int64, at most base_lens: keys below it are not there. None: all are.
        num_earlier: nodes of each segment that earlier passes wrote, counted in `ancestors` and in `max_key_lens` (host).
    """
    device = page_tables.device
    lens = np.asarray(query_lens, dtype=np.int64)
    num_segments = len(query_lens)
    segment_np = np.repeat(np.arange(num_segments), lens)
    starts = np.fromiter(itertools.accumulate(query_lens, initial=0), dtype=np.int64, count=num_segments + 1)[:-1]
    index_np = np.arange(segment_np.shape[0]) - np.repeat(starts, lens) + num_earlier
    segment, index = torch.from_numpy(segment_np).to(device), torch.from_numpy(index_np).to(device)

    base = base_lens.index_select(0, segment)
    limit = limits.index_select(0, segment)
    key = base + index
    table = page_tables.index_select(0, segment)
    last_page = page_tables.shape[1] - 1
    page = table.gather(1, (key // page_size).clamp(max=last_page)[:, None])[:, 0]
    scratch = SCRATCH_PAGE * page_size
    write_slots = torch.where(key < limit, page * page_size + key % page_size, scratch)

    keys = torch.arange(max(max_key_lens), device=device)
    ends = torch.minimum(base_lens + torch.from_numpy(lens).to(device) + num_earlier, limits)
    if first_keys is None:
        read_slots = page_tables.index_select(1, (keys // page_size).clamp(max=last_page)) * page_size + keys % page_size
    else:
        keys = keys + first_keys[:, None]
        read_slots = page_tables.gather(1, (keys // page_size).clamp(max=last_page)) * page_size + keys % page_size
    read_slots = torch.where(keys < ends[:, None], read_slots, 0)

    positions, mask = key, None
    if ancestors is not None:
        flat = torch.zeros((segment_np.shape[0], ancestors.shape[2]), dtype=torch.bool, device=device)
        first = int(lens[:num_chunks].sum())
        rows = segment[first:] - num_chunks
        flat[first:] = ancestors[rows, index[first:]]
        mask = flat
        depth = torch.cat([index[:first], flat[first:].sum(1) - 1])
        positions = base + depth
    positions = torch.minimum(positions, limit - 1)
    seen = base_lens if first_keys is None else base_lens - first_keys
    return BatchLayout(query_lens, max_key_lens, num_chunks, segment, index, positions, seen, write_slots, read_slots, mask)
