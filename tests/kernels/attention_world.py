"""Streams of random queries, keys and values, fed to a backend over paged KV in any pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from slipstream.attention.base import AttentionBackend, BatchLayout
from slipstream.attention.kv import LayerKV
from slipstream.attention.registry import attention_backend
from tests.kernels.paged_world import PagedWorld, Part


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


class World(PagedWorld):
    """Sequences over one layer of KV."""

    def __init__(
        self,
        shape: Shape,
        num_sequences: int,
        max_len: int,
        page_size: int = 16,
        seed: int = 0,
        backend: AttentionBackend | None = None,
    ) -> None:
        super().__init__((shape.layer,), num_sequences, max_len, page_size, seed)
        self.shape = shape
        self.backend = backend or attention_backend("cpu")

    def feed(self, *parts: Part[Stream], layout: BatchLayout | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
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
