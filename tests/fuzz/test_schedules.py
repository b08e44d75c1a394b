"""Random schedules. The seed is the commit, so every commit is held against schedules nobody has run before, and can be again."""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cache.ledger import Ledger
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Launched
from slipstream.engine.settle import Settler
from slipstream.testing.tiny import FAMILIES
from slipstream.types import EngineOutput, nothing
from tests.fuzz.schedule import Schedule, Setting, draw, run, run_seed, shrink
from tests.fuzz.universe import NUM_REAL_JOBS

NUM_SCHEDULES = 3000
NUM_REAL_SCHEDULES = 50
BATCHES = 30
OUTSIDE_GIT = 20240607


def commit_seed() -> int:
    """A number made of the commit; a constant where there is none."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return OUTSIDE_GIT
    return int(told.stdout[:10], 16)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_schedules(batch: int) -> None:
    size = NUM_SCHEDULES // BATCHES
    first = commit_seed() + batch * size
    for seed in range(first, first + size):
        run_seed(seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules_on_a_real_model(family: str) -> None:
    for seed in range(NUM_REAL_SCHEDULES // len(FAMILIES)):
        run_seed(commit_seed() + seed, (family,), NUM_REAL_JOBS)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_schedules_that_hypothesis_draws_and_shrinks(rng: random.Random) -> None:
    run(draw(rng))


def test_schedules_reach_what_they_are_for() -> None:
    """A fuzzer that never gets anywhere passes too: counts what three hundred schedules do."""
    seen: Counter[str] = Counter()
    original = Runner.run

    def spy(self: Runner, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        result = original(self, plan, computes)
        widths = [row.num_nodes for row in plan.rows]
        seen["steps"] += 1
        seen["chunks and rows in one step"] += bool(plan.chunks and plan.rows)
        seen["several chunks"] += len(plan.chunks) > 1
        seen["chunks that do not sample"] += any(not chunk.is_last for chunk in plan.chunks)
        seen["rows of different width"] += len(set(widths)) > 1
        seen["several drafters"] += len({part.observer for part in plan.parts}) > 1
        seen["observers that change"] += any(row.observer != row.relayed_by for row in plan.rows)
        seen["drafters that step in"] += any(row.num_nodes and row.drafter != row.relayed_by for row in plan.rows)
        seen["draft KV caught up with"] += bool(plan.fills)
        # All but the last part of a fill that the budget cuts.
        seen["draft KV caught up with in parts"] += len(plan.fills) > sum(row.observer != row.relayed_by for row in plan.rows)
        seen["slots with a new owner"] += any(admit.epoch > 1 for admit in plan.admits)
        seen["retired while others run"] += bool(plan.retires and plan.rows)
        seen["runs of several tokens"] += bool((result.accept_lens > 2).any())
        seen["rejected drafts"] += bool((result.accept_lens[-len(widths) :] <= widths).any()) if widths else False
        seen["rows at their limit"] += bool((result.accept_lens == 0).any())
        seen["sick logits"] += bool((result.non_finite >= 0).any())
        seen["grammars closed"] += bool((result.grammar_ends >= 0).any())
        seen["cached prefixes"] += any(admit.computed_len for admit in plan.admits)
        seen["copied pages"] += bool(plan.page_copies)
        seen["pages saved to the host"] += bool(plan.page_saves)
        seen["pages loaded from the host"] += bool(plan.page_loads)
        seen["resumed answers"] += any(len(admit.tokens) > admit.prompt_len for admit in plan.admits)
        return result

    drop = Settler.settle

    def settle(self: Settler, launched: Launched, result: StepResult) -> list[EngineOutput]:
        seen["results dropped"] += any(request.finish_reason is not None for request in launched.sampled)
        seen["requests that wait"] += bool(self._scheduler.waiting)
        seen["pauses"] += self._scheduler.num_paused > 0
        seen["retractions"] += any(request.is_leaving for request in self._scheduler.running)
        return drop(self, launched, result)

    offer = Ledger.cache

    def cache(self: Ledger, *args: Any) -> list[tuple[int, int]]:
        replaced = offer(self, *args)
        seen["one copy of two"] += bool(replaced)
        return replaced

    with (
        mock.patch.object(Runner, "run", spy),
        mock.patch.object(Settler, "settle", settle),
        mock.patch.object(Ledger, "cache", cache),
    ):
        for seed in range(300):
            run_seed(seed)
    missed = {name: count for name, count in seen.items() if count < 5}
    assert not missed, f"{missed} of {seen}"


def test_a_draft_model_that_is_the_model_is_right_whatever_it_missed() -> None:
    """Answers do not show a hole in a draft model's KV, but what it says behind one is wrong: nothing it says may be refused."""
    seen: Counter[str] = Counter()
    original = Runner.run

    def spy(self: Runner, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        lengths = [int(self.relay._lengths[row.slot]) for row in plan.rows]
        result = original(self, plan, computes)
        first = len(plan.sampled) - len(plan.rows)
        for place, (row, length) in enumerate(zip(plan.rows, lengths, strict=True), first):
            masked = row.slot in self._masks._constrained  # a draft knows nothing of grammars
            if row.drafter.startswith("draft model") and row.num_nodes and not masked and result.non_finite[place] < 0:
                room = max(int(self.state.limits[row.slot]) - length - 1, 0)
                wanted = min(int(result.num_drafted[place]) + 1, room)
                assert result.accept_lens[place] == wanted, f"step {plan.step}: {row} had {result.accept_lens[place]} of {wanted}"
                seen["drafts"] += 1
        seen["fills"] += len(plan.fills)
        return result

    with mock.patch.object(Runner, "run", spy):
        for seed in range(commit_seed(), commit_seed() + 250):
            schedule = draw(random.Random(seed))
            setting = replace(schedule.setting, drafter="mixed models", adaptive=False, accept="coupled", guarded=False)
            run(replace(schedule, setting=setting))
    assert seen["drafts"] > 50 and seen["fills"] > 50, seen


def test_a_seed_draws_the_same_schedule_every_time() -> None:
    assert draw(random.Random(5)) == draw(random.Random(5)) != draw(random.Random(6))


def test_shrinking_keeps_what_fails_and_drops_the_rest() -> None:
    schedule = Schedule(
        Setting(drafter="rand 3", num_seqs=2),
        (11, 22, 33),
        ((0, ""), (1, "salt"), (0, "")),
        (("add", 0), ("step", 0), ("add", 1), ("abort", 1), ("add", 2), ("step", 0), ("breathe", 0)),
    )
    small = shrink(schedule, lambda one: 22 in one.requests and one.setting.lag == 1)
    assert small == Schedule(Setting(num_seqs=8, num_pages=256, caching=False), (22,), ((0, ""),), (("add", 0),))
