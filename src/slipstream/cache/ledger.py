"""The ledger: slots and pages of running requests. reserve before a step, launch and settle around it, release at the end.

A request's tokens and who guarantees what (page size 4, promise = pages of its limit):

    position   0        8        16       24       32
    committed  ├────────────┤                              settled: the host has seen these
    in flight               ├─ ─ ─ ─┤                      f steps, each at most depth + 1 tokens
    reserved   ├────────────────────────┤                  + max_writes of the next step, in whole pages
    promised   ├───────────────────────────────────┤       its limit: admission counted these, nobody else gets them

Admission promises a request all pages up to its limit, so a running request always finds the page it reserves.
Rule 4: a slot or page goes back only when every step that names it has been settled; `launch` counts, `settle` counts down, and
`release` waits for zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.cache.pages import PageTable, pages_for
from slipstream.cache.pool import FreeList, ReuseOrder
from slipstream.errors import InvariantBroken


@dataclass(slots=True)
class Holding:
    """What one owner of a slot holds.

    Attributes:
        slot, epoch: its row; the epoch counts the slot's owners.
        promised: pages admission promised it.
        table: pages it has taken so far.
        num_in_flight: unsettled steps that name the slot.
        released: its owner is gone; slot and pages go back when num_in_flight is zero.
    """

    slot: int
    epoch: int
    promised: int
    table: PageTable
    num_in_flight: int = 0
    released: bool = False


class Ledger:
    """Slots 1..num_slots and pages first_page..first_page + num_pages - 1.

    Args:
        num_slots: most requests that run at once (the padding row not counted).
        num_pages: pages requests may hold (reserved ones not counted).
        page_size: tokens a page holds.
        first_page: number of the first usable page.
        order: which free slot or page is reused first.
    """

    def __init__(
        self, num_slots: int, num_pages: int, page_size: int, first_page: int, order: ReuseOrder = "newest"
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._slots = FreeList(1, num_slots, order)
        self._pages = FreeList(first_page, num_pages, order)
        self._epochs = [0] * (num_slots + 1)
        self._promised = 0
        self._held: dict[int, Holding] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages nobody holds (some of them may be promised)."""
        return len(self._pages)

    @property
    def num_free_slots(self) -> int:
        """Slots nobody holds."""
        return len(self._slots)

    def fits_ever(self, limit: int) -> bool:
        """Whether a request of `limit` tokens fits into the whole, empty pool."""
        return pages_for(limit, self.page_size) <= self.num_pages

    def can_admit(self, limit: int) -> bool:
        """Whether a slot is free and all pages of `limit` tokens can be promised now."""
        return bool(len(self._slots)) and self._promised + pages_for(limit, self.page_size) <= self.num_pages

    def admit(self, limit: int) -> Holding:
        """Give a slot to a request and promise it the pages of `limit` tokens. Call `can_admit` first."""
        promised = pages_for(limit, self.page_size)
        slot = self._slots.take()
        self._epochs[slot] += 1
        self._promised += promised
        holding = Holding(slot, self._epochs[slot], promised, PageTable(self.page_size))
        self._held[slot] = holding
        return holding

    def reserve(self, holding: Holding, num_tokens: int) -> tuple[int, ...]:
        """Make positions [0, num_tokens) writable; returns the pages added to the table (often none)."""
        count = holding.table.missing(num_tokens)
        if len(holding.table.pages) + count > holding.promised:
            raise InvariantBroken(
                f"a request must stay within its promise of {holding.promised} pages, but needs {num_tokens} tokens"
            )
        added = tuple(self._pages.take() for _ in range(count))
        holding.table.pages.extend(added)
        return added

    def launch(self, holding: Holding) -> None:
        """A step that names this slot was submitted."""
        if holding.released:
            raise InvariantBroken(f"a step must not name slot {holding.slot} after its release")
        holding.num_in_flight += 1

    def settle(self, holding: Holding) -> None:
        """A step that names this slot was settled; frees what a release left waiting for it."""
        if holding.num_in_flight == 0:
            raise InvariantBroken(f"a step must be settled once, but slot {holding.slot} has none in flight")
        holding.num_in_flight -= 1
        self._free_if_idle(holding)

    def release(self, holding: Holding) -> None:
        """The owner is gone. Slot and pages go back now, or when the last step in flight that names them is settled."""
        if holding.released:
            raise InvariantBroken(f"slot {holding.slot} must be released once")
        holding.released = True
        self._free_if_idle(holding)

    def check_balanced(self) -> None:
        """With nothing running: every slot and page is free and nothing is promised. Raises `InvariantBroken` otherwise."""
        if self._held or self._promised or len(self._slots) != self._slots.total or len(self._pages) != self._pages.total:
            raise InvariantBroken(
                f"an idle engine must hold nothing, but slots {sorted(self._held)} are held, "
                f"{self._pages.total - len(self._pages)} pages are taken and {self._promised} promised"
            )

    def _free_if_idle(self, holding: Holding) -> None:
        if not holding.released or holding.num_in_flight:
            return
        del self._held[holding.slot]
        self._promised -= holding.promised
        for page in holding.table.pages:
            self._pages.give(page)
        self._slots.give(holding.slot)
