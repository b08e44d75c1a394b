"""The backends against attention written out token by token in float64, on random ragged layouts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.attention.base import AttentionBackend
from slipstream.attention.kv import KVCache, LayerKV
from slipstream.attention.reference import ReferenceBackend
from slipstream.attention.registry import attention_backend
from slipstream.observe.guard import SyncGuard
from tests.attention.layouts import Segment, by_hand, chain, lay_out, random_segments, tree
from tests.cpu_kernels import needed

LAYERS = 2


@dataclass(frozen=True)
class Subject:
    """A backend at its most exact.

    `tolerance` for float32: scores of 16 products of about 1 are off by some 1e-6, and so are the weights they become.
    """

    name: str
    dtype: torch.dtype
    dim: int
    tolerance: float

    def backend(self) -> AttentionBackend:
        return attention_backend(self.name)


SUBJECTS = (Subject("reference", torch.float64, 8, 1e-12), Subject("cpu", torch.float32, 16, 2e-5))


def available(subject: Subject) -> Subject:
    if subject.name == "cpu":
        needed()
    return subject


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    return available(request.param)


def check(
    subject: Subject,
    segments: list[Segment],
    num_chunks: int,
    *,
    page_size: int,
    seed: int,
    heads: int = 6,
    kv_heads: int = 2,
    trees: bool = False,
    windows: tuple[int | None, ...] = (None,) * LAYERS,
    softcap: float | None = None,
) -> None:
    rng = random.Random(seed)
    dim, dtype, tolerance = subject.dim, subject.dtype, subject.tolerance
    layout, num_pages = lay_out(segments, num_chunks, page_size, rng, trees)
    spec = LayerKV(kv_heads, dim, dim, dtype)
    kv = KVCache((spec,) * len(windows), num_pages, page_size, torch.device("cpu"), poison=True)
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    scale = 1 / math.sqrt(dim)
    step = subject.backend().begin(layout, kv)
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


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_steps(subject: Subject, page_size: int, trees: bool, seed: int) -> None:
    segments, num_chunks = random_segments(random.Random(f"{page_size}{trees}{seed}"), trees)
    check(subject, segments, num_chunks, page_size=page_size, seed=seed, trees=trees)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("reference", torch.float32, 2e-5),
        ("reference", torch.bfloat16, 0.06),
        ("reference", torch.float16, 0.01),
        ("cpu", torch.bfloat16, 0.06),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_other_dtypes(name: str, dtype: torch.dtype, tolerance: float, seed: int) -> None:
    segments, num_chunks = random_segments(random.Random(seed), trees=True)
    subject = available(Subject(name, dtype, 16, tolerance))
    check(subject, segments, num_chunks, page_size=4, seed=seed, trees=True)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_windows_and_softcaps(subject: Subject, softcap: float | None, trees: bool, seed: int) -> None:
    """Layers of different windows in one pass: shorter than a row, inside the earlier keys, longer than everything."""
    rng = random.Random(f"{trees}{seed}")
    segments, num_chunks = random_segments(rng, trees)
    windows = (rng.randrange(1, 5), None, rng.randrange(5, 30), 1000)
    check(subject, segments, num_chunks, page_size=4, seed=seed, trees=trees, windows=windows, softcap=softcap)


def test_a_window_counts_depths_of_a_tree_and_not_places(subject: Subject) -> None:
    """Node 6 lies 6 places behind the root and 2 levels: a window of 3 still shows it the root."""
    check(subject, [Segment(5, [-1, 0, 0, 0, 0, 0, 5])], 0, page_size=4, seed=4, trees=True, windows=(3,))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (9, 3)])
def test_head_groupings(subject: Subject, heads: int, kv_heads: int) -> None:
    segments = [Segment(0, chain(5)), Segment(7, chain(3)), Segment(9, chain(1)), Segment(4, chain(3))]
    check(subject, segments, 2, page_size=4, seed=1, heads=heads, kv_heads=kv_heads)


def test_rows_of_one_token(subject: Subject) -> None:
    check(subject, [Segment(base, chain(1), slack=2) for base in (0, 1, 15, 16, 33)], 0, page_size=16, seed=3)


def test_rows_of_one_token_in_a_step_of_trees(subject: Subject) -> None:
    check(subject, [Segment(base, chain(1)) for base in (0, 3)], 0, page_size=4, seed=3, trees=True)


def test_siblings_do_not_see_each_other(subject: Subject) -> None:
    check(subject, [Segment(5, [-1, 0, 0, 1, 1, 2]), Segment(0, [-1, 0, 0])], 0, page_size=4, seed=4, trees=True)


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
