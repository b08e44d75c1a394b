"""The adversarial executor: in order, at any time, and it notices a plan that is not frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.engine.plan import Admit, StepPlan
from slipstream.errors import InvariantBroken
from slipstream.testing.adversarial import MOODS, AdversarialExecutor
from slipstream.types import EngineRequest, SamplingParams


@dataclass
class RecordingDevice:
    """Notes the steps it ran; step 13 fails."""

    ran: list[int] = field(default_factory=list)
    closed: bool = False

    def run(self, plan: StepPlan) -> Any:
        self.ran.append(plan.step)
        if plan.step == 13:
            raise ValueError("unlucky")
        return SimpleNamespace(step=plan.step)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("mood", [*MOODS, None])
@pytest.mark.parametrize("seed", range(5))
def test_steps_run_in_order_and_once(mood: str | None, seed: int) -> None:
    device = RecordingDevice()
    executor = AdversarialExecutor(device, seed, mood)
    handles = [executor.submit(StepPlan(step)) for step in range(1, 9)]
    assert [handle.result().step for handle in (handles[3], handles[1], handles[3])] == [4, 2, 4]
    executor.close()
    assert device.ran == list(range(1, 9)) and device.closed


def test_each_mood_runs_steps_at_its_own_time() -> None:
    def progress(mood: str, seed: int = 0) -> list[int]:
        device = RecordingDevice()
        executor = AdversarialExecutor(device, seed, mood)
        seen = []
        for step in range(1, 13):
            executor.submit(StepPlan(step))
            seen.append(len(device.ran))
        return seen

    assert progress("eager") == list(range(1, 13))
    assert progress("lazy") == [0] * 12
    mixed = [progress("mixed", seed) for seed in range(20)]
    assert any(0 < seen[5] < 6 for seen in mixed) and len({tuple(seen) for seen in mixed}) > 10
    assert progress("mixed", 7) == progress("mixed", 7)


def test_a_result_may_stay_unseen_for_a_while() -> None:
    executor = AdversarialExecutor(RecordingDevice(), 1, "eager")
    handle = executor.submit(StepPlan(1))
    seen = {handle.done() for _ in range(50)}
    assert handle.has_run and seen == {False, True}


def test_a_step_that_has_not_run_is_never_done() -> None:
    executor = AdversarialExecutor(RecordingDevice(), 1, "lazy")
    handle = executor.submit(StepPlan(1))
    assert not any(handle.done() for _ in range(50))


@pytest.mark.parametrize("mood", MOODS)
def test_a_failed_step_fails_its_own_result(mood: str) -> None:
    executor = AdversarialExecutor(RecordingDevice(), 0, mood)
    bad, good = executor.submit(StepPlan(13)), executor.submit(StepPlan(14))
    assert good.result().step == 14
    with pytest.raises(ValueError, match="unlucky"):
        bad.result()


def test_a_plan_that_changes_after_it_was_submitted_is_found() -> None:
    tokens = np.array([1, 2, 3])
    request = EngineRequest("a", (1, 2, 3), SamplingParams(), 0)
    plan = StepPlan(1, admits=(Admit(1, 1, request, tokens, 3, 0, 0, 10),))
    handle = AdversarialExecutor(RecordingDevice(), 0, "lazy").submit(plan)
    tokens[1] = 9
    with pytest.raises(InvariantBroken, match="a plan must not change once it is submitted, but step 1 did"):
        handle.result()
