"""Sequences over poisoned, paged KV, and the layout of a pass that feeds any pieces of them."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache, LayerKV
from slipstream.attention.layout import build_layout, tree_ancestors

Tokens = TypeVar("Tokens", bound=Sized)


@dataclass
class Part(Generic[Tokens]):
    """What one pass feeds of one sequence: tokens behind `base`, as a prompt chunk or a verify row; parents make it a tree."""

    sequence: int
    base: int
    tokens: Tokens
    chunk: bool = False
    parents: tuple[int, ...] | None = None


class PagedWorld:
    """Sequences whose pages are dealt out in a random order."""

    def __init__(self, layers: tuple[LayerKV, ...], num_sequences: int, max_len: int, page_size: int = 16, seed: int = 0) -> None:
        self.page_size, self.max_len = page_size, max_len
        each = -(-max_len // page_size)
        pages = NUM_RESERVED_PAGES + num_sequences * each
        self.kv = KVCache(layers, pages, page_size, torch.device("cpu"), poison=True)
        order = torch.randperm(num_sequences * each, generator=torch.Generator().manual_seed(seed))
        self.tables = (order + NUM_RESERVED_PAGES).view(num_sequences, each)

    def layout(self, parts: Sequence[Part[Tokens]]) -> BatchLayout:
        """Chunks must come first. A pass with a tree has trees only: its chains are trees too."""
        rows = [part for part in parts if not part.chunk]
        ancestors = None
        if any(part.parents is not None for part in rows):
            width = max(len(part.tokens) for part in rows) - 1
            chains = [part.parents or tuple(range(len(part.tokens) - 1)) for part in rows]
            filled = [[*chain, *[0] * (width - len(chain))] for chain in chains]
            ancestors = tree_ancestors(torch.tensor(filled).view(len(rows), width))
        return build_layout(
            page_tables=self.tables[[part.sequence for part in parts]],
            page_size=self.page_size,
            base_lens=torch.tensor([part.base for part in parts]),
            limits=torch.full((len(parts),), self.max_len),
            query_lens=tuple(len(part.tokens) for part in parts),
            max_key_lens=tuple(part.base + len(part.tokens) for part in parts),
            num_chunks=sum(part.chunk for part in parts),
            ancestors=ancestors,
        )
