"""The CPU's stream: steps run in order, and a result is handed over once the step behind it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.executor import ThreadExecutor
from slipstream.engine.plan import StepPlan
from slipstream.types import nothing

SOON_S = 10.0


class Gates:
    """A device that prepares and computes each step only when it is let; step 13 fails while it prepares, step 14 later."""

    def __init__(self) -> None:
        self.prepare, self.compute = threading.Semaphore(0), threading.Semaphore(0)
        self.prepared: list[int] = []
        self.closed = False

    def run(self, plan: StepPlan, computes: Callable[[], None] = nothing) -> Any:
        assert self.prepare.acquire(timeout=SOON_S)
        if plan.step == 13:
            raise ValueError("unlucky")
        self.prepared.append(plan.step)
        computes()
        assert self.compute.acquire(timeout=SOON_S)
        if plan.step == 14:
            raise ValueError("worse")
        return SimpleNamespace(step=plan.step)

    def close(self) -> None:
        self.closed = True


def test_a_result_waits_until_the_step_behind_it_computes() -> None:
    device = Gates()
    executor = ThreadExecutor(device)
    first, second = executor.submit(StepPlan(1)), executor.submit(StepPlan(2))
    device.prepare.release()
    device.compute.release()
    while device.prepared != [1]:
        threading.Event().wait(0.001)
    assert not first.done()
    device.prepare.release()
    assert first.result().step == 1
    assert device.prepared == [1, 2]
    assert not second.done()
    device.compute.release()
    assert second.result().step == 2  # nothing is behind it
    executor.close()
    assert device.closed


@pytest.mark.parametrize("sick", [13, 14])
def test_a_failed_step_keeps_no_other_from_its_result(sick: int) -> None:
    device = Gates()
    executor = ThreadExecutor(device)
    handles = [executor.submit(StepPlan(step)) for step in (1, sick, 2)]
    for gate in (device.prepare, device.compute):
        gate.release(3)
    assert handles[0].result().step == 1
    with pytest.raises(ValueError, match="unlucky" if sick == 13 else "worse"):
        handles[1].result()
    assert handles[2].result().step == 2
    executor.close()


def test_close_finishes_what_is_queued() -> None:
    device = Gates()
    executor = ThreadExecutor(device)
    handles = [executor.submit(StepPlan(step)) for step in range(1, 5)]
    for gate in (device.prepare, device.compute):
        gate.release(4)
    executor.close()
    assert [handle.done() for handle in handles] == [True] * 4
    assert [handle.result().step for handle in handles] == [1, 2, 3, 4]
