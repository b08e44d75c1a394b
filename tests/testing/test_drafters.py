"""The test drafters do what they are for: SELF is accepted whole, RAND hardly ever, PARTIAL in between, RELAYING notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.runner import Runner
from slipstream.relay import DraftInput, RelayPayload
from slipstream.speculate.base import Draft, StepContext, Verdict
from slipstream.testing.drafters import (
    DrafterFactory,
    RandDrafter,
    SelfDrafter,
    partial,
    rand_chain,
    rand_tree,
    self_chain,
    self_tree,
)
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.relaying import RelayingDrafter, RelayMismatch, relaying
from slipstream.testing.tiny import tiny_model
from slipstream.types import SamplingParams, nothing
from tests.engine.harness import Answer, Job, run

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.3, max_tokens=33, ignore_eos=True),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, max_tokens=33, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.4, frequency_penalty=1.0, presence_penalty=-0.5, max_tokens=33, ignore_eos=True
    ),
    "edits": SamplingParams(
        temperature=0.0, logit_bias={5: 9.0}, min_tokens=33, stop_token_ids=(5,), max_tokens=33, ignore_eos=True
    ),
}
JOBS = [Job((4, 5, 6, 7), params, seed=11) for params in PARAMS.values()]


@contextmanager
def accept_lens() -> Iterator[list[list[int]]]:
    """Accept lengths of every step."""
    seen: list[list[int]] = []
    original = Runner.run

    def spy(self: Runner, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        result = original(self, plan, computes)
        seen.append(result.accept_lens.tolist())
        return result

    with mock.patch.object(Runner, "run", spy):
        yield seen


def answers_of(make: DrafterFactory, jobs: list[Job] = JOBS) -> tuple[list[Answer], list[list[int]]]:
    with accept_lens() as seen:
        answers = run(HashLM(64, 256), jobs, drafters={"test": make})
    return answers, seen


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("siblings", [1, 3])
def test_self_is_accepted_whole_with_any_parameters(depth: int, siblings: int) -> None:
    """The first token comes from the prompt; the other 32 in full steps, until there is no room for a whole tree's KV."""
    answers, seen = answers_of(self_tree(depth, siblings) if siblings > 1 else self_chain(depth))
    assert [len(answer.token_ids) for answer in answers] == [33] * len(JOBS)
    remaining = 32
    for lengths in seen[1:]:
        if remaining - 1 < depth * siblings:
            break
        assert lengths == [depth + 1] * len(JOBS)
        remaining -= depth + 1
    assert remaining < 20


def test_self_is_accepted_whole_on_a_real_model() -> None:
    with accept_lens() as seen:
        run(tiny_model("llama"), JOBS[:3], drafters={"test": self_tree(3, 2)})
    assert seen[1:5] == [[4, 4, 4]] * 4


def test_the_accepted_path_of_a_self_tree_has_holes() -> None:
    """Without compaction of the KV the answer changes."""
    right, _ = answers_of(self_tree(3, 3))
    with mock.patch.object(Runner, "_compact", return_value=None):
        wrong, _ = answers_of(self_tree(3, 3))
    assert [a.token_ids for a in right] != [a.token_ids for a in wrong]


