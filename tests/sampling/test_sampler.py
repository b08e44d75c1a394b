"""process, perturbed and sample against the oracle, for any mixture of parameters, rows and draft trees."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sampling.groups import Group
from slipstream.sampling.sampler import Choice, _choose_exactly, choose, perturbed, process, sample
from slipstream.sampling.state import RowSampling, SamplingState
from tests.sampling.oracle import Array, Asked
from tests.sampling.rows import logits_of, row_of
from tests.sampling.steps import Row, oracle_perturbed, oracle_scores, step_of


def all_nodes(rows: list[Row]) -> list[tuple[int, int]]:
    return [(r, n) for r, row in enumerate(rows) for n in range(len(row.draft) + 1)]


def assert_step(rows: list[Row], places: list[tuple[int, int]], logits: list[Array]) -> None:
    """Every node equals the oracle: scores in every bit, noise to rounding, tokens."""
    step = step_of(rows, places, len(logits[0]))
    given_logits = torch.from_numpy(np.stack(logits))
    before = given_logits.clone()
    scores = process(given_logits, step.rows, step.nodes, step.masks).numpy()
    noisy = perturbed(given_logits, step.rows, step.nodes, step.masks).numpy()
    chosen = choose(given_logits, step.rows, lambda: step.nodes, step.masks)
    assert torch.equal(given_logits, before), "the logits were written"
    for i, (r, n) in enumerate(places):
        row = rows[r]
        np.testing.assert_array_equal(scores[i], oracle_scores(row, n, logits[i]), err_msg=f"row {r} node {n} {row}")
        wanted = oracle_perturbed(row, n, logits[i])
        np.testing.assert_allclose(noisy[i], wanted, rtol=1e-12, atol=1e-12)
        token = int(chosen.tokens[i])
        assert token == int(noisy[i].argmax())
        best = wanted.max()
        if math.isinf(best):
            assert chosen.scores[i] == best
            continue
        near = [t for t in range(len(wanted)) if wanted[t] >= best - 1e-9]
        assert token in near and (len(near) > 1 or token == near[0])
        assert abs(float(chosen.scores[i]) - best) < 1e-9
        if row.asked.temperature == 0:
            assert token == int(wanted.argmax()), "greedy takes the lowest id among equals"


@settings(max_examples=150)
@given(st.data())
def test_any_rows_equal_the_oracle(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from((4, 17, 64, 130)))
    rows = data.draw(st.lists(row_of(vocab_size), min_size=1, max_size=3))
    places = data.draw(st.permutations(all_nodes(rows)))
    assert_step(rows, places, [data.draw(logits_of(vocab_size)) for _ in places])


@settings(max_examples=25)
@given(st.data())
def test_large_vocabularies_equal_the_oracle(data: st.DataObject) -> None:
    """Above 1024 tokens are ranked in part, above 4096 noise is bounded by columns; 5003 leaves a tail behind the columns."""
    vocab_size = data.draw(st.sampled_from((1500, 4096, 5003)))
    rows = data.draw(st.lists(row_of(vocab_size), min_size=1, max_size=2))
    places = all_nodes(rows)[:4]
    assert_step(rows, places, [data.draw(logits_of(vocab_size)) for _ in places])


@pytest.mark.parametrize("vocab_size", [1500, 5003])
@pytest.mark.parametrize("spread, digits", [(0.0, 0), (0.01, 9), (1.0, 1), (1.0, 9), (4.0, 1)])
@pytest.mark.parametrize(
    "asked",
    [
        Asked(),
        Asked(top_k=1),
        Asked(top_k=50),
        Asked(top_k=400, top_p=0.7),
        Asked(top_k=1499),
        Asked(top_p=0.3),
        Asked(top_p=0.95, min_p=0.001),
        Asked(top_p=0.9999),
        Asked(min_p=0.3),
        Asked(min_p=1e-6),
        Asked(allowed_token_ids=(3, 1200, 1499)),
        Asked(allowed_token_ids=(3, 1200, 1499), top_k=2, top_p=0.9),
    ],
)
def test_partial_selection_is_exact(vocab_size: int, spread: float, digits: int, asked: Asked) -> None:
    """From all tokens equal to one far ahead; rounded to one digit, hundreds are tied and few candidates never suffice."""
    rng = np.random.default_rng(7)
    rows = [Row(asked, [5]), Row(Asked(**{**vars(asked), "seed": 9}), [6, 7])]
    logits = [np.round(rng.normal(0, spread, vocab_size), digits) for _ in rows]
    assert_step(rows, [(0, 0), (1, 0)], logits)


@given(st.data())
def test_a_node_depends_on_itself_alone(data: st.DataObject) -> None:
    """In any batch, in any order and alone: the same bits."""
    vocab_size = data.draw(st.sampled_from((17, 130, 4100)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    rows = data.draw(st.lists(row_of(vocab_size), min_size=2, max_size=4))
    places = data.draw(st.permutations(all_nodes(rows)[:8]))
    logits = torch.from_numpy(np.stack([data.draw(logits_of(vocab_size)) for _ in places])).to(dtype)
    step = step_of(rows, places, vocab_size, host_rows=data.draw(st.booleans()))
    scores = process(logits, step.rows, step.nodes, step.masks)
    noisy = perturbed(logits, step.rows, step.nodes, step.masks)
    tokens = sample(logits, step.rows, step.nodes, step.masks)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(tokens, noisy.argmax(1))
    for i, (r, n) in enumerate(places):
        alone = step_of([rows[r]], [(0, n)], vocab_size)
        mine = logits[i : i + 1].clone()
        assert torch.equal(process(mine, alone.rows, alone.nodes, alone.masks)[0], scores[i])
        assert torch.equal(perturbed(mine, alone.rows, alone.nodes, alone.masks)[0], noisy[i])
        assert int(sample(mine, alone.rows, alone.nodes, alone.masks)) == int(tokens[i])


ONE_PARAMETER = {
    "greedy": Asked(temperature=0),
    "temperature": Asked(temperature=0.7),
    "top_k": Asked(top_k=3),
    "top_p": Asked(top_p=0.6),
    "min_p": Asked(min_p=0.2),
    "repetition_penalty": Asked(temperature=0, repetition_penalty=1.7),
    "presence_penalty": Asked(temperature=0, presence_penalty=1.9),
    "frequency_penalty": Asked(temperature=0, frequency_penalty=0.9),
    "logit_bias": Asked(logit_bias={3: 4.0, 5: -100.0}),
    "bad_words": Asked(bad_words=((3,), (5, 6), (6, 5, 7), (7, 7, 7, 7))),
    "allowed_token_ids": Asked(allowed_token_ids=(3, 5, 6, 7)),
    "min_tokens": Asked(temperature=0, min_tokens=5, stop_token_ids=(7,)),
    "ignore_eos": Asked(min_tokens=5, stop_token_ids=(7,), ignore_eos=True),
}


@pytest.mark.parametrize("name", ONE_PARAMETER)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_node_with_a_path_equals_a_plain_step_with_that_history(name: str, shape: str) -> None:
    """What a draft node samples is what plain decoding samples once the path has been committed."""
    vocab_size = 12
    rng = np.random.default_rng(3)
    draft = [5, 6, 7, 5, 6, 5]
    parents = [0, 1, 2, 3, 4, 5] if shape == "chain" else [0, 0, 1, 1, 2, 4]
    drafted = Row(ONE_PARAMETER[name], [6, 5, 4], [7, 6], draft, parents)
    places = all_nodes([drafted])
    logits = torch.from_numpy(rng.normal(0, 2, (len(places), vocab_size)))
    step = step_of([drafted], places, vocab_size)
    scores = process(logits, step.rows, step.nodes, step.masks)
    tokens = sample(logits, step.rows, step.nodes, step.masks)
    untouched = 0
    for i, (_, n) in enumerate(places):
        plain = Row(drafted.asked, drafted.prompt, [*drafted.output, *drafted.path(n)])
        alone = step_of([plain], [(0, 0)], vocab_size)
        assert torch.equal(process(logits[i : i + 1], alone.rows, alone.nodes, None)[0], scores[i])
        assert int(sample(logits[i : i + 1], alone.rows, alone.nodes, None)) == int(tokens[i])
        untouched += torch.equal(scores[i], logits[i])
    assert untouched == (len(places) if name == "greedy" else untouched) and (name == "greedy" or untouched < len(places))


def test_min_tokens_holds_eos_back_up_to_the_last_token_and_no_longer() -> None:
    row = Row(Asked(temperature=0, min_tokens=3, stop_token_ids=(4,)), [9, 9], [], [7, 7, 7], [0, 1, 2])
    logits = torch.zeros(4, 10)
    logits[:, [1, 2, 4]] = torch.tensor([3.0, 2.0, 4.0])
    step = step_of([row], all_nodes([row]), 10)
    assert sample(logits, step.rows, step.nodes).tolist() == [0, 0, 0, 4]


def test_a_drafted_id_that_does_not_exist_harms_nobody() -> None:
    """Drafters may make ids up. Their nodes are never accepted; the others must be right."""
    row = Row(Asked(temperature=0, frequency_penalty=1.0, bad_words=((3, 5),)), [3], [3], [10**9, 5, -7], [0, 0, 0])
    logits = torch.arange(40, dtype=torch.float64).reshape(4, 10)
    step = step_of([row], all_nodes([row]), 10)
    scores = process(logits, step.rows, step.nodes)
    for node in (0, 2):
        np.testing.assert_array_equal(scores[node].numpy(), oracle_scores(row, node, logits[node].numpy()))


@pytest.mark.parametrize("asked", [Asked(temperature=0), Asked(), Asked(top_k=3), Asked(top_p=0.5), Asked(min_p=0.5)])
@pytest.mark.parametrize("vocab_size", [20, 5003])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_seen_and_give_a_token_that_exists(asked: Asked, vocab_size: int, bad: float) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = bad
    rows = [Row(asked, [3]), Row(asked, [3])]
    step = step_of(rows, [(0, 0), (1, 0)], vocab_size)
    chosen = choose(logits, step.rows, lambda: step.nodes)
    assert 0 <= int(chosen.tokens[0]) < vocab_size and not math.isfinite(chosen.scores[0])
    alone = step_of(rows[1:], [(0, 0)], vocab_size)
    assert math.isfinite(chosen.scores[1]) and int(chosen.tokens[1]) == int(sample(logits[1:], alone.rows, alone.nodes))


@pytest.mark.parametrize("asked", [Asked(temperature=0), Asked(), Asked(top_k=3), Asked(top_p=0.5), Asked(min_p=0.5)])
@pytest.mark.parametrize("vocab_size", [20, 5003])
def test_masks_that_leave_no_token_are_seen(asked: Asked, vocab_size: int) -> None:
    row = Row(Asked(**{**vars(asked), "allowed_token_ids": (4,), "bad_words": ((4,),)}), [3])
    step = step_of([row], [(0, 0)], vocab_size)
    assert float(choose(torch.zeros(1, vocab_size), step.rows, lambda: step.nodes).scores) == -math.inf


def test_an_all_greedy_step_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a greedy step must not group its nodes")

    monkeypatch.setattr("slipstream.sampling.sampler.groups_of", never)
    rows = [Row(Asked(temperature=0, top_k=3, top_p=0.1, min_p=0.5), [3])]
    step = step_of(rows, [(0, 0)], 50)
    logits = torch.zeros(1, 50)
    logits[0, [8, 31]] = 2.0
    assert sample(logits, step.rows, step.nodes).tolist() == [8]


def test_a_slot_forgets_its_last_owner() -> None:
    """Every parameter of the first owner would change the second one's token."""
    first = Row(Asked(temperature=0, allowed_token_ids=(3,), logit_bias={5: 50.0}, bad_words=((6,),), min_tokens=9), [4])
    second = Row(Asked(temperature=0), [4])
    state = SamplingState(2, 10, (1,), torch.device("cpu"))
    state.admit(1, first.request(), 1)
    state.admit(1, second.request(), 1)
    step = step_of([second], [(0, 0)], 10)
    logits = torch.arange(10.0)[None]
    assert sample(logits, state.rows([1]), step.nodes).tolist() == [9]
    assert state.rows([1]).numbers is None


