"""Bugs to find: each plant breaks the engine as overlapped engines have been broken. Applied as a patch, undone after.

Every plant is a mistake in host or relay code as somebody could have written it; none touches the checks that are to find it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from slipstream.cache.ledger import Holding, Ledger
from slipstream.cache.pages import pages_for
from slipstream.engine.plan import PageDelta, StepResult, VerifyRow
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Launched, Scheduler
from slipstream.engine.settle import Settler
from slipstream.relay import FutureMap, RelayPayload, Rows
from slipstream.types import EngineOutput

Plant = Callable[[], Iterator[None]]


def late_stash() -> Iterator[None]:
    """The payload of step N reaches the relay after step N + 1 has resolved its rows."""
    stash, resolve = FutureMap.stash, FutureMap.resolve
    pending: dict[FutureMap, list[tuple[Rows, RelayPayload, str]]] = defaultdict(list)

    def late(self: FutureMap, rows: Rows, payload: RelayPayload, drafter: str) -> None:
        pending[self].append((rows, payload, drafter))

    def resolve_first(self: FutureMap, rows: Rows, drafter: str) -> RelayPayload:
        payload = resolve(self, rows, drafter)
        for each in pending.pop(self, []):
            stash(self, *each)
        return payload

    with mock.patch.object(FutureMap, "stash", late), mock.patch.object(FutureMap, "resolve", resolve_first):
        yield


def stale_epoch() -> Iterator[None]:
    """A row of a slot that has changed hands goes out with the epoch of the slot's previous owner."""
    row = Scheduler._row

    def stale(self: Scheduler, request: Request, num_nodes: int, deltas: list[PageDelta]) -> VerifyRow:
        planned = row(self, request, num_nodes, deltas)
        return replace(planned, epoch=max(1, planned.epoch - 1))

    with mock.patch.object(Scheduler, "_row", stale):
        yield


def early_slot() -> Iterator[None]:
    """A slot is free as soon as its owner has ended; only its pages wait for the steps in flight."""

    def free(self: Ledger, holding: Holding) -> None:
        if not holding.released:
            return
        if self._held.get(holding.slot) is holding:
            del self._held[holding.slot]
            self._slots.give(holding.slot)
        if not holding.num_in_flight:
            self._promised -= holding.promised
            for page in holding.table.pages:
                self._pages.give(page)

    with mock.patch.object(Ledger, "_free_if_idle", free):
        yield


def early_page() -> Iterator[None]:
    """Pages are free as soon as their owner has ended; only its slot waits for the steps in flight."""

    def free(self: Ledger, holding: Holding) -> None:
        if not holding.released:
            return
        self._promised -= holding.promised
        holding.promised = 0
        for page in holding.table.pages:
            self._pages.give(page)
        holding.table.pages.clear()
        if not holding.num_in_flight:
            del self._held[holding.slot]
            self._slots.give(holding.slot)

    with mock.patch.object(Ledger, "_free_if_idle", free):
        yield


def trimmed_page() -> Iterator[None]:
    """Settling a step gives back the pages its rejected nodes took, though the next step, in flight, writes there."""
    settle_row = Settler._settle_row

    def trim(self: Settler, request: Request, row: int, result: StepResult, drafted: int) -> EngineOutput:
        output = settle_row(self, request, row, result, drafted)
        holding, ledger = request.holding, self._scheduler.ledger
        if holding is not None and not holding.released:
            keep = pages_for(len(request.tokens), ledger.page_size)
            for page in holding.table.pages[keep:]:
                ledger._pages.give(page)
            del holding.table.pages[keep:]
        return output

    with mock.patch.object(Settler, "_settle_row", trim):
        yield


def double_settle() -> Iterator[None]:
    """Every seventh step is settled twice."""
    settle = Settler.settle

    def twice(self: Settler, launched: Launched, result: StepResult) -> list[EngineOutput]:
        outputs = settle(self, launched, result)
        return outputs + settle(self, launched, result) if launched.plan.step % 7 == 0 else outputs

    with mock.patch.object(Settler, "settle", twice):
        yield


def wrong_row() -> Iterator[None]:
    """In a step of several rows each row's payload goes to its neighbour."""
    stash = FutureMap.stash

    def shifted(self: FutureMap, rows: Rows, payload: RelayPayload, drafter: str) -> None:
        stash(self, Rows(rows.slots.roll(1), rows.epochs.roll(1)), payload, drafter)

    with mock.patch.object(FutureMap, "stash", shifted):
        yield


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (late_stash, stale_epoch, early_slot, early_page, trimmed_page, double_settle, wrong_row)
}
# On one FIFO stream an ended owner's slot or pages may change hands early without any harm that an answer shows: the next owner's
# writes come behind the last step that names them. The auditor holds the rule all the same.
SHOWS_IN_ANSWERS = tuple(name for name in PLANTS if name not in ("early_slot", "early_page"))


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The engine with one bug."""
    yield from PLANTS[name]()