def test_a_self_trees_own_node_is_never_the_first_sibling() -> None:
    seen: list[Verdict] = []
    original = SelfDrafter.observe

    def spy(self: SelfDrafter, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        seen.append(verdict)
        return original(self, ctx, verdict, taps)

    with mock.patch.object(SelfDrafter, "observe", spy):
        run(HashLM(64, 256), JOBS[:1], drafters={"test": self_tree(4, 3)})
    paths = [verdict.path[0, : int(verdict.accept_lens[0])].tolist() for verdict in seen[1:4]]
    assert paths == [[0, 2, 6, 8, 12]] * 3


def test_rand_is_hardly_ever_accepted() -> None:
    for make in (rand_chain(7), rand_tree(7), rand_chain(7, beyond=50)):
        answers, _ = answers_of(make)
        drafted, accepted = sum(a.num_drafted for a in answers), sum(a.num_accepted for a in answers)
        assert drafted > 500 and accepted < 0.05 * drafted


def test_rand_proposes_every_kind_of_tree_and_ids_beyond_the_vocabulary() -> None:
    drafts: list[Draft] = []
    original = RandDrafter.propose

    def spy(self: RandDrafter, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        drafts.append(original(self, ctx, payload, width))
        return drafts[-1]

    with mock.patch.object(RandDrafter, "propose", spy):
        answers_of(rand_tree(5, beyond=4))
    shapes = {tuple(row) for draft in drafts if draft.parents is not None for row in draft.parents.tolist() if len(row) == 5}
    assert len(shapes) > 5
    assert all(parent <= node for shape in shapes for node, parent in enumerate(shape))
    assert any(shape != (0, 1, 2, 3, 4) and len(set(shape)) > 1 for shape in shapes)
    assert max(int(draft.tokens.max()) for draft in drafts if draft.tokens.numel()) >= 64


def test_accept_lengths_of_partial_vary_by_row_and_step() -> None:
    for make in (partial(7), partial(3, 3, percent=50)):
        _, seen = answers_of(make)
        assert {length for step in seen[1:] for length in step} >= {1, 2, 3, 4}
        assert any(len(set(step)) > 1 for step in seen[1:])


# -- RELAYING ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("probs_steps", [0, 2])
def test_relaying_gets_back_what_it_gave(k: int, probs_steps: int) -> None:
    checked = 0
    original = RelayingDrafter.propose

    def spy(self: RelayingDrafter, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        nonlocal checked
        extras = payload.extras()
        assert extras["topk_p"].shape == extras["topk_index"].shape == (len(ctx.slots), k)
        assert extras["draft_probs"].shape == (len(ctx.slots), *((probs_steps, 64) if probs_steps else (64,)))
        checked += len(ctx.slots)
        return original(self, ctx, payload, width)

    with mock.patch.object(RelayingDrafter, "propose", spy):
        answers, _ = answers_of(relaying(partial(3), k, probs_steps))
    assert checked > 50 and sum(a.num_accepted for a in answers) > 20


@pytest.mark.parametrize("name", ["topk_p", "topk_index", "hidden_states", "draft_probs"])
@pytest.mark.parametrize("how", ["other row", "one value", "lost"])
def test_relaying_notices_what_comes_back_wrong(name: str, how: str) -> None:
    original = RelayingDrafter.propose

    def spoil(self: RelayingDrafter, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        value = payload.extras()[name]
        if how == "other row":
            changed: Tensor | None = value.roll(1, 0)
        elif how == "one value":
            changed = value.clone()
            changed[-1].view(-1)[-1] += 1
        else:
            changed = None
        return original(self, ctx, replace(payload, **{name: changed}), width)

    with (
        mock.patch.object(RelayingDrafter, "propose", spoil),
        pytest.raises(RelayMismatch, match="propose must get" if how == "lost" else f"{name} of slots"),
    ):
        answers_of(relaying(rand_chain(2), 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ctx, v, t: (ctx, replace(v, new_lengths=v.new_lengths + 1), t), "new_lengths are"),
        (lambda ctx, v, t: (ctx, replace(v, bonus_tokens=v.bonus_tokens + 1), t), "the bonus is"),
        (lambda ctx, v, t: (ctx, replace(v, tokens=v.tokens.clamp(min=0), accept_lens=v.accept_lens), t), "tokens are -1"),
        (lambda ctx, v, t: (ctx, v, None), "taps it declared"),
        (lambda ctx, v, t: (ctx, v, t[1:]), "taps hold"),
        (lambda ctx, v, t: (ctx, v, t.roll(1, 0)), "the first taps are|root first"),
        (lambda ctx, v, t: (_with_next(ctx, 1), v, t), "behind a last chunk|one further"),
    ],
)
def test_relaying_notices_what_it_is_shown_wrong(change, message: str) -> None:
    original = RelayingDrafter.observe

    def spoil(self: RelayingDrafter, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        return original(self, *change(ctx, verdict, taps))

    with mock.patch.object(RelayingDrafter, "observe", spoil), pytest.raises(RelayMismatch, match=message):
        answers_of(relaying(rand_chain(2), 3))


def _with_next(ctx: StepContext, by: int) -> StepContext:
    return ctx if ctx.chunks is None else replace(ctx, chunks=replace(ctx.chunks, next_tokens=ctx.chunks.next_tokens + by))


def test_relaying_relays_values_that_differ_by_row_step_and_owner() -> None:
    target = mock.Mock(model=HashLM(64, 64))
    drafter = RelayingDrafter(target, rand_chain(2)(target), 3)
    base = tuple(map(torch.tensor, ([1, 1, 1, 1, 2], [1, 1, 1, 2, 1], [5, 5, 6, 5, 5], [9, 8, 9, 9, 9])))
    values = drafter._extras(*base)["hidden_states"]
    assert len({tuple(row) for row in values.tolist()}) == 5
