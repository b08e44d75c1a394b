"""Where a step runs. The scheduler thread submits plans and takes results; steps run in order on one stream.

On the CPU the stream is one worker thread fed by a FIFO: real asynchrony, so that every race of overlap shows without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Protocol

from slipstream.engine.plan import StepPlan, StepResult
from slipstream.types import nothing


class Device(Protocol):
    """Runs one plan to its end."""

    def run(self, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        """Compute a step. `computes` is called where a long part begins: at least once in a step that ends well."""
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


class _Handle:
    """A step of the worker thread's; its result is there for others once it is handed over."""

    step: Future[StepResult]  # set before anybody has the handle

    def __init__(self) -> None:
        self.handed_over = Event()

    def done(self) -> bool:
        return self.handed_over.is_set() and self.step.done()

    def result(self) -> StepResult:
        self.handed_over.wait()
        return self.step.result()


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
        self._queued: deque[_Handle] = deque()  # those that have not begun
        self._ended: _Handle | None = None  # waits for the step behind it

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind those submitted before; never blocks."""
        handle = _Handle()
        self._queued.append(handle)
        handle.step = self._pool.submit(self._run, plan)
        return handle

    def close(self) -> None:
        """Finish queued steps and stop the thread."""
        self._pool.shutdown(wait=True)
        self._device.close()

    def _run(self, plan: StepPlan) -> StepResult:
        handle = self._queued.popleft()
        try:
            return self._device.run(plan, self._hand_over)
        finally:
            self._hand_over()  # where the step did not come to compute
            self._ended = handle
            if not self._queued:  # a step submitted from here on finds this one handed over
                self._hand_over()

    def _hand_over(self) -> None:
        if self._ended is not None:
            self._ended.handed_over.set()
            self._ended = None
