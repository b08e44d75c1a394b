"""Bugs to find: each plant breaks the engine as overlapped engines have been broken. Applied as a patch, undone after.

Every plant is a mistake in host or relay code as somebody could have written it; none touches the checks that are to find it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from slipstream.cache.ledger import Holding, Ledger, Match
from slipstream.cache.pages import pages_for
from slipstream.engine import settle as settle_module
from slipstream.engine.cut import Cut
from slipstream.engine.plan import StepResult, VerifyRow
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Launched, Scheduler
from slipstream.engine.settle import Settler
from slipstream.relay import FutureMap, RelayPayload, Rows
from slipstream.speculate.draft_model import DraftModel
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
    verify_rows = Scheduler._verify_rows

    def stale(self: Scheduler, *args: Any) -> list[VerifyRow]:
        return [replace(row, epoch=max(1, row.epoch - 1)) for row in verify_rows(self, *args)]

    with mock.patch.object(Scheduler, "_verify_rows", stale):
        yield


def early_slot() -> Iterator[None]:
    """A slot is free as soon as its owner has ended; only its pages wait for the steps in flight."""

    def free(self: Ledger, holding: Holding) -> None:
        if holding.released and self._held.get(holding.slot) is holding:
            del self._held[holding.slot]
            self._slots.give(holding.slot)
        if holding.released and not holding.num_in_flight:
            for page in [page for _, page in holding.parted] + holding.table.pages[::-1]:
                self._drop(page)

    with mock.patch.object(Ledger, "_let_go", free):
        yield


def early_page() -> Iterator[None]:
    """Pages are free as soon as their owner has ended; only its slot waits for the steps in flight."""

    def free(self: Ledger, holding: Holding) -> None:
        if not holding.released:
            return
        for page in [page for _, page in holding.parted] + holding.table.pages[::-1]:
            self._drop(page)
        holding.parted.clear()
        holding.table.pages.clear()
        if not holding.num_in_flight:
            del self._held[holding.slot]
            self._slots.give(holding.slot)

    with mock.patch.object(Ledger, "_let_go", free):
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
                ledger._drop(page)
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


def shared_page_written() -> Iterator[None]:
    """A fully cached prompt computes its last token where it is: in a page that others read."""
    match = Ledger.match

    def whole(self: Ledger, salt: str, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Match:
        found, nodes = match(self, salt, tokens, *args, **kwargs), self._tree.match(salt, tokens)
        if len(nodes) * self.page_size != len(tokens):
            return found
        return replace(found, nodes=tuple(nodes), copied_page=None, computed_len=len(tokens) - 1)

    with mock.patch.object(Ledger, "match", whole):
        yield


def stale_last_page() -> Iterator[None]:
    """The cache takes the last token of an answer for computed; its KV would have come with the next step."""
    cache = Ledger.cache

    def all_of_it(self: Ledger, holding: Holding, tokens: Sequence[int], num_tokens: int, drafter: str) -> list[tuple[int, int]]:
        return cache(self, holding, tokens, num_tokens + (num_tokens == len(tokens) - 1), drafter)

    with mock.patch.object(Ledger, "cache", all_of_it):
        yield


def behind_the_cut() -> Iterator[None]:
    """What a step accepted behind the end of an answer is cached with it."""
    give_back, cut_off = Scheduler._give_back, settle_module.cut
    runs: dict[int, list[int]] = {}

    def noted(run: Sequence[int], **how: Any) -> Cut:
        found = cut_off(run, **how)
        runs[0] = list(run[found.num_tokens :])
        return found

    def with_all(self: Scheduler, request: Request) -> None:
        kept = request.tokens
        request.tokens = (kept + runs.pop(0, []))[: request.limit]
        give_back(self, request)
        request.tokens = kept

    with mock.patch.object(settle_module, "cut", noted), mock.patch.object(Scheduler, "_give_back", with_all):
        yield


def retracted_in_flight() -> Iterator[None]:
    """A victim is retracted at once, though a step that names it has not been settled: its tokens are lost."""
    retract = Scheduler._make_way

    def at_once(self: Scheduler, paused: Sequence[Request]) -> None:
        retract(self, paused)
        for request in [each for each in self.running if each.is_leaving]:
            self._retract(request)
            request.steps_in_flight.clear()

    with mock.patch.object(Scheduler, "_make_way", at_once):
        yield


def draft_hole_cached() -> Iterator[None]:
    """Pages go into the prefix cache although the draft model has not caught up with their last token."""
    with mock.patch.object(DraftModel, "kv_behind", 0):
        yield


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        late_stash,
        stale_epoch,
        early_slot,
        early_page,
        trimmed_page,
        double_settle,
        wrong_row,
        shared_page_written,
        stale_last_page,
        behind_the_cut,
        retracted_in_flight,
        draft_hole_cached,
    )
}
# On one FIFO stream an ended owner's slot or pages may change hands early without any harm that an answer shows: the next owner's
# writes come behind the last step that names them. A token computed again in a shared page leaves there what was there, and work
# behind a cut is right as far as it goes. What a draft model's KV holds changes no answer at all. The auditor and the look into
# the cache hold the rules all the same.
HARMLESS_HERE = ("early_slot", "early_page", "shared_page_written", "behind_the_cut", "draft_hole_cached")
SHOWS_IN_ANSWERS = tuple(name for name in PLANTS if name not in HARMLESS_HERE)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The engine with one bug."""
    yield from PLANTS[name]()
