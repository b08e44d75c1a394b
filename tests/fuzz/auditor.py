"""Watches plans from outside and holds them against rules 3 and 4, without asking the ledger.

On one FIFO stream a slot or page that is handed on too early does no harm that an answer could show; on two it does. So the rules
themselves are checked: what an unsettled step names has no new owner, and a page that is written is seen by its writer alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.engine.executor import Device, Executor, StepHandle
from slipstream.engine.plan import Chunk, StepPlan, StepResult, VerifyRow


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
        self._auditor.settled(self._plan, result)
        return result


@dataclass
class _Slot:
    """What the auditor knows of a slot: its owner's epoch, pages, and the length that is surely committed."""

    epoch: int
    limit: int
    pages: list[int]
    length: int


@dataclass
class _Step:
    """An unsettled step: slot -> pages it may touch, and pages it copies, with the slots that had them (and may write on)."""

    number: int
    named: dict[int, tuple[int, ...]]
    copied: dict[int, set[int]]


class Auditor:
    """An executor in front of another one.

    Args:
        inner: the executor that runs the steps.
        page_size: tokens of a page.
    """

    def __init__(self, inner: Executor, page_size: int) -> None:
        self.inner = inner
        self._page_size = page_size
        self._slots: dict[int, _Slot] = {}
        self._epochs: dict[int, int] = {}
        self._unsettled: deque[_Step] = deque()

    @classmethod
    def around(cls, make: Callable[[Device], Executor], page_size: int) -> Callable[[Device], Executor]:
        return lambda device: cls(make(device), page_size)

    def submit(self, plan: StepPlan) -> AuditedHandle:
        self._check(plan)
        return AuditedHandle(self, plan, self.inner.submit(plan))

    def settled(self, plan: StepPlan, result: StepResult) -> None:
        step = self._unsettled.popleft()
        must(step.number == plan.step, f"step {step.number} must be settled before step {plan.step}")
        for row, accepted in zip(plan.rows, result.accept_lens[len(plan.sampled) - len(plan.rows) :].tolist(), strict=True):
            slot = self._slots.get(row.slot)
            if slot is not None and slot.epoch == row.epoch:
                slot.length += accepted

    def close(self) -> None:
        self.inner.close()

    def _check(self, plan: StepPlan) -> None:
        for retire in plan.retires:
            owner = self._slots.pop(retire.slot, None)
            must(owner is not None and owner.epoch == retire.epoch, f"slot {retire.slot} must be retired by its owner")
        busy = {slot for step in self._unsettled for slot in step.named}
        for admit in plan.admits:
            before = self._epochs.get(admit.slot, 0)
            must(admit.epoch > before, f"a new owner of slot {admit.slot} must have an epoch above {before}, not {admit.epoch}")
            must(admit.slot not in self._slots, f"slot {admit.slot} must have one owner")
            must(admit.slot not in busy, f"slot {admit.slot} must not change hands while a step names it")
            self._epochs[admit.slot] = admit.epoch
            self._slots[admit.slot] = _Slot(admit.epoch, admit.limit, [], admit.computed_len)
        for delta in plan.page_deltas:
            own = self._slots[delta.slot].pages
            must(delta.start <= len(own), f"pages of slot {delta.slot} must leave no gap, but begin at {delta.start}")
            own[delta.start : delta.start + len(delta.pages)] = delta.pages
        for source, target in plan.page_copies:
            holders = [number for number, slot in self._slots.items() if target in slot.pages]
            must(len(holders) == 1 and source != target, f"a copy must go to one owner's page, but {target} has {holders}")
            self._check_written(holders[0], {target})
        for part in plan.parts:
            known = self._epochs.get(part.slot)
            must(part.epoch == known, f"a row must carry the epoch {known} of its slot {part.slot}, not {part.epoch}")
            self._check_written(part.slot, self._written(part))
        for chunk in plan.chunks:  # a launched chunk is sure to be committed
            self._slots[chunk.slot].length = chunk.start + chunk.num_tokens
        slots = [part.slot for part in plan.parts]
        must(len(set(slots)) == len(slots), f"a step must name a slot once, not {slots}")
        named = {slot: tuple(self._slots[slot].pages) for slot in slots}
        copied = {page: {number for number, slot in self._slots.items() if page in slot.pages} for page, _ in plan.page_copies}
        self._unsettled.append(_Step(plan.step, named, copied))

    def _written(self, part: Chunk | VerifyRow) -> set[int]:
        """Pages a row may write to: from what is surely committed on, as far as the plan can go."""
        slot = self._slots[part.slot]
        if isinstance(part, Chunk):
            start, stop = part.start, part.start + part.num_tokens
        else:
            start, stop = slot.length, min(part.max_len + 1 + part.num_nodes, slot.limit)
        first, last = start // self._page_size, -(-stop // self._page_size)
        must(last <= len(slot.pages), f"slot {part.slot} must have the {last} pages it writes, not {len(slot.pages)}")
        return set(slot.pages[first:last])

    def _check_written(self, slot: int, pages: set[int]) -> None:
        others = {page for number, other in self._slots.items() if number != slot for page in other.pages}
        must(not pages & others, f"pages {pages & others} must have one owner to be written by slot {slot}")
        for step in self._unsettled:
            read = {page for number, named in step.named.items() if number != slot for page in named}
            read |= {page for page, had in step.copied.items() if slot not in had}
            must(not pages & read, f"pages {pages & read} must not be written by slot {slot} while step {step.number} reads them")


def must(holds: bool, what: str) -> None:
    if not holds:
        raise RuleBroken(what)