@pytest.mark.parametrize("vocab_size", [20, 5003])
def test_a_step_that_samples_nothing(vocab_size: int) -> None:
    """A step of prompt chunks in their middle has rows, and no node."""
    step = step_of([Row(Asked(), [3])], [(0, 0)], vocab_size)
    none = torch.zeros(0, dtype=torch.int64)
    nodes = replace(step.nodes, row=none, position=none, path=none.view(0, 0), depth=none, row_ids=())
    for rows in (step.rows, RowSampling((), (), None)):
        assert sample(torch.zeros(0, vocab_size), rows, nodes).shape == (0,)
        assert process(torch.zeros(0, vocab_size), rows, nodes).shape == (0, vocab_size)


@pytest.mark.parametrize(
    "asked", [Asked(temperature=0), Asked(), Asked(top_k=20), Asked(top_p=0.5), Asked(min_p=0.1), Asked(top_p=0.999)]
)
def test_threads_change_nothing(asked: Asked) -> None:
    """torch splits long rows between threads; no sum of ours may depend on where."""
    vocab_size = 70_001
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    rows = [Row(Asked(**{**vars(asked), "seed": seed}), [3]) for seed in range(3)]
    step = step_of(rows, [(0, 0), (1, 0), (2, 0)], vocab_size)
    threads = torch.get_num_threads()
    outcomes = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            outcomes.append((process(logits, step.rows, step.nodes), perturbed(logits, step.rows, step.nodes)))
            outcomes[-1] += (sample(logits, step.rows, step.nodes),)
    finally:
        torch.set_num_threads(threads)
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


@pytest.mark.parametrize("num_columns", [1, 3, 128])
def test_a_best_token_that_was_not_looked_at_is_found(num_columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few columns the bound often fails: those chunks, and no others, are done again over the whole vocabulary."""
    redone: list[int] = []

    def counted(chunk: Group) -> Choice:
        redone.append(len(chunk.rows))
        return _choose_exactly(chunk)

    monkeypatch.setattr("slipstream.sampling.sampler.NUM_COLUMNS", num_columns)
    monkeypatch.setattr("slipstream.sampling.sampler._choose_exactly", counted)
    vocab_size, num_nodes = 30_011, 40
    logits = torch.randn(num_nodes, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    rows = [Row(Asked(seed=seed), [3]) for seed in range(num_nodes)]
    step = step_of(rows, [(r, 0) for r in range(num_nodes)], vocab_size)
    tokens = sample(logits, step.rows, step.nodes)
    assert torch.equal(tokens, perturbed(logits, step.rows, step.nodes).argmax(1))
    assert not redone if num_columns == 128 else redone
    assert num_columns == 1 or sum(redone) < num_nodes
