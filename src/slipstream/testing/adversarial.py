"""An executor that runs each step as early or as late as a seed says. It shows what a real stream does once in a million times.

    host     submit 1   add   submit 2   abort   settle 1   submit 3   settle 2
    device      1                1          .         .        2                     eager:  at once
    device      .        .       .          .         1        .           2        lazy:   when the result is asked for
    device      .        1       .          .         .        2           .        mixed:  anywhere between

Steps run in order, on the calling thread: a schedule depends on the seed alone. A plan that was changed after it was submitted is
an error: where steps run in another process it would have been sent by then.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from slipstream.engine.executor import Device, Executor
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.errors import InvariantBroken

MOODS = ("eager", "lazy", "mixed")


class AdversarialHandle:
    """A submitted step. `done` may say no for a while after the step has run."""

    def __init__(self, executor: AdversarialExecutor, plan: StepPlan) -> None:
        self.plan = plan
        self._executor = executor
        self._sent = repr(plan)
        self._result: StepResult | None = None
        self._error: Exception | None = None
        self._has_run = False

    def done(self) -> bool:
        """Whether `result` would return at once; a later call may say so of a step that has long run."""
        return self._executor.is_visible(self)

    def result(self) -> StepResult:
        """Run what is queued up to this step; raises what the step raised."""
        self._executor.run_until(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @property
    def has_run(self) -> bool:
        """Whether the device has computed it."""
        return self._has_run

    def run(self, device: Device) -> None:
        """Compute it now."""
        if repr(self.plan) != self._sent:
            raise InvariantBroken(f"a plan must not change once it is submitted, but step {self.plan.step} did")
        try:
            self._result = device.run(self.plan)
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result, as a future does
            self._error = error
        self._has_run = True


class AdversarialExecutor:
    """A FIFO of steps whose progress a seed decides.

    Args:
        device: runs the steps.
        seed: of all decisions.
        mood: eager, lazy or mixed; None: the seed chooses.
    """

    def __init__(self, device: Device, seed: int, mood: str | None = None) -> None:
        self._device = device
        self._rng = random.Random(seed)
        self._mood = mood or self._rng.choice(MOODS)
        self._queue: deque[AdversarialHandle] = deque()

    @classmethod
    def factory(cls, seed: int, mood: str | None = None) -> Callable[[Device], Executor]:
        """What an engine is built with."""
        return lambda device: cls(device, seed, mood)

    def submit(self, plan: StepPlan) -> AdversarialHandle:
        """Queue a step; it may run at once, or not."""
        self.breathe()
        handle = AdversarialHandle(self, plan)
        self._queue.append(handle)
        self.breathe()
        return handle

    def breathe(self) -> None:
        """A moment passes: the device computes what the seed says of what is queued. Tests call it between any two actions."""
        if self._mood == "eager":
            self._run(len(self._queue))
        elif self._mood == "mixed":
            self._run(self._rng.randint(0, len(self._queue)))

    def is_visible(self, handle: AdversarialHandle) -> bool:
        """Whether the host learns now that a step has run."""
        self.breathe()
        return handle.has_run and self._rng.random() < 0.5

    def run_until(self, handle: AdversarialHandle) -> None:
        """Compute queued steps, in order, until `handle` has run."""
        while not handle.has_run:
            self._run(1)

    def close(self) -> None:
        """Finish queued steps and close the device."""
        self._run(len(self._queue))
        self._device.close()

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft().run(self._device)
