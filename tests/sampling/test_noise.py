"""The noise: exact bits, exact floats, the right distribution, and nothing shared between seeds, positions and tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.sampling.noise import Noise, all_id_bits, log_exponential, noise_bits, noise_keys, uniform
from slipstream.sampling.sampler import sample
from slipstream.seeds import seed_i
from tests.sampling.chi_square import assert_fits
from tests.sampling.oracle import Asked, exponential, noise_hash, truncated
from tests.sampling.steps import Row, step_of

SIGN = 1 << 31
CPU = torch.device("cpu")


def hashes(seeds: list[int], positions: list[int], vocab_size: int) -> np.ndarray:
    """h of the sampler's noise: [n, V], unsigned."""
    keys = noise_keys(torch.tensor(seeds), torch.tensor(positions))
    bits = noise_bits(*keys, all_id_bits(vocab_size, CPU))
    return bits.numpy().astype(np.int64) + SIGN  # the flipped sign bit, undone


@pytest.mark.parametrize(
    "seed, position, token, h",
    [
        (0, 0, 0, 2160005768),
        (0, 1, 0, 3351081279),
        (42, 7, 151935, 4077216786),
        (-1, 2**31, 49151, 747362190),
        (2**63 - 1, 131071, 2, 3588678171),
        (-(2**63), 131072, 77, 873147015),
    ],
)
def test_known_answers(seed: int, position: int, token: int, h: int) -> None:
    """Fixed for good: another number here is another answer for every seeded request ever made."""
    assert noise_hash(seed, position, token) == h
    assert hashes([seed], [position], token + 1)[0, token] == h


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=4),
    st.integers(1, 300),
)
def test_bits_equal_plain_integers(keys: list[tuple[int, int]], vocab_size: int) -> None:
    seeds, positions = [seed for seed, _ in keys], [position for _, position in keys]
    wanted = [[noise_hash(seed, position, token) for token in range(vocab_size)] for seed, position in keys]
    assert hashes(seeds, positions, vocab_size).tolist() == wanted


USES = tuple(Noise)


@pytest.mark.parametrize("use", USES)
def test_uses_differ_by_a_salt_of_the_seed(use: Noise) -> None:
    keys = noise_keys(torch.tensor([42, -1]), torch.tensor([7, 9]), use)
    salted = [noise_hash(seed ^ int(use), position, 3) for seed, position in ((42, 7), (-1, 9))]
    assert [int(bits) + SIGN for bits in noise_bits(*keys, all_id_bits(4, CPU))[:, 3]] == salted


@pytest.mark.parametrize("one, other", list(itertools.combinations(USES, 2)))
def test_uses_share_nothing(one: Noise, other: Noise) -> None:
    """The uniforms of two uses at 40,000 places fall evenly into the cells of a square."""
    seeds, positions = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    first, second = (uniform(*noise_keys(seeds, positions, use)) for use in (one, other))
    assert bool(((first > 0) & (first < 1)).all())
    cells = ((first * 12).long() * 12 + (second * 12).long()).numpy()
    assert_fits(np.bincount(cells, minlength=144), np.full(144, 1 / 144))


EXTREMES = (0, 1, 2, 127, 2**23 - 1, 2**24, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**24, 2**32 - 128, 2**32 - 2, 2**32 - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_hash_gives_finite_noise_and_no_two_ends_meet(dtype: torch.dtype) -> None:
    """u stays inside (0, 1) and E above 0, where plain float32 rounding gives infinities; E falls as h grows."""
    h = torch.tensor(EXTREMES)
    log_e = log_exponential((h - SIGN).to(torch.int32), dtype)
    assert log_e.dtype == dtype and bool(log_e.isfinite().all())
    assert bool((log_e[1:] <= log_e[:-1]).all())
    assert math.isclose(float(log_e[0]), math.log(33 * math.log(2)), rel_tol=1e-6)
    assert math.isclose(float(log_e[-1]), -33 * math.log(2), rel_tol=1e-6)


@pytest.mark.parametrize("dtype, numpy_dtype, tolerance", [(torch.float32, np.float32, 3e-7), (torch.float64, np.float64, 1e-15)])
def test_floats_follow_the_definition(dtype: torch.dtype, numpy_dtype: type, tolerance: float) -> None:
    h = np.concatenate([EXTREMES, np.random.default_rng(0).integers(0, 2**32, 20_000)])
    got = log_exponential(torch.from_numpy((h - SIGN).astype(np.int32)), dtype).numpy()
    wanted = np.log([exponential(int(one), numpy_dtype) for one in h])
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_float_does_not_depend_on_where_it_stands(dtype: torch.dtype) -> None:
    """Candidates are computed in short tensors, whole vocabularies in long ones, by one or two threads: the same bits."""
    bits = torch.from_numpy(np.random.default_rng(1).integers(-SIGN, SIGN, 100_003).astype(np.int32))
    whole = log_exponential(bits, dtype)
    for start in (0, 1, 5, 64, 1000):
        for length in (1, 2, 3, 7, 8, 15, 17, 33, 64, 257, 4097, 99_000):
            part = log_exponential(bits[start : start + length].clone(), dtype)
            assert torch.equal(part, whole[start : start + length])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(log_exponential(bits, dtype), whole)
    finally:
        torch.set_num_threads(threads)


def test_hashes_are_even_and_do_not_repeat() -> None:
    """Over neighbouring tokens, positions and seeds: the top, a middle and the bottom byte, and what sets neighbours apart."""
    columns = {
        "tokens": hashes([1], [5], 200_000)[0],
        "positions": hashes([1] * 50_000, list(range(50_000)), 3)[:, 2],
        "seeds": hashes(list(range(50_000)), [5] * 50_000, 3)[:, 2],
    }
    for values in columns.values():
        for shift in (24, 12, 0):
            assert_fits(np.bincount(values >> shift & 255, minlength=256), np.full(256, 1 / 256))
        for other in (values[1:], values[2:], values[64:]):
            mixed = (values[: len(other)] ^ other) >> 24
            assert_fits(np.bincount(mixed, minlength=256), np.full(256, 1 / 256))
        # 200,000 draws of 2^32 repeat about 5 times.
        assert len(values) - len(np.unique(values)) < 30


def test_neighbours_are_independent() -> None:
    """The joint distribution of the top 4 bits of any two neighbours is flat."""
    h = np.stack([hashes([seed] * 300, list(range(300)), 300) for seed in range(3)]) >> 28
    pairs = {
        "token": (h[:, :, :-1], h[:, :, 1:]),
        "position": (h[:, :-1], h[:, 1:]),
        "seed": (h[:-1], h[1:]),
        "token of the next position": (h[:, :-1, :-1], h[:, 1:, 1:]),
        "token before, next position": (h[:, :-1, 1:], h[:, 1:, :-1]),
    }
    for a, b in pairs.values():
        assert_fits(np.bincount((a * 16 + b).ravel(), minlength=256), np.full(256, 1 / 256))


def tokens_at(asked: Asked, logits: torch.Tensor, positions: int, first: int = 1) -> np.ndarray:
    """Samples of one request at positions from `first` on, from the same logits [V] each time."""
    step = step_of([Row(asked, [0])], [(0, 0)] * positions, len(logits))
    nodes = replace(step.nodes, position=torch.arange(first, first + positions))
    return sample(logits.expand(positions, -1), step.rows, nodes).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_follow_the_distribution(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.3, -4.0, 1.7, 0.0], dtype=dtype)
    for asked in (Asked(seed=3), Asked(seed=4, temperature=0.5), Asked(seed=5, top_k=3), Asked(seed=6, top_p=0.7, min_p=0.1)):
        scores = truncated(logits.double().numpy(), asked)
        weights = np.exp(scores - scores.max())
        tokens = tokens_at(asked, logits, 20_000)
        assert_fits(np.bincount(tokens, minlength=8), weights / weights.sum())


