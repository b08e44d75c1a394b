"""Attention by our kernels against a softmax in float64 over what the cache holds, and against the reference backend."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.attention import cpu
from slipstream.attention.kv import KVCache, LayerKV, from_rows, to_rows
from slipstream.attention.reference import ReferenceBackend
from slipstream.errors import ConfigError, InvariantBroken
from tests.cpu_kernels import needed
from tests.kernels.attention_world import Shape, Stream, World
from tests.kernels.paged_world import Part

STORED = (torch.float32, torch.bfloat16, torch.int8)
HALF = 2.0**-8  # most that rounding to bfloat16 changes, relatively


@pytest.fixture(autouse=True)
def there() -> Iterator[None]:
    library = needed()
    before = library.threads
    yield
    library.set_threads(before)


def expected(shape: Shape, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[heads, value_dim] of one query over the keys it sees, in float64, and how far from it each number may be.

    float32: scores of up to 256 products are off by about 1e-6 of the largest, weights by as much as their scores.
    bfloat16: weights w are rounded to w (1 + e), |e| <= 2^-8, in the sum as well: sum w e (v - out).
    int8: weight times scale is rounded, and the sum is not: sum w e v.
    """
    groups = shape.heads // shape.kv_heads
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("hd,khd->hk", query.double(), keys) * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    weights = scores.softmax(-1)
    out = torch.einsum("hk,khd->hd", weights, values)
    error = (1e-5 + 2e-6 * scores.abs().max()) * values.abs().amax(0)
    if shape.stored == torch.bfloat16:
        error = error + HALF * torch.einsum("hk,khd->hd", weights, (values - out).abs())
    elif shape.stored == torch.int8:
        error = error + HALF * torch.einsum("hk,khd->hd", weights, values.abs())
    return out, error


def compare(world: World, out: Tensor, part: Part, given: torch.dtype) -> None:
    shape = world.shape
    size, table = world.page_size, world.tables[part.sequence].tolist()
    slots = [table[position // size] * size + position % size for position in range(world.max_len)]
    keys, values = (from_rows(tensor, torch.float64) for tensor in world.kv.layer(0))
    rounded = part.tokens.query.to(given)
    if shape.stored != torch.float32:
        rounded = rounded.to(torch.bfloat16)
    for node in range(len(part.tokens)):
        end = part.base + node + 1
        seen = slots[max(0, end - (shape.window or end)) : end]
        wanted, error = expected(shape, rounded[node], keys[seen], values[seen])
        got = out[node].double()
        if given == torch.bfloat16:
            error = error + HALF * (wanted.abs() + error)  # the result is rounded as well
        assert ((got - wanted).abs() <= error).all(), ((got - wanted).abs() / error).max()


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1)])
def test_against_float64(stored: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    shape = Shape(heads, kv_heads, dim, stored=stored)
    check(shape, torch.float32, seed=dim + heads)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(window=1),
        Shape(window=70),
        Shape(softcap=0.7),
        Shape(softcap=30.0, window=9),
        Shape(dim=32, value_dim=80),
        Shape(28, 2),
    ],
    ids=str,
)
def test_windows_softcaps_and_other_shapes(stored: torch.dtype, given: torch.dtype, shape: Shape) -> None:
    check(replace(shape, stored=stored), given, seed=5)


def check(shape: Shape, given: torch.dtype, seed: int) -> None:
    """A prompt of 150 in two chunks, then a verify row of 4 and one of 1 beside it."""
    world = World(shape, 2, 200, page_size=8, seed=seed)
    stream = Stream.draw(shape, 200, seed)
    for parts in (
        [Part(0, 0, stream.at(range(97)), chunk=True), Part(1, 0, stream.at(range(20)), chunk=True)],
        [Part(0, 97, stream.at(range(97, 150)), chunk=True), Part(1, 20, stream.at([21]))],
        [Part(0, 150, stream.at(range(150, 154))), Part(1, 21, stream.at([30]))],
    ):
        for part, out in zip(parts, world.feed(*parts, dtype=given), strict=True):
            assert out.dtype == given
            compare(world, out, part, given)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("loud", [slice(0, 1024), slice(1024, 2048), slice(2048, 2100)], ids=["first", "second", "last"])
