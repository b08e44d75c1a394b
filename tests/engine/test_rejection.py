"""--accept rejection in the engine: what must still be the tokens of plain decoding, and that the rest has its distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.runner import Runner
from slipstream.errors import InvariantBroken
from slipstream.relay import RelayPayload
from slipstream.speculate.accept import one_hot
from slipstream.speculate.base import Draft, Drafter, StepContext
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.eagle import Eagle
from slipstream.speculate.ngram import NGram
from slipstream.speculate.registry import Target
from slipstream.speculate.sampled_rows import SampledRows
from slipstream.testing import drafters as d
from slipstream.testing.hash_head import HashHead
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.relaying import relaying
from slipstream.testing.tiny import tiny_model
from slipstream.testing.toy_grammar import digits
from slipstream.types import SamplingParams
from tests.engine.harness import EOS, Answer, DrafterFactory, Job, assert_equal, reference, run
from tests.hash_oracle import hidden_states, logits_of
from tests.sampling.chi_square import assert_fits
from tests.speculate.eagle_heads import eagle

MODEL = HashLM(vocab_size=64, context_len=512, eos_token_ids=(EOS,), eos_bias=0.5)
OTHER = HashLM(vocab_size=64, context_len=128, eos_token_ids=(EOS,), eos_bias=0.5, salt=1)
CERTAIN: dict[str, DrafterFactory] = {
    "self_chain": d.self_chain(3),
    "self_tree": d.self_tree(3),
    "rand": d.rand_chain(3, beyond=9),
    "rand_tree": d.rand_tree(7),
    "partial": d.partial(7, siblings=2),
    "relaying": relaying(d.partial(3), 3, probs_steps=2),
    "ngram": lambda target: NGram(3),
    "eagle_tree": eagle(4, 4, 8),
}
DRAWN: dict[str, DrafterFactory] = {
    "itself": lambda target: DraftModel(target.model, target, 3),
    "other": lambda target: DraftModel(OTHER, target, 3),
    "eagle": eagle(1, 3),
}


def params(max_tokens: int = 24, **more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **more})


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + place * place * 7) % 60 for place in range(length))


HOT = params(30, temperature=1.0, ignore_eos=True)
GREEDY = [
    Job(prompt(1, 5), params()),
    Job(prompt(2, 130), params(40)),
    Job(prompt(3, 17), params(1)),
    Job(prompt(4, 3), params(9, logprobs=3)),
    Job(prompt(5, 9), params(30, repetition_penalty=1.3, logit_bias={5: 3.0}, min_tokens=5, stop=("A", "7!"))),
    Job(prompt(6, 12), params(20), grammar=digits("20-22:9")),
]
SEEDED = [
    Job(prompt(7, 1), HOT, seed=7),
    Job(prompt(8, 40), params(30, temperature=0.7, top_p=0.9, top_k=20, logprobs=2), seed=-3),
    Job(prompt(9, 64), params(50, temperature=1.3, min_p=0.02, frequency_penalty=0.5), seed=2**40),
    Job(prompt(10, 5), params(30, temperature=1.0), seed=1, grammar=digits("10-19:3")),
]


@pytest.mark.parametrize("lag, page_size, chunk", [(0, 16, 2048), (1, 1, 24), (1, 16, 64)])
@pytest.mark.parametrize("name", DRAWN)
def test_at_temperature_0_the_tokens_of_plain_decoding(name: str, lag: int, page_size: int, chunk: int) -> None:
    """Beside rows that are drawn at random, and without them."""
    cell = {"lag": lag, "page_size": page_size, "chunk": chunk, "drafters": {name: DRAWN[name]}, "accept": "rejection"}
    wanted = reference(MODEL, GREEDY)
    assert_equal(run(MODEL, GREEDY, **cell), wanted, (name, cell))
    got = run(MODEL, [job for pair in zip(GREEDY, SEEDED * 2, strict=False) for job in pair], **cell)
    assert_equal(got[::2], wanted, (name, cell))
    assert all(answer.error is None for answer in got)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", CERTAIN)
def test_drafters_that_draw_nothing_give_the_tokens_of_plain_decoding_at_any_temperature(name: str, lag: int) -> None:
    jobs = [*GREEDY, *SEEDED]
    got = run(MODEL, jobs, lag=lag, chunk=64, drafters={name: CERTAIN[name]}, accept="rejection")
    assert_equal(got, reference(MODEL, jobs), (name, lag))
    assert all(answer.error is None for answer in got)


@pytest.mark.parametrize("family, name", [("hash", "itself"), ("llama", "itself"), ("hash", "eagle")])
@pytest.mark.parametrize("lag, page_size", [(0, 16), (1, 1)])
def test_the_target_itself_is_accepted_whole(family: str, name: str, lag: int, page_size: int) -> None:
    """Prompts join while others are verified: a q that is lost or goes to another row is refused here."""
    model = MODEL if family == "hash" else tiny_model(family)
    drafters = {name: DRAWN[name]}
    jobs = [Job(prompt(n, 3 + 11 * n), replace(HOT, top_p=1.0 - n / 20, temperature=1.5), seed=n) for n in range(9)]
    cell = {"lag": lag, "page_size": page_size, "chunk": 24, "batch": 4, "accept": "rejection"}
    got = run(model, jobs, drafters=drafters, **cell)
    # The device cuts at the limit what the scheduler, one step behind, had planned beyond it.
    assert all(answer.num_accepted >= answer.num_drafted - 3 for answer in got), [(a.num_drafted, a.num_accepted) for a in got]
    assert sum(answer.num_accepted for answer in got) > 0.6 * sum(len(answer.token_ids) for answer in got)
    if not lag:
        sampled = Runner._sampled_rows

        def without_q(*args: Any) -> SampledRows:
            rows = sampled(*args)
            return replace(rows, draft=replace(rows.draft, probs=None))

        with mock.patch.object(Runner, "_sampled_rows", without_q):
            lost = run(model, jobs, drafters=drafters, **cell)
        assert sum(a.num_accepted for a in lost) < 0.5 * sum(a.num_drafted for a in lost), "a lost q must be seen"


def test_a_seed_gives_the_same_answer_in_a_batch_and_alone() -> None:
    """With the same drafter, as wide in each step."""
    jobs = [*SEEDED, Job(prompt(11, 9), HOT, seed=5)]
    cell = {"drafters": {"other": DRAWN["other"]}, "accept": "rejection"}
    together = run(MODEL, jobs, **cell)
    assert_equal(together, [run(MODEL, [job], **cell)[0] for job in jobs], "alone")
    assert_equal(together, run(MODEL, jobs, **cell), "again")
    plain = reference(MODEL, jobs)
    assert any(one.token_ids != other.token_ids for one, other in zip(together, plain, strict=True)), "noise of its own"


SMALL = HashLM(vocab_size=5, context_len=32)
SMALL_OTHER = HashLM(vocab_size=5, context_len=32, salt=1)
START = (1, 4, 2)


def chances(num_tokens: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Chances of each answer of SMALL to START, by its definition."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for answer, chance in found.items():
            scores = np.array(logits_of(hidden_states([*START, *answer])[-1], SMALL.vocab_size)) / temperature
            weights = np.exp(scores - scores.max())
            longer.update({(*answer, token): chance * one for token, one in enumerate(weights / weights.sum())})
        found = longer
    return found


def test_a_seed_gives_the_same_answer_whatever_the_lag() -> None:
    """Drafts are as wide at the end of an answer too, of which the host knows less at lag 1."""
    jobs = [Job(prompt(seed, 5 + seed), params(40, temperature=1.5, ignore_eos=True), seed=seed) for seed in range(24)]
    cell = {"drafters": {"other": DRAWN["other"]}, "accept": "rejection", "batch": 24}
    assert_equal(run(MODEL, jobs, lag=1, **cell), run(MODEL, jobs, lag=0, **cell), "lag")


class FewerIds(HashHead):
    """A wrong head that knows three of the target's five tokens."""

    target_ids = torch.tensor([3, 0, 2])

    def logits(self, states: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        return super().logits(states).index_select(1, self.target_ids)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", ["draft_model", "eagle", "eagle, fewer ids"])
def test_answers_have_the_distribution_of_plain_decoding(name: str, lag: int) -> None:
    """Joint, of the three tokens behind a prompt: one of the prefill, two of steps that verify."""
    temperature, num_tokens = 6.0, 3

    def drafter(target: Target) -> Drafter:
        if name == "draft_model":
            return DraftModel(SMALL_OTHER, target, 2)
        return Eagle(FewerIds(SMALL_OTHER) if "fewer" in name else HashHead(SMALL_OTHER), target, 1, 2, 2)

    asked = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    jobs = [Job(START, asked, seed=seed) for seed in range(3000)]
    cell = {"lag": lag, "batch": 100, "chunk": 400, "drafters": {"other": drafter}, "accept": "rejection"}
    with mock.patch("slipstream.engine.runner.SyncGuard", mock.MagicMock):
        got: list[Answer] = run(SMALL, jobs, **cell)
    wanted = chances(num_tokens, temperature)
    counted = Counter(tuple(answer.token_ids) for answer in got)
    assert set(counted) <= set(wanted)
    assert_fits(np.array([counted[answer] for answer in wanted]), np.array(list(wanted.values())))
    plain = reference(SMALL, jobs[:50])
    assert any(one.token_ids != other.token_ids for one, other in zip(got, plain, strict=False)), "noise of its own"
    assert 0.1 < sum(a.num_accepted for a in got) / sum(a.num_drafted for a in got) < 0.95


def test_q_is_made_only_where_something_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for greedy steps, and none for the coupled rule."""
    seen: list[bool] = []
    original = Runner._sampled_rows

    def spy(self: Runner, *args: object) -> object:
        rows = original(self, *args)
        seen.append(rows.draft.probs is not None)
        return rows

    monkeypatch.setattr(Runner, "_sampled_rows", spy)
    run(MODEL, GREEDY, drafters={"other": DRAWN["other"]}, accept="rejection")
    run(MODEL, SEEDED, drafters={"other": DRAWN["other"]}, accept="coupled")
    assert seen and not any(seen)
    run(MODEL, SEEDED, drafters={"other": DRAWN["other"]}, accept="rejection")
    assert any(seen)


class DrawnTree(d.RandDrafter):
    """A tree with a q."""

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        draft = super().propose(ctx, payload, width)
        return replace(draft, probs=one_hot(draft.tokens, MODEL.vocab_size))


def test_trees_that_are_drawn_at_random_are_refused() -> None:
    shapes = torch.tensor([[0, 0, 1]])
    with pytest.raises(InvariantBroken, match="must be a chain"):
        run(MODEL, SEEDED[:1], drafters={"wrong": lambda target: DrawnTree(64, 3, shapes, 0)}, accept="rejection")
