"""Watches plans from outside and holds them against rules 3 and 4, without asking the ledger.

On one FIFO stream a slot or page that is handed on too early does no harm that an answer could show; on two it does. So the rule
itself is checked: what an unsettled step names has no new owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from slipstream.engine.executor import Device, Executor, StepHandle
from slipstream.engine.plan import StepPlan, StepResult


class RuleBroken(AssertionError):
    """A plan breaks a rule of the engine."""


class AuditedHandle:
    """A step whose result counts as settled once it is taken."""

    def __init__(self, auditor: Auditor, plan: StepPlan, handle: StepHandle) -> None:
        self._auditor = auditor
        self._plan = plan
        self._handle = handle

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> StepResult:
        result = self._handle.result()
        self._auditor.settled(self._plan)
        return result


class Auditor:
    """An executor in front of another one."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self._epochs: dict[int, int] = {}
        self._pages: dict[int, list[int]] = {}
        self._unsettled: deque[tuple[int, dict[int, tuple[int, ...]]]] = deque()  # step, slot -> pages it may touch

    @classmethod
    def around(cls, make: Callable[[Device], Executor]) -> Callable[[Device], Executor]:
        return lambda device: cls(make(device))

    def submit(self, plan: StepPlan) -> AuditedHandle:
        self._check(plan)
        return AuditedHandle(self, plan, self.inner.submit(plan))

    def settled(self, plan: StepPlan) -> None:
        step, _ = self._unsettled.popleft()
        _must(step == plan.step, f"step {step} must be settled before step {plan.step}")

    def close(self) -> None:
        self.inner.close()

    def _check(self, plan: StepPlan) -> None:
        for retire in plan.retires:
            _must(self._epochs.get(retire.slot) == retire.epoch, f"slot {retire.slot} must be retired by its owner")
            self._pages[retire.slot] = []
        busy = {slot for _, named in self._unsettled for slot in named}
        for admit in plan.admits:
            before = self._epochs.get(admit.slot, 0)
            _must(admit.epoch > before, f"a new owner of slot {admit.slot} must have an epoch above {before}, not {admit.epoch}")
            _must(admit.slot not in busy, f"slot {admit.slot} must not change hands while a step names it")
            self._epochs[admit.slot] = admit.epoch
            self._pages[admit.slot] = []
        for delta in plan.page_deltas:
            own = self._pages[delta.slot]
            others = [pages for slot, pages in self._pages.items() if slot != delta.slot]
            named = [pages for _, unsettled in self._unsettled for slot, pages in unsettled.items() if slot != delta.slot]
            _must(delta.start == len(own), f"pages of slot {delta.slot} must be appended at {len(own)}, not {delta.start}")
            for page in delta.pages:
                _must(not any(page in pages for pages in named), f"page {page} must not change hands while a step names it")
                _must(page not in own and not any(page in pages for pages in others), f"page {page} must have one owner")
            own.extend(delta.pages)
        for part in plan.parts:
            known = self._epochs.get(part.slot)
            _must(part.epoch == known, f"a row must carry the epoch {known} of its slot {part.slot}, not {part.epoch}")
        slots = [part.slot for part in plan.parts]
        _must(len(set(slots)) == len(slots), f"a step must name a slot once, not {slots}")
        self._unsettled.append((plan.step, {slot: tuple(self._pages[slot]) for slot in slots}))


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise RuleBroken(what)
