"""Rejection sampling has the target's distribution, exactly: chi-square on joint distributions of tokens, against an oracle.

Seeds are fixed, so nothing here is a matter of luck; the planted mistakes show that the tests would see one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.engine.drafting import _merged
from slipstream.sampling.noise import Noise
from slipstream.speculate import accept as module
from slipstream.speculate.accept import COUPLED, RULES, Rejection, one_hot
from slipstream.speculate.base import Draft
from tests.sampling.chi_square import assert_fits
from tests.sampling.oracle import Asked, edited, truncated
from tests.sampling.steps import EOS
from tests.speculate.tables import CYCLE, PROMPT, Game, Propose, World, answers, drawn_chain, play, random_world, softmax

NUM_ROWS = 20_000
FEW_ROWS = 3_000  # where parameters name tokens, which takes a row at a time
RULE = Rejection()
SEEN = r"deviations too large|no mass"  # what the chi-square test says

ASKED = {
    "nothing": Asked(),
    "temperature": Asked(temperature=0.6),
    "top_k": Asked(top_k=2),
    "top_p": Asked(top_p=0.8),
    "min_p": Asked(min_p=0.15, temperature=1.4),
    "all three": Asked(top_k=4, top_p=0.95, min_p=0.05, temperature=1.2),
}
ASKED_BY_ROW = {
    "penalties": Asked(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.8),
    "bias": Asked(logit_bias={1: 1.5, 3: -2.0}),
    "allowed": Asked(allowed_token_ids=(0, 2, 3)),
    "bad words": Asked(bad_words=((0, 2), (3,))),
    "min_tokens": Asked(min_tokens=2, stop_token_ids=(0,)),
}


def fits(world: World, propose: Propose, num_tokens: int, num_rows: int = NUM_ROWS, rule: Rejection = RULE) -> None:
    assert_fits(answers(world, rule, propose, num_rows, num_tokens), world.joint(num_tokens))


def first_q(world: World) -> np.ndarray:
    """What the drafter's first token is drawn from."""
    logits = world.draft[len(PROMPT) % CYCLE, PROMPT[-1]]
    return softmax(truncated(edited(logits, world.asked, PROMPT, (), EOS, None), world.asked))


def accepted_first(world: World, propose: Propose, num_rows: int = NUM_ROWS) -> float:
    """Share of rows whose first drafted token was accepted."""
    game = next(play(world, RULE, propose, num_rows, 4))
    return float((game.lengths > len(PROMPT)).double().mean())


# -- chains that are drawn at random --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("asked", ASKED)
def test_chains_have_the_distribution_of_the_target(asked: str, depth: int) -> None:
    """The joint distribution of four tokens: two or more steps, refusals at each level, and bonus tokens."""
    fits(random_world(5, seed=depth, asked=ASKED[asked]), drawn_chain(depth), 4)


