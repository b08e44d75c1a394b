"""Logprobs of chosen and best tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.observe.guard import SyncGuard
from slipstream.sampling.logprobs import logprobs_of
from slipstream.sampling.sampler import process
from tests.sampling.oracle import Asked
from tests.sampling.rows import logits_of
from tests.sampling.steps import Row, step_of


@given(st.data())
def test_any_logits(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from((1, 5, 64, 1500, 5003)))
    num_top = data.draw(st.sampled_from((0, 1, 5, 20)))
    rows, depth = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    logits = [[data.draw(logits_of(vocab_size)) for _ in range(depth)] for _ in range(rows)]
    tokens = [[data.draw(st.integers(-1, vocab_size - 1)) for _ in range(depth)] for _ in range(rows)]
    scores = torch.tensor(np.array(logits).reshape(rows, depth, vocab_size))
    got = logprobs_of(scores, torch.tensor(tokens, dtype=torch.int64).view(rows, depth), num_top)
    k = min(num_top, vocab_size)
    assert got.chosen.shape == (rows, depth) and got.top_ids.shape == got.top_logprobs.shape == (rows, depth, k)
    for i in range(rows):
        for j in range(depth):
            x = logits[i][j]
            wanted = x - x.max() - math.log(np.exp(x - x.max()).sum())
            order = sorted(range(vocab_size), key=lambda token, x=x: (-x[token], token))[:k]
            assert got.top_ids[i, j].tolist() == order
            np.testing.assert_allclose(got.top_logprobs[i, j].numpy(), wanted[order], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(float(got.chosen[i, j]), wanted[max(tokens[i][j], 0)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 2, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = logprobs_of(logits, torch.tensor([[3, 4]]), 5)
    assert got.chosen.dtype == got.top_logprobs.dtype == torch.float32
    assert torch.equal(got.chosen, torch.log_softmax(logits.float(), 2)[:, [0, 1], [3, 4]])


def test_a_row_has_the_same_bits_in_any_company() -> None:
    logits = torch.randn(5, 3, 4999, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(15).view(5, 3)
    together = logprobs_of(logits, tokens, 20)
    for i in range(5):
        alone = logprobs_of(logits[i : i + 1].clone(), tokens[i : i + 1], 20)
        assert torch.equal(alone.chosen[0], together.chosen[i])
        assert torch.equal(alone.top_logprobs[0], together.top_logprobs[i])


def test_thousands_of_equal_tokens_are_listed_from_the_lowest_id() -> None:
    with torch.inference_mode(), SyncGuard():
        got = logprobs_of(torch.zeros(1, 1, 5003), torch.tensor([[4000]]), 3)
    assert got.top_ids.tolist() == [[[0, 1, 2]]]


def test_processed_logprobs_are_those_the_token_was_drawn_with() -> None:
    """After top_k=2 two tokens share the mass; the others have none."""
    step = step_of([Row(Asked(temperature=0.5, top_k=2), [3])], [(0, 0)], 6)
    scores = process(torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 0.25]]), step.rows, step.nodes)
    got = logprobs_of(scores[None], torch.tensor([[1]]), 3)
    p = 1 / (1 + math.exp(-2))
    assert got.top_ids[0, 0, :2].tolist() == [2, 1]
    np.testing.assert_allclose(got.top_logprobs[0, 0].exp().numpy(), [p, 1 - p, 0.0], atol=1e-6)
    np.testing.assert_allclose(float(got.chosen.exp()), 1 - p, atol=1e-6)
