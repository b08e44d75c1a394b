"""Looking at blocks finds what looking at everything finds, to the lowest id and the last bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.errors import InvariantBroken
from slipstream.kernels.cpu.argmax import argmax
from slipstream.sampling.blocks import column_ids, column_max, first_argmax, lowest_best
from slipstream.sampling.transforms import best, rank, total_weight
from tests.cpu_kernels import needed

SIZES = (17, 1500, 4096, 4111, 5003)


@st.composite
def tied(draw: st.DrawFn) -> Tensor:
    """Few distinct values, and the best ones at places drawn: ends, block borders and the tail among them."""
    vocab_size = draw(st.sampled_from(SIZES))
    rows = draw(st.integers(1, 3))
    x = torch.randint(0, 3, (rows, vocab_size), generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))).float()
    borders = [0, 15, 16, 63, 64, vocab_size // 16, vocab_size - 16, vocab_size - 2, vocab_size - 1]
    places = st.one_of(st.sampled_from(borders), st.integers(0, vocab_size - 1))
    for row in range(rows):
        for place in draw(st.lists(places, max_size=5)):
            x[row, min(place, vocab_size - 1)] = draw(st.sampled_from((2.0, 5.0, 7.0)))
    return x


@given(tied())
def test_first_argmax(x: Tensor) -> None:
    assert first_argmax(x).tolist() == [row.index(max(row)) for row in x.tolist()]


@given(tied(), st.integers(0, 3))
def test_the_kernel_finds_the_same(x: Tensor, more: int) -> None:
    """Of rows that lie apart, too; where NaN or infinity is the largest, and where all is -inf."""
    needed()
    wide = torch.nn.functional.pad(x, (0, more))
    x = wide[:, : x.shape[1]]
    for value in (None, math.nan, math.inf, -math.inf):
        if value is not None:
            x[-1, x.shape[1] // 3 :: 7] = value
        ids, values = argmax(x)
        assert torch.equal(ids, first_argmax(x.contiguous()))
        torch.testing.assert_close(values, x.gather(1, ids[:, None])[:, 0], rtol=0, atol=0, equal_nan=True)
    x.fill_(-math.inf)
    assert argmax(x)[0].tolist() == [0] * len(x)


def test_what_the_kernel_does_not_take() -> None:
    needed()
    x = torch.zeros(3, 8)
    assert argmax(x[:0])[0].shape == (0,)
    for bad in (x.double(), x.T, x[0], x[:, :0], x[:1].expand(3, -1)):
        with pytest.raises(InvariantBroken, match=r"side by side|sizes must be positive"):
            argmax(bad)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_first_argmax_of_every_place(vocab_size: int) -> None:
    assert torch.equal(first_argmax(torch.eye(vocab_size)[-200:]), torch.arange(vocab_size)[-200:])
    x = torch.zeros(1, vocab_size)
    x[0, vocab_size // 2] = math.nan
    assert first_argmax(x).tolist() == [vocab_size // 2]


@given(tied())
def test_the_best_tokens(x: Tensor) -> None:
    """Exactly the best ones, the lower ids among equals; and `rank` is right about how many of its own are certain."""
    for count in (1, 20, 57):
        count = min(count, x.shape[1])
        found, ranked = best(x, count), rank(x, count)
        for row, values in enumerate(x.tolist()):
            order = sorted(range(len(values)), key=lambda token, values=values: (-values[token], token))
            assert found.ids[row].tolist() == order[:count]
            assert found.scores[row].tolist() == [values[token] for token in order[:count]]
            certain = len(order) if ranked.certain is None else int(ranked.certain[row])
            assert ranked.ids[row, :certain].tolist() == order[:certain]


@pytest.mark.parametrize("vocab_size", [64, 70, 5003])
def test_columns_and_the_tail_hold_every_id_once(vocab_size: int) -> None:
    num_columns = vocab_size // 16
    ids = column_ids(torch.arange(num_columns).expand(2, -1), vocab_size)
    assert ids[0].sort().values.tolist() == ids[1].sort().values.tolist() == list(range(vocab_size))
    x = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[None]
    for column, largest in enumerate(column_max(x)[0].tolist()):
        inside = column_ids(torch.tensor([[column]]), vocab_size)[0, :16]
        assert x[0, inside].max() == largest


def test_lowest_best() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, -1.0, 0.0, -2.0], [1.0, math.nan, 7.0, 7.0], [-math.inf] * 4])
    ids = torch.tensor([[5, 9, 2, 7], [8, 1, 4, 0], [5, 9, 2, 7], [3, 1, 4, 6]])
    tokens, found = lowest_best(scores, ids)
    assert tokens.tolist()[:2] == [2, 4] and tokens.tolist()[3] == 1
    assert int(tokens[2]) in (2, 5, 7, 9) and math.isnan(found[2])


@pytest.mark.parametrize("vocab_size", [40_000, 70_001])
def test_the_weight_of_a_row_does_not_depend_on_rows_and_threads(vocab_size: int) -> None:
    """torch.sum would: it splits one long row between threads, and several rows not."""
    weights = torch.rand(5, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = total_weight(weights)
        for number in (1, 2, 3, 4):
            torch.set_num_threads(number)
            assert torch.equal(total_weight(weights), wanted)
            for row in range(5):
                assert torch.equal(total_weight(weights[row : row + 1].clone()), wanted[row : row + 1])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(wanted, weights.sum(1), rtol=1e-13, atol=0)