@pytest.mark.parametrize("asked", ASKED_BY_ROW)
def test_parameters_that_name_tokens(asked: str) -> None:
    fits(random_world(4, seed=5, asked=ASKED_BY_ROW[asked]), drawn_chain(2), 3, FEW_ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_of_logits(dtype: torch.dtype) -> None:
    world = random_world(4, seed=6)
    rounded = torch.from_numpy(world.target).to(dtype).double().numpy()
    fits(replace(world, target=rounded, dtype=dtype), drawn_chain(2), 3)


@pytest.mark.parametrize("asked", ["nothing", "top_p"])
def test_a_reduced_draft_vocabulary(asked: str) -> None:
    """Ids that the drafter does not have have q = 0: they come from refusals and bonus tokens alone."""
    world = random_world(6, seed=7, asked=ASKED[asked])
    draft = world.draft.copy()
    draft[:, :, [1, 4, 5]] = -np.inf
    world = replace(world, draft=draft)
    fits(world, drawn_chain(2), 3)
    assert accepted_first(world, drawn_chain(2)) == pytest.approx(chance_of_the_first(world), abs=0.02)


def test_rows_that_have_fewer_nodes_than_the_step_is_wide() -> None:
    """What stands in the places behind them means nothing, however likely the target finds it."""
    drawn = drawn_chain(3)

    def propose(game: Game) -> Draft:
        return replace(drawn(game), num_nodes=game.slots % 3)

    fits(random_world(5, seed=9), propose, 4)


def test_a_grammar_that_the_drafter_does_not_see() -> None:
    world = random_world(4, seed=8, allowed={0: {0, 2}, 1: {1, 2, 3}, 2: {3}})
    fits(world, drawn_chain(3), 4)


def chance_of_the_first(world: World) -> float:
    return float(np.minimum(world.probabilities(()), first_q(world)).sum())


@pytest.mark.parametrize("asked", ASKED)
def test_as_much_is_accepted_as_can_be(asked: str) -> None:
    """The first token with probability sum(min(p, q)), more than by drawing twice; a q that got lost would show here."""
    world = random_world(5, seed=21, asked=ASKED[asked])
    chance, twice = chance_of_the_first(world), float(world.probabilities(()) @ first_q(world))
    assert accepted_first(world, drawn_chain(2)) == pytest.approx(chance, abs=5 * (chance * (1 - chance) / NUM_ROWS) ** 0.5)
    assert chance > twice + 0.02


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    world = random_world(5, seed=10, asked=Asked(temperature=0.8, top_p=0.9))
    same = replace(world, draft=world.target)
    game = next(play(same, RULE, drawn_chain(3), NUM_ROWS, 4))
    assert int(game.lengths.min()) == len(PROMPT) + 3


# -- proposals that were certain ------------------------------------------------------------------------------------------------


def certain(tokens: list[int], parents: list[int] | None = None, given: bool = False) -> Propose:
    """The same for every row, as n-grams propose; `given`: with the q that says so."""

    def propose(game: Game) -> Draft:
        num_rows = len(game.lengths)
        each = torch.tensor(tokens).expand(num_rows, -1)
        tree = None if parents is None else torch.tensor(parents).expand(num_rows, -1)
        probs = one_hot(each, game.world.vocab_size) if given else None
        return Draft(each, torch.full_like(game.lengths, len(tokens)), tree, probs)

    return propose


def plain_answers(world: World, propose: Propose, num_tokens: int) -> Tensor:
    *_, game = play(world, COUPLED, propose, 500, num_tokens)
    return game.history[:, : len(PROMPT) + num_tokens]


def nothing(game: Game) -> Draft:
    return Draft(game.lengths.new_empty((len(game.lengths), 0)), torch.zeros_like(game.lengths))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "tokens, parents", [([2, 1], None), ([0, 1, 2, 3], [0, 0, 0, 2]), ([1, 1, 3, 0, 9], [0, 0, 1, 2, 2])]
)  # fmt: skip
def test_certain_chains_and_trees_give_the_tokens_of_plain_decoding(
    tokens: list[int], parents: list[int] | None, given: bool
) -> None:
    world = random_world(4, seed=11)
    if not (given and parents):
        fits(world, certain(tokens, parents, given), 3)
    *_, game = play(world, RULE, certain(tokens, parents, given), 500, 3)
    assert torch.equal(game.history[:, : len(PROMPT) + 3], plain_answers(world, nothing, 3))


def first_certain(game: Game) -> Draft:
    """The first level is a certain token, the others are drawn behind it."""
    drawn = drawn_chain(3)(game)
    assert drawn.probs is not None
    behind = Game(game.world, game.rule, game.sampling, game.history, game.lengths)
    first = torch.full_like(game.lengths, 2)
    chain, probs = [first], [one_hot(first, game.world.vocab_size)]
    for level in (1, 2):
        logits = game.world.logits(game.world.draft, game.lengths + level + 1, chain[-1])
        proposal = game.rule.propose(logits, game.sampling, behind.nodes(chain))
        assert proposal.probs is not None
        chain.append(proposal.tokens)
        probs.append(proposal.probs)
    return Draft(torch.stack(chain, 1), torch.full_like(first, 3), probs=torch.stack(probs, 1))


