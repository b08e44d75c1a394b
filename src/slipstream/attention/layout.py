"""Builds the `BatchLayout` of a forward pass from page tables, lengths and (for trees) parents. No device sync."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import SCRATCH_PAGE

NUM_KEPT = 256  # of the layouts' constant parts: most steps are like one before


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
    """Lay out S segments of a token or more; the first `num_chunks` are prompt chunks, the rest verify rows.

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
    segment, index, lens = _places(query_lens, num_earlier, device)
    base, limit, table = base_lens, limits, page_tables
    if len(segment) != len(query_lens):
        base, limit, table = (each.index_select(0, segment) for each in (base, limit, table))
    key = base + index
    last_page = page_tables.shape[1] - 1
    page = table.gather(1, (key // page_size).clamp(max=last_page)[:, None])[:, 0]
    scratch = SCRATCH_PAGE * page_size
    write_slots = torch.where(key < limit, page * page_size + key % page_size, scratch)

    keys = torch.arange(max(max_key_lens), device=device)
    ends = torch.minimum(base_lens + lens, limits)
    if first_keys is None:
        read_slots = page_tables.index_select(1, (keys // page_size).clamp(max=last_page)) * page_size + keys % page_size
    else:
        keys = keys + first_keys[:, None]
        read_slots = page_tables.gather(1, (keys // page_size).clamp(max=last_page)) * page_size + keys % page_size
    read_slots = torch.where(keys < ends[:, None], read_slots, 0)

    positions, mask = key, None
    if ancestors is not None:
        flat = torch.zeros((len(segment), ancestors.shape[2]), dtype=torch.bool, device=device)
        first = sum(query_lens[:num_chunks])
        rows = segment[first:] - num_chunks
        flat[first:] = ancestors[rows, index[first:]]
        mask = flat
        depth = torch.cat([index[:first], flat[first:].sum(1) - 1])
        positions = base + depth
    positions = torch.minimum(positions, limit - 1)
    seen = base_lens if first_keys is None else base_lens - first_keys
    return BatchLayout(query_lens, max_key_lens, num_chunks, segment, index, positions, seen, write_slots, read_slots, mask)


def chain_layouts(
    *,
    page_tables: Tensor,
    page_size: int,
    base_lens: Tensor,
    limits: Tensor,
    max_key_lens: tuple[int, ...],
    num_levels: int,
    first_keys: Tensor | None = None,
) -> list[BatchLayout]:
    """The layouts of a chain that grows by a token a pass: those that `build_layout` makes, with less work.

        pass 0       keys 0 1 2 3 4 | a           base 5; one token a segment
        pass 1       keys 0 1 2 3 4 a | b         base 6
        pass 2       keys 0 1 2 3 4 a b | c

    Args:
        page_tables, page_size, limits, first_keys: as there.
        base_lens: [S] int64, keys of each segment before the first pass.
        max_key_lens: upper bounds of base + 1 (host).
        num_levels: passes.
    """
    if num_levels < 1:
        return []
    device, longest = page_tables.device, max(max_key_lens)
    segment, index, _ = _places((1,) * len(max_key_lens), 0, device)
    last_page = page_tables.shape[1] - 1
    bases = base_lens + torch.arange(num_levels, device=device)[:, None]  # [L, S]
    page = page_tables.gather(1, (bases.t() // page_size).clamp(max=last_page)).t()
    write_slots = torch.where(bases < limits, page * page_size + bases % page_size, SCRATCH_PAGE * page_size)
    positions, ends = torch.minimum(bases, limits - 1), torch.minimum(bases + 1, limits)

    keys = torch.arange(longest + num_levels - 1, device=device)
    if first_keys is None:
        slots = page_tables.index_select(1, (keys // page_size).clamp(max=last_page)) * page_size + keys % page_size
        seen = bases
    else:
        keys = keys + first_keys[:, None]
        slots = page_tables.gather(1, (keys // page_size).clamp(max=last_page)) * page_size + keys % page_size
        seen = bases - first_keys
    layouts = []
    for level in range(num_levels):
        width = longest + level
        read_slots = torch.where(keys[..., :width] < ends[level][:, None], slots[:, :width], 0)
        own = (positions[level], seen[level], write_slots[level], read_slots)
        bounds = tuple(most + level for most in max_key_lens)
        layouts.append(BatchLayout((1,) * len(bounds), bounds, 0, segment, index, *own))
    return layouts


@functools.lru_cache(maxsize=NUM_KEPT)
def _places(query_lens: tuple[int, ...], num_earlier: int, device: torch.device) -> tuple[Tensor, ...]:
    """Segment of each token, its place in it, and the places of each segment, `num_earlier` counted. Not to be written to."""
    lens = np.asarray(query_lens, dtype=np.int64)
    segment = np.repeat(np.arange(len(lens)), lens)
    place = np.arange(len(segment)) - np.repeat(np.cumsum(lens) - lens, lens) + num_earlier
    return tuple(torch.from_numpy(each).to(device) for each in (segment, place, lens + num_earlier))
