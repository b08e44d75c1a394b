"""A token's result does not depend on what else the pass holds, nor on how its sequence was fed: the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.attention.layout import build_layout, tree_ancestors
from tests.cpu_kernels import needed
from tests.kernels.attention_world import Shape, Stream, World, whole
from tests.kernels.paged_world import Part

STORED = (torch.float32, torch.bfloat16, torch.int8)
SHAPES = {
    "plain": Shape(),
    "window": Shape(window=37),
    "short window": Shape(window=3, softcap=2.0),
    "softcap": Shape(heads=4, kv_heads=1, dim=80, softcap=5.0),
    "one head": Shape(heads=1, kv_heads=1, dim=32),
    "eight a head": Shape(heads=8, kv_heads=1, dim=16, value_dim=48),
    "wide": Shape(heads=3, kv_heads=3, dim=256),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Tests may change their number."""
    library = needed()
    before = library.threads
    yield
    library.set_threads(before)


@pytest.fixture(params=STORED, ids=str)
def stored(request: pytest.FixtureRequest) -> torch.dtype:
    one: torch.dtype = request.param
    return one


def same(got: Tensor, wanted: Tensor) -> None:
    """Equal bits; `torch.equal` would take 0 for -0."""
    assert wanted.isfinite().all()
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), (got - wanted).abs().max()


