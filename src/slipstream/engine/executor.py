"""Where a step runs. The scheduler thread submits plans and takes results; steps run in order on one stream.

On the CPU the stream is one worker thread fed by a FIFO: real asynchrony, so that every race of overlap shows without a GPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from slipstream.engine.plan import StepPlan, StepResult


class Device(Protocol):
    """Runs one plan to its end."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
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
    """One worker thread; the forward stream of a CPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind those submitted before; never blocks."""
        return self._pool.submit(self._device.run, plan)

    def close(self) -> None:
        """Finish queued steps and stop the thread."""
        self._pool.shutdown(wait=True)
        self._device.close()
