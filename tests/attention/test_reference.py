"""The reference backend against attention written out token by token in float64, on random ragged layouts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import NUM_RESERVED_PAGES, SCRATCH_PAGE, KVCache, LayerKV
from slipstream.attention.reference import ReferenceBackend
from slipstream.observe.guard import SyncGuard

LAYERS = 2


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


def check(
    segments: list[Segment],
    num_chunks: int,
    *,
    page_size: int,
    seed: int,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
    trees: bool = False,
    tolerance: float = 1e-12,
    windows: tuple[int | None, ...] = (None,) * LAYERS,
    softcap: float | None = None,
) -> None:
    rng = random.Random(seed)
    layout, num_pages = lay_out(segments, num_chunks, page_size, rng, trees)
    spec = LayerKV(kv_heads, dim, dim, dtype)
    kv = KVCache((spec,) * len(windows), num_pages, page_size, torch.device("cpu"), poison=True)
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    scale = 1 / math.sqrt(dim)
    step = ReferenceBackend().begin(layout, kv)
    for layer, window in enumerate(windows):
        keys, values = kv.layer(layer)
        past = [(draw(s.base, kv_heads, dim), draw(s.base, kv_heads, dim)) for s in segments]
        for s, (k, v) in zip(segments, past, strict=True):
            for position in range(s.base):
                keys[s.slot(position, page_size)] = k[position]
                values[s.slot(position, page_size)] = v[position]
        query, key, value = (draw(layout.num_tokens, n, dim) for n in (heads, kv_heads, kv_heads))
        with SyncGuard():
            out = step(layer, query, key, value, scale, window, softcap)
        assert out.dtype == dtype
        assert out.shape == query.shape
        at = 0
        for number, (s, (k, v)) in enumerate(zip(segments, past, strict=True)):
            for node in range(s.length):
                if s.base + node < s.limit:  # behind its limit a node's result is nobody's
                    seen = sorted(s.path(node)) if trees and number >= num_chunks else list(range(node + 1))
                    first = 0 if window is None else max(0, s.base + len(seen) - window)  # the first position it sees
                    own = [at + i for i in seen[max(0, first - s.base) :]]
                    k_seen, v_seen = torch.cat([k[first:], key[own]]), torch.cat([v[first:], value[own]])
                    expected = by_hand(query[at + node], k_seen, v_seen, scale, softcap)
                    torch.testing.assert_close(out[at + node].double(), expected, rtol=0, atol=tolerance)
                assert out[at + node].isfinite().all()
            at += s.length
        assert (keys[:page_size] == 0).all(), "the padding page must stay zero"


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


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_steps(page_size: int, trees: bool, seed: int) -> None:
    segments, num_chunks = random_segments(random.Random(f"{page_size}{trees}{seed}"), trees)
    check(segments, num_chunks, page_size=page_size, seed=seed, trees=trees)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
@pytest.mark.parametrize("seed", range(3))
def test_other_dtypes(dtype: torch.dtype, tolerance: float, seed: int) -> None:
    segments, num_chunks = random_segments(random.Random(seed), trees=True)
    check(segments, num_chunks, page_size=4, seed=seed, dtype=dtype, trees=True, tolerance=tolerance)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_windows_and_softcaps(softcap: float | None, trees: bool, seed: int) -> None:
    """Layers of different windows in one pass: shorter than a row, inside the earlier keys, longer than everything."""
    rng = random.Random(f"{trees}{seed}")
    segments, num_chunks = random_segments(rng, trees)
    windows = (rng.randrange(1, 5), None, rng.randrange(5, 30), 1000)
    check(segments, num_chunks, page_size=4, seed=seed, trees=trees, windows=windows, softcap=softcap)


def test_a_window_counts_depths_of_a_tree_and_not_places() -> None:
    """Node 6 lies 6 places behind the root and 2 levels: a window of 3 still shows it the root."""
    check([Segment(5, [-1, 0, 0, 0, 0, 0, 5])], 0, page_size=4, seed=4, trees=True, windows=(3,))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (9, 3)])
def test_head_groupings(heads: int, kv_heads: int) -> None:
    segments = [Segment(0, chain(5)), Segment(7, chain(3)), Segment(9, chain(1)), Segment(4, chain(3))]
    check(segments, 2, page_size=4, seed=1, heads=heads, kv_heads=kv_heads)


def test_rows_of_one_token() -> None:
    check([Segment(base, chain(1), slack=2) for base in (0, 1, 15, 16, 33)], 0, page_size=16, seed=3)


def test_rows_of_one_token_in_a_step_of_trees() -> None:
    check([Segment(base, chain(1)) for base in (0, 3)], 0, page_size=4, seed=3, trees=True)


def test_siblings_do_not_see_each_other() -> None:
    check([Segment(5, [-1, 0, 0, 1, 1, 2]), Segment(0, [-1, 0, 0])], 0, page_size=4, seed=4, trees=True)


def test_a_cache_of_another_dtype_rounds_what_it_stores() -> None:
    layout, num_pages = lay_out([Segment(0, chain(1))], 0, 4, random.Random(0), trees=False)
    kv = KVCache((LayerKV(1, 2, 2, torch.bfloat16),), num_pages, 4, torch.device("cpu"))
    value = torch.tensor([[[1.001, 2.0]]])
    out = ReferenceBackend().begin(layout, kv)(0, torch.ones(1, 1, 2), torch.ones(1, 1, 2), value, 1.0)
    assert out.dtype == torch.float32
    assert out.tolist() == [[[1.0, 2.0]]]


def test_agrees_with_the_layouts_own_mask() -> None:
    rng = random.Random(8)
    segments = [Segment(6, chain(4)), Segment(9, tree(rng, 5)), Segment(2, tree(rng, 3))]
    layout, _ = lay_out(segments, 1, 4, rng, trees=True)
    visible = layout.visible()
    at = 0
    for number, s in enumerate(segments):
        for node in range(s.length):
            own = s.path(node) if number else set(range(node + 1))
            expected = {*range(s.base), *(s.base + i for i in own)}
            seen = {k for k in range(visible.shape[1]) if visible[at + node, k] and k < s.base + s.length}
            assert seen == expected
        at += s.length