def test_a_first_step_that_was_certain() -> None:
    """A row that comes from elsewhere, without the q of its first token."""
    world = random_world(4, seed=12, spread=1.0)
    fits(world, first_certain, 4)
    game = next(play(world, RULE, first_certain, NUM_ROWS, 4))
    assert float((game.lengths > len(PROMPT)).double().mean()) == pytest.approx(world.probabilities(())[2], abs=0.02)


@pytest.mark.parametrize("parents", [None, [0, 0, 1]])
def test_rows_of_several_drafters_keep_their_q(parents: list[int] | None) -> None:
    """Even rows are drawn, odd ones come from a drafter without q, of chains or trees: merged, each is what it was alone."""

    def merged(game: Game) -> Draft:
        even, odd = game.slots[::2], game.slots[1::2]
        drawn, other = drawn_chain(2)(game), certain([1, 2, 3], parents)(game)
        groups = [(rows, game.roots()[rows], _rows(draft, rows)) for rows, draft in ((odd, other), (even, drawn))]
        roots, draft = _merged(groups, 3)
        assert torch.equal(roots, game.roots())
        return draft

    world = random_world(4, seed=13)
    fits(world, merged, 3)
    *_, together = play(world, RULE, merged, 400, 3)
    *_, drawn = play(world, RULE, drawn_chain(2), 400, 3)
    *_, other = play(world, RULE, certain([1, 2, 3], parents), 400, 3)
    assert torch.equal(together.history[::2, :-1], drawn.history[::2, :-1])
    assert torch.equal(together.history[1::2, :-1], other.history[1::2, :-1])


def _rows(draft: Draft, rows: Tensor) -> Draft:
    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows]

    return Draft(draft.tokens[rows], draft.num_nodes[rows], pick(draft.parents), pick(draft.probs))


def test_greedy_rows_are_those_of_plain_decoding_beside_others() -> None:
    """Half of the rows at temperature 0: no q is made for them, and none of theirs is drawn."""
    world = random_world(5, seed=14)
    greedy = replace(world, asked=Asked(temperature=0.0))
    *_, wanted = play(greedy, COUPLED, nothing, 300, 4)
    *_, alone = play(greedy, RULE, drawn_chain(3), 300, 4)
    assert torch.equal(alone.history[:, :-1], wanted.history[:, :-1])

    def mixed(game: Game) -> Draft:
        hot, cold = world.sampling(300, 0), greedy.sampling(300, 0)
        needs = tuple(pair[row % 2] for row, pair in enumerate(zip(hot.needs, cold.needs, strict=True)))
        game.sampling = replace(hot, needs=needs)
        draft = drawn_chain(3)(game)
        assert draft.probs is not None and torch.equal(draft.probs[1::2], one_hot(draft.tokens, 5)[1::2])
        return draft

    *_, both = play(world, RULE, mixed, 300, 4)
    assert torch.equal(both.history[1::2, :-1], wanted.history[1::2, :-1])
    *_, hot_alone = play(world, RULE, drawn_chain(3), 300, 4)
    assert torch.equal(both.history[::2, :-1], hot_alone.history[::2, :-1])
    assert drawn_chain(2)(Game(greedy, RULE, greedy.sampling(3, 0), both.history[:3], both.lengths[:3] * 0)).probs is None


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    world = random_world(5, seed=15, asked=ASKED["all three"], dtype=torch.float32)
    *_, together = play(world, RULE, drawn_chain(3), 64, 6, first_seed=100)
    for row in (0, 17, 63):
        *_, alone = play(world, RULE, drawn_chain(3), 1, 6, first_seed=100 + row)
        assert torch.equal(alone.history[0, :-1], together.history[row, :-1])


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), -float("inf")])
def test_a_sick_draft_model_costs_acceptance_and_no_token(sick: float) -> None:
    world = random_world(4, seed=16)
    draft = world.draft.copy()
    draft[1:, :2] = sick
    fits(replace(world, draft=draft), drawn_chain(2), 3)