def test_samples_of_neighbouring_positions_seeds_and_answers_are_independent() -> None:
    """Pairs of samples follow the product of two distributions: position to position, seed to seed, answer to answer of n."""
    logits = torch.tensor([0.0, 0.7, -0.5, 1.1])
    p = torch.softmax(logits, 0).double().numpy()
    first = tokens_at(Asked(seed=100), logits, 20_000)
    assert_fits(np.bincount(first[:-1] * 4 + first[1:], minlength=16), np.outer(p, p).ravel())
    for other in (101, seed_i(100, 1), -101):
        second = tokens_at(Asked(seed=other), logits, 20_000)
        assert_fits(np.bincount(first * 4 + second, minlength=16), np.outer(p, p).ravel())


def test_answers_of_one_request_have_seeds_of_their_own() -> None:
    assert seed_i(5, 0) == 5
    seeds = {seed_i(seed, i) for seed in range(50) for i in range(128)}
    assert len(seeds) == 50 * 128 and all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_a_million_draws_at_a_vocabulary_of_150_000() -> None:
    """10^6 draws, one a position, among 256 ids spread over a vocabulary of 150,000.

    The others are left out, as if their scores were -inf: a draw over all of them costs about 0.7 ms, a million a quarter of an
    hour. `bench/noise.py` does just that, and the test below draws from all of them 3,000 times.

    96 of the 256 have all but 1e-11 of the mass. The noise is the sampler's own, at the true ids; that `sample` is its argmax is
    test_sampler's business. Rounding u to float32, which makes it 1 once in 2^25, would give the other 160 about five draws.
    """
    vocab_size, draws, step = 150_000, 1_000_000, 4000
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(np.sort(rng.choice(vocab_size, 256, replace=False)))
    heavy = np.arange(256) % 8 < 3
    scores = np.where(heavy, rng.normal(0, 1.5, 256), -32.0).astype(np.float32)
    counts = np.zeros(256, dtype=np.int64)
    id_bits = all_id_bits(vocab_size, CPU).index_select(1, ids)
    for start in range(0, draws, step):
        keys = noise_keys(torch.full((step,), 99), torch.arange(start, start + step))
        noisy = torch.from_numpy(scores) - log_exponential(noise_bits(*keys, id_bits), torch.float32)
        counts += np.bincount(noisy.argmax(1).numpy(), minlength=256)
    weights = np.exp(scores.astype(np.float64) - scores.max())
    assert counts.sum() == draws
    assert_fits(counts, weights / weights.sum())
    assert counts[~heavy].sum() == 0, "a token that has no mass was drawn"


def test_draws_from_all_of_150_000() -> None:
    """3,000 draws through `sample` from 150,000 tokens, the best of which has 0.1% of the mass: in buckets of ids, of scores."""
    vocab_size, draws, step = 150_000, 3000, 100
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))
    weights = torch.softmax(logits.double(), 0).numpy()
    tokens = np.concatenate([tokens_at(Asked(seed=7), logits, step, first) for first in range(0, draws, step)])
    by_id = np.arange(vocab_size) // 1500
    by_score = np.argsort(np.argsort(logits.numpy())) // 7500
    for bucket in (by_id, by_score):
        assert_fits(np.bincount(bucket[tokens], minlength=bucket.max() + 1), np.bincount(bucket, weights))