@pytest.mark.parametrize("count", [1, 2])
def test_parts_of_a_long_sequence_whose_scores_lie_far_apart(stored: torch.dtype, loud: slice, count: int) -> None:
    """Scores of one part are hundreds above the others': e to that power is beyond float32, and what is added is not lost."""
    needed().set_threads(count)
    shape = Shape(2, 1, 32, stored=stored)
    stream = Stream.draw(shape, 2100, 4)
    stream.key[loud] += 40 * stream.query[-1, 0]
    world = World(shape, 1, 2100)
    world.feed(Part(0, 0, stream.at(range(2099)), chunk=True))
    row = Part(0, 2099, stream.at([2099]))
    compare(world, world.feed(row)[0], row, torch.float32)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_is_what_the_reference_stores(stored: torch.dtype, given: torch.dtype) -> None:
    """Bit for bit: ties, a row of zeros, a very small one, a very large one."""
    shape = Shape(2, 2, 32, stored=stored)
    stream = Stream.draw(shape, 40, 3)
    stream.key[1], stream.key[2] = 0, 1e-35
    stream.value[3] *= 1e30
    stream.value[4] = torch.arange(32) + 0.5
    caches = []
    for backend in (None, ReferenceBackend()):
        world = World(shape, 1, 40, backend=backend)
        world.feed(Part(0, 0, stream, chunk=True), dtype=given)
        caches.append([tensor.view(torch.uint8) for tensor in world.kv.layer(0)])
        assert not world.kv.layer(0)[0][: world.page_size].any(), "the padding page must stay zero"
    for mine, theirs in zip(*caches, strict=True):
        assert torch.equal(mine, theirs)


def test_rows_of_eight_bits() -> None:
    """The largest magnitude is code 127; halves go to even; what is not finite reads as NaN."""
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 0.0], [0.0] * 6, [1.0, math.inf, 0, 0, 0, 0], [math.nan, 1.0, 0, 0, 0, 0]])
    rows = to_rows(x, torch.int8)
    assert rows.shape == (4, 10) and rows.dtype == torch.int8
    assert rows[0, :6].tolist() == [127, -127, 0, 2, -2, 0]
    back = from_rows(rows, torch.float64)
    assert back[:2].tolist() == [[127, -127, 0, 2, -2, 0], [0] * 6]
    assert back[2:].isnan().all()
    assert LayerKV(3, 64, 32, torch.int8).bytes_per_token == 3 * (68 + 36)
    kv = KVCache((LayerKV(3, 64, 32, torch.int8),), 4, 2, torch.device("cpu"), poison=True)
    assert [tuple(tensor.shape) for tensor in kv.layer(0)] == [(8, 3, 68), (8, 3, 36)]
    assert from_rows(kv.layer(0)[0][2:], torch.float32).isnan().all() and not from_rows(kv.layer(0)[0][:2], torch.float32).any()


