"""Where a step runs. The scheduler thread submits plans and takes results; steps run in order on one stream.

On the CPU the stream is one worker thread fed by a FIFO: real asynchrony, so that every race of overlap shows without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from slipstream.engine.plan import StepPlan, StepResult
from slipstream.types import nothing


class Device(Protocol):
    """Runs one plan to its end."""

    def run(self, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        """Compute a step. `computes` is called once, where its long part begins."""
        ...

    def close(self) -> None:
        """Give threads and memory back."""
        ...


class StepHandle(Protocol):
    """A submitted step."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Wait for the step; raises what it raised."""
        ...


class Executor(Protocol):
    """A FIFO of steps."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind those submitted before; never blocks."""
        ...

    def close(self) -> None:
        """Finish queued steps and stop."""
        ...


class ThreadExecutor:
    """One worker thread; the forward stream of a CPU.

    Two threads of Python do not run at once. So a result is handed over when the step behind it has been prepared: the host takes
    it while the device computes, instead of keeping the device from preparing.

        device   │prepare 2│======= 2 computes =======│prepare 3│======= 3 computes =======
        host                │settle 1│plan 3│                    │settle 2│plan 4│
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._queued: deque[Future[StepResult]] = deque()  # those that have not begun
        self._hand_over: Callable[[], None] = nothing  # the result that waits for the step behind it

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind those submitted before; never blocks."""
        handle: Future[StepResult] = Future()
        self._queued.append(handle)
        self._pool.submit(self._run, plan)
        return handle

    def close(self) -> None:
        """Finish queued steps and stop the thread."""
        self._pool.shutdown(wait=True)
        self._device.close()

    def _run(self, plan: StepPlan) -> None:
        handle = self._queued.popleft()
        try:
            result = self._device.run(plan, self._deliver)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result is told
            self._deliver()
            self._hand_over = partial(handle.set_exception, error)
        else:
            self._deliver()
            self._hand_over = partial(handle.set_result, result)
        if not self._queued:  # a step submitted from here on finds this one handed over
            self._deliver()

    def _deliver(self) -> None:
        hand_over, self._hand_over = self._hand_over, nothing
        hand_over()