# -- planted mistakes -----------------------------------------------------------------------------------------------------------


def _another_level(game: Game) -> Draft:
    draft = drawn_chain(2)(game)
    assert draft.probs is not None
    return replace(draft, probs=draft.probs.roll(1, 1))


def _another_row(game: Game) -> Draft:
    draft = drawn_chain(2)(game)
    assert draft.probs is not None
    return replace(draft, probs=draft.probs.roll(1, 0))


def _not_what_was_drawn_from(game: Game) -> Draft:
    draft = drawn_chain(2)(game)
    assert draft.probs is not None
    return replace(draft, probs=draft.probs.sqrt() / draft.probs.sqrt().sum(2, keepdim=True))


def _without_q(game: Game) -> Draft:
    return replace(drawn_chain(2)(game), probs=None)


def contrary(**more: object) -> World:
    """Target and draft have nothing to do with each other: much is refused, and every token is among what is said instead."""
    world = random_world(5, seed=22, spread=1.0, **more)
    return replace(world, draft=random_world(5, seed=23, spread=1.0).target)


WRONG_DRAFTS: dict[str, Propose] = {
    "q of another level": _another_level,
    "q of another row": _another_row,
    "q that is not what was drawn from": _not_what_was_drawn_from,
}
WRONG_RULES: dict[str, tuple[str, Callable[..., object]]] = {
    "the residual is p": ("_residual", lambda p, q: p),
    "the residual is q - p": ("_residual", lambda p, q: (q - p).clamp(min=1e-9)),
    "everything is accepted": ("uniform", lambda ka, kb: torch.zeros(len(ka), dtype=torch.float64)),
    "nothing is accepted": ("uniform", lambda ka, kb: torch.full((len(ka),), 1e9, dtype=torch.float64)),
}


@pytest.mark.parametrize("mistake", WRONG_DRAFTS)
def test_a_wrong_q_would_be_seen(mistake: str) -> None:
    with pytest.raises(AssertionError, match=SEEN):
        fits(contrary(), WRONG_DRAFTS[mistake], 3)


@pytest.mark.parametrize("mistake", WRONG_RULES)
def test_a_wrong_rule_would_be_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, *WRONG_RULES[mistake])
    with pytest.raises(AssertionError, match=SEEN):
        fits(contrary(), drawn_chain(2), 3)


@pytest.mark.parametrize("asked", ["top_k", "top_p", "min_p", "temperature"])
def test_a_p_or_q_without_the_transforms_would_be_seen(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "process", lambda logits, rows, nodes, masks=None: logits)
    with pytest.raises(AssertionError, match=SEEN):
        fits(contrary(asked=ASKED[asked]), drawn_chain(2), 3)


@pytest.mark.parametrize("one, other", [("RESIDUAL", "DRAFT"), ("RESIDUAL", "ACCEPT"), ("ACCEPT", "DRAFT")])
def test_shared_noise_would_be_seen(one: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared:
        TARGET, DRAFT, ACCEPT, RESIDUAL = Noise.TARGET, Noise.DRAFT, Noise.ACCEPT, Noise.RESIDUAL

    setattr(Shared, one, getattr(Noise, other))
    monkeypatch.setattr(module, "Noise", Shared)
    with pytest.raises(AssertionError, match=SEEN):
        fits(contrary(), drawn_chain(2), 2)


def test_a_lost_q_would_be_seen() -> None:
    """It changes no token's chances, and is seen in what is accepted."""
    world = contrary()
    fits(world, _without_q, 3)
    assert accepted_first(world, _without_q) < chance_of_the_first(world) - 0.1


def test_the_flag_names_the_rules() -> None:
    assert get_args(EngineConfig.model_fields["accept"].annotation) == tuple(RULES)