def test_a_large_cache_is_like_a_small_one() -> None:
    """It lies in huge pages: aligned, with its padding page zero, and poisoned where that is asked for."""
    spec = LayerKV(2, 64, 64, torch.bfloat16)
    for poison in (False, True):
        keys, values = KVCache((spec,), 1024, 16, torch.device("cpu"), poison=poison).layer(0)
        for tensor in (keys, values):
            assert tensor.shape == (16384, 2, 64) and tensor.dtype == torch.bfloat16
            assert tensor.data_ptr() % 2**21 == 0 or sys.platform != "linux"
            assert not tensor[:16].any() and tensor[16:].isnan().all() == poison


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("parents", [None, (0, 0, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_a_node_that_is_not_finite_spoils_itself_alone(
    stored: torch.dtype, parents: tuple[int, ...] | None, bad: float, where: str
) -> None:
    shape = Shape(stored=stored)
    stream = Stream.draw(shape, 60, 1)
    results = []
    for spoil, backend in ((False, None), (True, None), (True, ReferenceBackend())):
        world = World(shape, 2, 80, backend=backend)
        world.feed(Part(0, 0, stream.at(range(50)), chunk=True), Part(1, 0, stream.at(range(30)), chunk=True))
        nodes = stream.at(range(50, 54))
        if spoil:
            getattr(nodes, where)[1, 0, 3] = bad
        results.append(world.feed(Part(0, 50, nodes, parents=parents), Part(1, 30, stream.at([9]), parents=parents and ())))
    (clean, beside), (spoiled, beside_spoiled), (reference, _) = results
    assert torch.equal(beside, beside_spoiled)
    assert spoiled[1].isnan().all()
    unseen = [0] if parents is None else [0, 2, 3]
    assert torch.equal(spoiled[unseen], clean[unseen])
    torch.testing.assert_close(spoiled, reference, rtol=0, atol=0.05, equal_nan=True)
    assert spoiled[2:].isfinite().all()


def test_what_rounds_to_infinity_is_not_finite() -> None:
    """The largest float32 is infinity as bfloat16; nodes that do not see it must not become NaN by it."""
    shape = Shape(stored=torch.bfloat16)
    stream = Stream.draw(shape, 20, 1)
    world = World(shape, 1, 30)
    world.feed(Part(0, 0, stream.at(range(10)), chunk=True))
    nodes = stream.at(range(10, 13))
    nodes.value[1] = torch.finfo(torch.float32).max
    out = world.feed(Part(0, 10, nodes))[0]
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_itself_alone(stored: torch.dtype, bad: float) -> None:
    shape = Shape(stored=stored)
    stream = Stream.draw(shape, 100, 1)
    clean = World(shape, 1, 100).feed(Part(0, 0, stream, chunk=True))[0]
    spoiled = stream.copy()
    spoiled.query[70, 2, 5] = bad
    out = World(shape, 1, 100).feed(Part(0, 0, spoiled, chunk=True))[0]
    assert out[70, 2].isnan().all()
    out[70, 2] = clean[70, 2]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_any_strides(stored: torch.dtype) -> None:
    """Slices of one tensor as the decoder has them, transposed ones, heads that share one tensor's memory."""
    shape = Shape(stored=stored)
    stream = Stream.draw(shape, 30, 1)
    wanted = World(shape, 1, 30).feed(Part(0, 0, stream, chunk=True))[0]
    joined = torch.cat((stream.query, stream.key, stream.value), 1)
    views = Stream(joined[:, :6], joined[:, 6:8], joined[:, 8:])
    across = Stream(*(x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (stream.query, stream.key, stream.value)))
    for given in (views, across):
        world = World(shape, 1, 30)
        layout = world.layout([Part(0, 0, stream, chunk=True)])
        step = world.backend.begin(layout, world.kv)
        assert torch.equal(step(0, given.query, given.key, given.value, shape.scale), wanted)
    shared = stream.copy()
    shared.key = shared.key[:, :1].expand(-1, 2, -1)
    world = World(shape, 1, 30)
    step = world.backend.begin(world.layout([Part(0, 0, stream, chunk=True)]), world.kv)
    got = step(0, shared.query, shared.key, shared.value, shape.scale)
    shared.key = shared.key.clone()
    assert torch.equal(got, World(shape, 1, 30).feed(Part(0, 0, shared, chunk=True))[0])


def test_slots_outside_the_cache_are_refused() -> None:
    shape = Shape()
    stream = Stream.draw(shape, 4, 1)
    world = World(shape, 1, 16)
    for spoil in ("read_slots", "write_slots"):
        for slot in (-1, world.kv.num_pages * world.page_size):
            layout = world.layout([Part(0, 0, stream, chunk=True)])
            getattr(layout, spoil).view(-1)[2] = slot
            with pytest.raises(InvariantBroken, match="slots must be those of the cache"):
                world.backend.begin(layout, world.kv)(0, stream.query, stream.key, stream.value, 1.0)


def test_what_the_kernels_do_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cpu.build()
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        backend.check([LayerKV(2, 64, 96, dtype)])
    for layer, said in (
        (LayerKV(2, 64, 64, torch.float64), "KV of float32, bfloat16 or int8, but the model's is float64"),
        (LayerKV(2, 64, 64, torch.float16), "but the model's is float16"),
        (LayerKV(2, 8, 64, torch.float32), "heads of a multiple of 16 from 16 to 256 dimensions, but the model's have 8"),
        (LayerKV(2, 64, 72, torch.float32), "but the model's have 72"),
        (LayerKV(2, 272, 64, torch.float32), "but the model's have 272"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            backend.check([LayerKV(2, 64, 64, torch.float32), layer])
        assert caught.value.hint and "reference" in caught.value.hint
    world = World(Shape(), 1, 16)
    stream = Stream.draw(world.shape, 4, 1)
    with pytest.raises(InvariantBroken, match="queries must be float32 or bfloat16"):
        world.feed(Part(0, 0, stream, chunk=True), dtype=torch.float64)
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    with pytest.raises(ConfigError, match="--attention-backend cpu must have a CPU with"):
        cpu.build()
