"""HashLM against its plain-integer oracle, and that nothing it should notice goes unnoticed."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import NUM_RESERVED_PAGES, SCRATCH_PAGE, KVCache
from slipstream.attention.layout import build_layout, tree_ancestors
from slipstream.testing.hash_lm import HashAttention, HashLM
from tests.hash_oracle import hidden_states, logits_of

PAGES_A_ROW = 12


def shuffled_tables(rows: int, seed: int = 0) -> Tensor:
    pages = list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + rows * PAGES_A_ROW))
    random.Random(seed).shuffle(pages)
    return torch.tensor(pages).view(rows, PAGES_A_ROW)


def fresh_kv(model: HashLM, page_size: int, rows: int) -> KVCache:
    pages = NUM_RESERVED_PAGES + rows * PAGES_A_ROW
    return KVCache(model.kv_layers, pages, page_size, torch.device("cpu"), poison=True)


def forward(
    model: HashLM,
    kv: KVCache,
    tables: Tensor,
    bases: list[int],
    segments: list[list[int]],
    parents: Tensor | None = None,
    limit: int = 10**6,
) -> list[Tensor]:
    """One pass over segments (verify rows where `parents` is given); hidden states of each."""
    layout = build_layout(
        page_tables=tables,
        page_size=kv.page_size,
        base_lens=torch.tensor(bases),
        limits=torch.full((len(bases),), limit),
        query_lens=tuple(map(len, segments)),
        max_key_lens=tuple(base + len(segment) + 2 for base, segment in zip(bases, segments, strict=True)),
        num_chunks=0 if parents is not None else len(segments),
        ancestors=None if parents is None else tree_ancestors(parents),
    )
    flat = torch.tensor([token for segment in segments for token in segment])
    hidden, _ = model.forward(flat, HashAttention().begin(layout, kv))
    return list(hidden[:, 0].split([len(segment) for segment in segments]))


def one_chunk(tables: Tensor, length: int) -> BatchLayout:
    zero, limit = torch.tensor([0]), torch.tensor([99])
    return build_layout(
        page_tables=tables, page_size=2, base_lens=zero, limits=limit, query_lens=(length,), max_key_lens=(length,), num_chunks=1
    )


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_ragged_chunks_equal_the_oracle(num_layers: int, page_size: int) -> None:
    model = HashLM(vocab_size=50, num_layers=num_layers, salt=5)
    rng = random.Random(page_size)
    rows = [[rng.randrange(50) for _ in range(length)] for length in (3, 9, 12)]
    kv, tables = fresh_kv(model, page_size, 3), shuffled_tables(3)
    done = [0, 0, 0]
    got: list[list[int]] = [[], [], []]
    while any(done[row] < len(rows[row]) for row in range(3)):
        sizes = {row: min(rng.randint(1, 4), len(rows[row]) - done[row]) for row in range(3) if done[row] < len(rows[row])}
        pick = list(sizes)
        parts = forward(
            model, kv, tables[pick], [done[row] for row in pick], [rows[row][done[row] : done[row] + sizes[row]] for row in pick]
        )
        for row, part in zip(pick, parts, strict=True):
            got[row] += part.tolist()
            done[row] += sizes[row]
    assert got == [hidden_states(row, num_layers, salt=5) for row in rows]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_node_of_a_tree_equals_the_oracle_on_its_own_path(num_layers: int) -> None:
    model = HashLM(vocab_size=50, num_layers=num_layers)
    rng = random.Random(7)
    prefixes = [[rng.randrange(50) for _ in range(n)] for n in (5, 2)]
    kv, tables = fresh_kv(model, 4, 2), shuffled_tables(2)
    forward(model, kv, tables, [0, 0], prefixes)
    parents = torch.tensor([[0, 0, 1, 2, 4, 2], [0, 1, 2, 0, 0, 5]])
    nodes = [[rng.randrange(50) for _ in range(7)] for _ in range(2)]
    got = forward(model, kv, tables, [5, 2], nodes, parents)
    for row in range(2):
        for node in range(7):
            path, at = [], node
            while at:
                path.append(nodes[row][at])
                at = int(parents[row, at - 1])
            sequence = [*prefixes[row], nodes[row][0], *reversed(path)]
            assert int(got[row][node]) == hidden_states(sequence, num_layers)[-1], (row, node)


def test_logits_equal_the_oracle_exactly_and_have_no_ties() -> None:
    model = HashLM(vocab_size=100, eos_token_ids=(3, 97), eos_bias=1.5)
    hidden = hidden_states([5, 6, 7, 8, 9, 10])
    got = model.logits(torch.tensor(hidden)[:, None])
    assert got.dtype == torch.float64
    for row, state in zip(got.tolist(), hidden, strict=True):
        assert row == logits_of(state, 100, (3, 97), 1.5)
        assert len(set(row)) == 100


def test_logits_are_spread_evenly() -> None:
    logits = HashLM(vocab_size=64).logits(torch.arange(500)[:, None] * 12345)
    assert -8 <= float(logits.min()) < -7.9 and 7.9 < float(logits.max()) < 8
    assert abs(float(logits.mean())) < 0.2 and abs(float(logits.std()) - 16 / math.sqrt(12)) < 0.1
    assert logits.argmax(1).bincount(minlength=64).min() > 0, "every token is the greedy choice somewhere"


def test_eos_bias_sets_how_often_eos_is_the_greedy_choice() -> None:
    hidden = torch.arange(4000)[:, None] * 977
    rates = []
    for bias in (0.0, 1.0, 4.0):
        model = HashLM(vocab_size=64, eos_token_ids=(3,), eos_bias=bias)
        rates.append(float((model.logits(hidden).argmax(1) == 3).double().mean()))
    assert rates[0] < 0.03 < rates[1] < 0.12 < 0.2 < rates[2]


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("wrong", range(6))
def test_one_wrong_key_changes_the_output(wrong: int, poisoned: bool) -> None:
    """A stale or poisoned slot, a wrong position and a wrong token all show."""
    model = HashLM(vocab_size=50)
    kv, tables = fresh_kv(model, 2, 1), shuffled_tables(1)
    forward(model, kv, tables, [0], [[1, 2, 3, 4, 5, 6]])
    right = int(forward(model, kv, tables, [6], [[7]])[0][0])
    keys, values = kv.layer(0)
    slot = int(tables[0, wrong // 2]) * 2 + wrong % 2
    field = keys if wrong % 2 else values
    field[slot] = -1 if poisoned else field[slot] + 1
    assert int(forward(model, kv, tables, [6], [[7]])[0][0]) != right


def test_swapped_pages_show_only_through_the_positions_they_hold() -> None:
    """The sum does not depend on the order keys are read in; which keys are read does."""
    model = HashLM(vocab_size=50)
    kv, tables = fresh_kv(model, 2, 1), shuffled_tables(1)
    forward(model, kv, tables, [0], [[1, 2, 3, 4, 5, 6]])
    right = int(forward(model, kv, tables, [6], [[7]])[0][0])
    swapped = tables.clone()
    swapped[0, [0, 1]] = tables[0, [1, 0]]
    assert int(forward(model, kv, swapped, [6], [[7]])[0][0]) == right
    wrong = tables.clone()
    wrong[0, 0] = tables[0, 1]
    assert int(forward(model, kv, wrong, [6], [[7]])[0][0]) != right


def test_nodes_beyond_the_limit_leave_no_trace() -> None:
    model = HashLM(vocab_size=50)
    kv, tables = fresh_kv(model, 2, 1), shuffled_tables(1)
    before = [tensor.clone() for tensor in kv.layer(0)]
    forward(model, kv, tables, [0], [[1, 2, 3, 4, 5, 6]], limit=4)
    changed = (kv.layer(0)[0] != before[0])[:, 0, 0].nonzero()[:, 0].tolist()
    own = [int(tables[0, p // 2]) * 2 + p % 2 for p in range(4)]
    assert sorted(changed) == sorted([*own, SCRATCH_PAGE * 2])


def test_the_nan_token_makes_only_its_own_logits_nan() -> None:
    model = HashLM(vocab_size=50, nan_token_id=9)
    kv, tables = fresh_kv(model, 2, 1), shuffled_tables(1)
    hidden = forward(model, kv, tables, [0], [[1, 9, 3]])[0]
    assert model.logits(hidden[:, None]).isnan().all(1).tolist() == [False, True, False]
    assert int(hidden[2]) == hidden_states([1, 9, 3])[2]


def test_taps_are_the_states_entering_each_layer() -> None:
    model = HashLM(vocab_size=50, num_layers=2)
    kv, tables = fresh_kv(model, 2, 1), shuffled_tables(1)
    layout = one_chunk(tables, 3)
    _, taps = model.forward(torch.tensor([4, 5, 6]), HashAttention().begin(layout, kv), taps=(0, 2))
    assert taps is not None and taps.shape == (3, 2)
    wanted = [[state % 2**52 / 2**52 for state in states] for states in ([4, 5, 6], hidden_states([4, 5, 6], 2))]
    assert taps.T.tolist() == wanted


def test_its_attention_step_attends_to_nothing() -> None:
    model = HashLM()
    layout = one_chunk(shuffled_tables(1), 1)
    empty = torch.empty(0)
    with pytest.raises(RuntimeError, match="HashLM must read the KV itself"):
        HashAttention().begin(layout, fresh_kv(model, 2, 1))(0, empty, empty, empty, 1.0)
