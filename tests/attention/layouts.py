"""Random ragged layouts written down in plain Python, and attention of one token in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import NUM_RESERVED_PAGES, SCRATCH_PAGE


@dataclass
class Segment:
    """One segment: keys from earlier steps, its own tokens' parents (-1: the root), and where its keys end for good."""

    base: int
    parents: list[int]
    slack: int = 0  # how far the host's bound is above the truth
    limit: int = 10**6
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.parents)

    def path(self, node: int) -> set[int]:
        out = {node}
        while self.parents[node] >= 0:
            node = self.parents[node]
            out.add(node)
        return out

    def slot(self, position: int, page_size: int) -> int:
        if position >= self.limit:
            return SCRATCH_PAGE * page_size
        return self.pages[position // page_size] * page_size + position % page_size


def chain(length: int) -> list[int]:
    return list(range(-1, length - 1))


def tree(rng: random.Random, length: int) -> list[int]:
    return [-1] + [rng.randrange(node) for node in range(1, length)]


def lay_out(segments: list[Segment], num_chunks: int, page_size: int, rng: random.Random, trees: bool) -> tuple[BatchLayout, int]:
    """Deal out shuffled pages and build the layout in plain Python. Returns it and the number of pages."""
    needs = [-(-min(s.base + s.length, s.limit) // page_size) for s in segments]
    pages = list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + sum(needs) + 3))
    num_pages = NUM_RESERVED_PAGES + len(pages)
    rng.shuffle(pages)
    for segment, need in zip(segments, needs, strict=True):
        segment.pages = [pages.pop() for _ in range(need)]
    max_key_lens = tuple(s.base + s.length + s.slack for s in segments)
    read = torch.zeros(len(segments), max(max_key_lens), dtype=torch.int64)
    for row, s in enumerate(segments):
        for position in range(min(s.base + s.length, s.limit)):
            read[row, position] = s.slot(position, page_size)
    tokens = [(number, node, s) for number, s in enumerate(segments) for node in range(s.length)]
    width = max([s.length for s in segments[num_chunks:]], default=1)
    ancestors = torch.zeros(len(tokens), width, dtype=torch.bool)
    for t, (number, node, s) in enumerate(tokens):
        if number >= num_chunks:
            ancestors[t, list(s.path(node))] = True
    layout = BatchLayout(
        query_lens=tuple(s.length for s in segments),
        max_key_lens=max_key_lens,
        num_chunks=num_chunks,
        segment=torch.tensor([number for number, _, _ in tokens]),
        index=torch.tensor([node for _, node, _ in tokens]),
        positions=torch.tensor([min(s.base + len(s.path(node)), s.limit) - 1 for _, node, s in tokens]),
        base_lens=torch.tensor([s.base for s in segments]),
        write_slots=torch.tensor([s.slot(s.base + node, page_size) for _, node, s in tokens]),
        read_slots=read,
        ancestors=ancestors if trees else None,
    )
    return layout, num_pages


def by_hand(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
    """One query [heads, dim] over keys and values [n, kv_heads, dim], in float64."""
    groups = query.shape[0] // keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        k, v = keys[:, head // groups].double(), values[:, head // groups].double()
        scores = (k @ query[head].double()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out.append(torch.exp(scores - torch.logsumexp(scores, 0)) @ v)
    return torch.stack(out)


def random_segments(rng: random.Random, trees: bool) -> tuple[list[Segment], int]:
    chunks = [
        Segment(rng.choice([0, 0, rng.randrange(1, 40)]), chain(rng.randrange(1, 20)), rng.choice([0, 0, 5])) for _ in range(3)
    ]
    chunks = chunks[: rng.randrange(4)]
    rows = []
    for _ in range(rng.randrange(0 if chunks else 1, 6)):
        length = rng.choice([1, 1, rng.randrange(1, 8)])
        parents = tree(rng, length) if trees else chain(length)
        base = rng.randrange(0, 40)
        limit = rng.choice([10**6, base + rng.randrange(1, length + 1)])
        rows.append(Segment(base, parents, rng.randrange(0, 9), limit))
    return chunks + rows, len(chunks)
