"""Streams of random queries, keys and values, fed to a backend over paged KV in any pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from slipstream.attention.base import AttentionBackend, BatchLayout
from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache, LayerKV
from slipstream.attention.layout import build_layout, tree_ancestors
from slipstream.attention.registry import attention_backend
from slipstream.kernels.cpu.library import Kernels, kernels


def needed() -> Kernels:
    """The kernels; skips the test where there are none."""
    found = kernels()
    if found is None:
        pytest.skip("this machine cannot run the kernels; the log says why")
    return found


@dataclass(frozen=True)
class Shape:
    """Heads of a layer, what its KV is stored in, and how it attends."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    value_dim: int | None = None
    stored: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @cached_property
    def layer(self) -> LayerKV:
        return LayerKV(self.kv_heads, self.dim, self.value_dim or self.dim, self.stored)


@dataclass
class Stream:
    """One sequence's queries [N, heads, dim], keys and values [N, kv_heads, dim], in float32."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def draw(cls, shape: Shape, length: int, seed: int) -> Stream:
        gen = torch.Generator().manual_seed(seed)
        sizes = ((shape.heads, shape.dim), (shape.kv_heads, shape.dim), (shape.kv_heads, shape.layer.value_dim))
        return cls(*(torch.randn(length, *size, generator=gen) for size in sizes))

    def at(self, tokens: Sequence[int]) -> Stream:
        index = torch.tensor(list(tokens))
        return Stream(self.query[index], self.key[index], self.value[index])

    def copy(self) -> Stream:
        return Stream(self.query.clone(), self.key.clone(), self.value.clone())

    def __len__(self) -> int:
        return len(self.query)


@dataclass
class Part:
    """What one pass feeds of one sequence: tokens behind `base`, as a prompt chunk or a verify row; parents make it a tree."""

    sequence: int
    base: int
    tokens: Stream
    chunk: bool = False
    parents: tuple[int, ...] | None = None


class World:
    """Sequences over one layer of poisoned KV, their pages dealt out in a random order."""

    def __init__(
        self,
        shape: Shape,
        num_sequences: int,
        max_len: int,
        page_size: int = 16,
        seed: int = 0,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.shape, self.page_size, self.max_len = shape, page_size, max_len
        self.backend = backend or attention_backend("cpu")
        each = -(-max_len // page_size)
        pages = NUM_RESERVED_PAGES + num_sequences * each
        self.kv = KVCache((shape.layer,), pages, page_size, torch.device("cpu"), poison=True)
        order = torch.randperm(num_sequences * each, generator=torch.Generator().manual_seed(seed))
        self.tables = (order + NUM_RESERVED_PAGES).view(num_sequences, each)

    def layout(self, parts: Sequence[Part]) -> BatchLayout:
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

    def feed(self, *parts: Part, layout: BatchLayout | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """One pass: [tokens, heads, value_dim] of each part."""
        layout = layout or self.layout(parts)
        query, key, value = (
            torch.cat([getattr(part.tokens, name) for part in parts]).to(dtype) for name in ("query", "key", "value")
        )
        shape = self.shape
        out = self.backend.begin(layout, self.kv)(0, query, key, value, shape.scale, shape.window, shape.softcap)
        return list(out.split([len(part.tokens) for part in parts]))


def whole(shape: Shape, stream: Stream) -> Tensor:
    """The stream as one prompt, alone: what all other ways must repeat."""
    return World(shape, 1, len(stream)).feed(Part(0, 0, stream, chunk=True))[0]