def others(shape: Shape, number: int, length: int) -> list[Stream]:
    return [Stream.draw(shape, length, 100 + i) for i in range(number)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks_of_any_length_on_any_pages(name: str, stored: torch.dtype, page_size: int) -> None:
    shape = replace(SHAPES[name], stored=stored)
    stream = Stream.draw(shape, 200, 1)
    wanted = whole(shape, stream)
    rng = random.Random(f"{name}{page_size}")
    world, base = World(shape, 1, 200, page_size, seed=page_size), 0
    while base < 200:
        length = min(rng.choice([1, 2, 7, 63, 64, 65, 100]), 200 - base)
        part = Part(0, base, stream.at(range(base, base + length)), chunk=rng.random() < 0.7)
        same(world.feed(part)[0], wanted[base : base + length])
        base += length


@pytest.mark.parametrize("name", SHAPES)
def test_alone_and_in_a_batch_of_32(name: str, stored: torch.dtype) -> None:
    """Decoding beside others of other lengths, beside prompts and verify rows of several tokens."""
    shape = replace(SHAPES[name], stored=stored)
    stream = Stream.draw(shape, 140, 1)
    wanted = whole(shape, stream)
    world = World(shape, 33, 160)
    neighbours = others(shape, 32, 160)
    rng = random.Random(name)
    bases = [rng.randrange(1, 150) for _ in neighbours]
    world.feed(Part(0, 0, stream.at(range(120)), chunk=True))
    for i, (neighbour, base) in enumerate(zip(neighbours, bases, strict=True)):
        world.feed(Part(i + 1, 0, neighbour.at(range(base)), chunk=True))
    for base in range(120, 140):
        rows = []
        for i, neighbour in enumerate(neighbours[:31]):
            length = min(rng.choice([1, 1, 4]), 160 - bases[i])
            rows.append(Part(i + 1, bases[i], neighbour.at(range(bases[i], bases[i] + length))))
        chunk = Part(32, 0, neighbours[31].at(range(rng.randrange(1, 90))), chunk=True)
        place = rng.randrange(32)
        rows.insert(place, Part(0, base, stream.at([base])))
        got = world.feed(chunk, *rows)
        same(got[1 + place], wanted[base : base + 1])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("base", [0, 61, 64, 127])
def test_verified_as_a_chain_and_on_the_path_of_a_tree(name: str, stored: torch.dtype, base: int) -> None:
    """Nodes that the path does not hold lie between its nodes, before and behind them; the path crosses a block's border."""
    shape = replace(SHAPES[name], stored=stored)
    stream, wrong = Stream.draw(shape, 140, 1), Stream.draw(shape, 140, 2)
    wanted = whole(shape, stream)[base : base + 6]
    path = stream.at(range(base, base + 6))

    def world() -> World:
        made = World(shape, 2, 160)
        if base:
            made.feed(Part(0, 0, stream.at(range(base)), chunk=True))
        made.feed(Part(1, 0, wrong.at(range(50)), chunk=True))
        return made

    same(world().feed(Part(0, base, path))[0], wanted)
    same(world().feed(Part(0, base, path, parents=(0, 1, 2, 3, 4)))[0], wanted)
    #         0 is the root; on the path: 0 2 3 6 7 9
    parents = (0, 0, 2, 2, 1, 3, 6, 5, 7)
    places = [0, 2, 3, 6, 7, 9]
    nodes = wrong.at(range(60, 70))
    for place, token in zip(places, range(6), strict=True):
        for mixed, right in ((nodes.query, path.query), (nodes.key, path.key), (nodes.value, path.value)):
            mixed[place] = right[token]
    beside = Part(1, 50, wrong.at(range(50, 53)), parents=(0, 0))
    for parts in ([Part(0, base, nodes, parents=parents), beside], [beside, Part(0, base, nodes, parents=parents)]):
        got = world().feed(*parts)[0 if parts[1] is beside else 1]
        same(got[places], wanted)


@pytest.mark.parametrize("window", [None, 1100])
def test_long_sequences_shared_out_by_keys(stored: torch.dtype, window: int | None) -> None:
    """Beyond 1024 keys a lone row is computed in parts, of one KV head or, where there are many parts, of all; within a prompt,
    and beside many rows, it is not.
    """
    shape = Shape(heads=4, kv_heads=2, dim=32, stored=stored, window=window)
    length = 3300
    stream = Stream.draw(shape, length, 1)
    library = needed()
    library.set_threads(1)
    wanted = whole(shape, stream)
    world = World(shape, 9, length)
    world.feed(Part(0, 0, stream, chunk=True))
    for base in (1023, 1024, 1025, 2047, 2300, 3299):
        row = Part(0, base, stream.at([base]))
        for count in (1, 2, 3):
            library.set_threads(count)
            same(world.feed(row)[0], wanted[base : base + 1])
        many = [Part(i, 0, stream.at([0]), chunk=True) for i in range(1, 9)]
        same(world.feed(*many, row)[-1], wanted[base : base + 1])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_threads(stored: torch.dtype, count: int) -> None:
    shape = replace(SHAPES["plain"], stored=stored)
    stream = Stream.draw(shape, 300, 1)
    library = needed()
    library.set_threads(1)
    wanted = whole(shape, stream)
    library.set_threads(count)
    for _ in range(5):
        same(whole(shape, stream), wanted)


def test_a_tree_over_several_passes(stored: torch.dtype) -> None:
    """Level by level, with keys below `first_keys` not there: as in one pass, and as without the missing keys."""
    shape = replace(SHAPES["plain"], stored=stored)
    stream, base, first = Stream.draw(shape, 120, 1), 100, 30
    parents = torch.tensor([[0, 0, 1, 2]])
    ancestors = tree_ancestors(parents)  # root, 2 children, a child each
    nodes = stream.at(range(base, base + 5))

    def layout(world: World, num_earlier: int, count: int) -> object:
        return build_layout(
            page_tables=world.tables[:1],
            page_size=world.page_size,
            base_lens=torch.tensor([base]),
            limits=torch.tensor([world.max_len]),
            query_lens=(count,),
            max_key_lens=(base + num_earlier + count,),
            ancestors=ancestors,
            first_keys=torch.tensor([first]),
            num_earlier=num_earlier,
        )

    fresh = World(shape, 1, 120)
    shorter = stream.at(range(first, base))
    fresh.feed(Part(0, 0, shorter, chunk=True))
    wanted = fresh.feed(Part(0, base - first, nodes, parents=(0, 0, 1, 2)))[0]
    world = World(shape, 1, 120)
    world.feed(Part(0, 0, stream.at(range(base)), chunk=True))
    got = []
    for earlier, count in ((0, 1), (1, 2), (3, 2)):
        part = Part(0, base, nodes.at(range(earlier, earlier + count)))
        got += world.feed(part, layout=layout(world, earlier, count))
    same(torch.cat(got), wanted)


@pytest.mark.parametrize("huge", [1e30, -1e30])
def test_keys_that_a_token_does_not_see_weigh_nothing(stored: torch.dtype, huge: float) -> None:
    """Not even next to nothing: they are 10^30 times larger than what it sees."""
    shape = replace(SHAPES["plain"], stored=stored)
    stream = Stream.draw(shape, 90, 1)
    wanted = whole(shape, stream)
    spoiled = stream.copy()
    spoiled.value[80:] = huge
    same(whole(shape, spoiled)[:80], wanted[:80])
    windowed = replace(shape, window=20)
    wanted = whole(windowed, stream)
    spoiled = stream.copy()
    spoiled.value[:50] = huge
    same(whole(windowed, spoiled)[70:], wanted[70:])
