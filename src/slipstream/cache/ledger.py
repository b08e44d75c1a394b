"""The ledger: slots, pages and cached prefixes. Match and admit, reserve before a step, launch and settle around it, release.

Who holds which interval of a request's tokens (page size 4):

    position   0        8        16       24       32       40
    matched    ├────────────┤                                       pages of the prefix cache, shared: never written
    cached     ├─────────────────┤                                  full pages whose tokens are settled or prompt: may be matched
    committed  ├────────────────────┤                               KV of settled tokens; the last one's comes with the next step
    in flight                       ├─ ─ ─ ─┤                       f steps, each at most depth + 1 tokens
    reserved   ├────────────────────────────────┤                   + max_writes of the next step, in whole pages

A page is free, or held by one request or several, or cached, or held and cached:

    free ──take──► held ──cache──► held and cached ◄──match── cached, evictable
      ▲              │ let go                │ let go by the last holder  ▲ │
      └──────────────┘                       └────────────────────────────┘ │
      └──────────────────────────────────────────────────────────── evicted ┘

Rule 4: a slot or page goes back only when every step that names it has been settled: a holding counts its launched and settled
steps, and what it has parted with waits for the count.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.cache.pages import PageTable, pages_for
from slipstream.cache.pool import FreeList, ReuseOrder
from slipstream.cache.prefix import NOBODY, NOWHERE, Node, PrefixTree
from slipstream.errors import InvariantBroken


@dataclass(frozen=True, slots=True)
class Match:
    """What a request finds of its tokens.

    Attributes:
        nodes: cached pages it shares, from position 0 on; behind some point only the host has them.
        copied: a page whose beginning is worth having, but which the request would write to: it gets a copy. Its number, or its
            node where only the host has it; None: no such.
        computed_len: tokens whose KV it need not compute.
        draft_from: position from which on the KV of its drafter is there too.
    """

    nodes: tuple[Node, ...] = ()
    copied: int | Node | None = None
    computed_len: int = 0
    draft_from: int = 0


NO_MATCH = Match()
NO_END = sys.maxsize


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages to copy at the beginning of a step, in this order.

    Attributes:
        saves: (page, host page): evicted, kept in host memory.
        loads: (host page, page): found in host memory.
        copies: (page, page).
    """

    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Holding:
    """What one owner of a slot holds.

    Attributes:
        slot, epoch: its row; the epoch counts the slot's owners.
        salt: of the prefixes it may share.
        drafter: who keeps draft KV in its pages; NOBODY: nobody.
        draft_from, draft_to: that KV is whole from here to there. NO_END: it goes on with the steps.
        table: its pages.
        nodes: the prefix cache's view of the first pages of the table.
        num_launched, num_settled: steps that name the slot.
        parted: (n, page): pages it lets go of once n of its steps are settled.
        detached: the prefix cache was reset while it ran; it shares nothing more.
        released: its owner is gone; slot and pages go back when nothing in flight names them.
    """

    slot: int
    epoch: int
    salt: str
    drafter: str
    draft_from: int
    table: PageTable
    nodes: list[Node]
    draft_to: int = NO_END
    num_launched: int = 0
    num_settled: int = 0
    parted: deque[tuple[int, int]] = field(default_factory=deque)
    detached: bool = False
    released: bool = False

    @property
    def num_in_flight(self) -> int:
        """Unsettled steps that name the slot."""
        return self.num_launched - self.num_settled


class Ledger:
    """Slots 1..num_slots and pages first_page..first_page + num_pages - 1.

    Args:
        num_slots: most requests that run at once (the padding row not counted).
        num_pages: pages requests may hold (reserved ones not counted).
        page_size: tokens a page holds.
        first_page: number of the first usable page.
        order: which free slot or page is reused first.
        caching: keep pages of finished and retracted work, and share pages.
        num_host_pages: pages of host memory that evicted pages are kept in.
        shifted_kv: of a drafter: what a page holds depends on the token behind it too, so pages are shared by those it fits.
    """

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        first_page: int,
        order: ReuseOrder = "newest",
        caching: bool = True,
        num_host_pages: int = 0,
        shifted_kv: bool = False,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.caching = caching
        self.shifted_kv = shifted_kv
        self._slots = FreeList(1, num_slots, order)
        self._pages = FreeList(first_page, num_pages, order)
        self._epochs = [0] * (num_slots + 1)
        self._holders = [0] * (first_page + num_pages)  # how many holdings each page has, parted ones included
        self._tree = PrefixTree(page_size, num_host_pages, overlapping=shifted_kv)
        self._saves: dict[int, int] = {}  # host page -> page: what goes to the same place twice in a plan goes once
        self._loads: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._held: dict[int, Holding] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing."""
        return len(self._pages)

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that nobody holds."""
        return self._tree.num_evictable

    @property
    def num_available_pages(self) -> int:
        """Pages that can be had now."""
        return len(self._pages) + self._tree.num_evictable

    @property
    def has_free_slot(self) -> bool:
        """Whether a request could be admitted as far as slots go."""
        return len(self._slots) > 0

    @property
    def num_slots(self) -> int:
        """Most requests that run at once."""
        return len(self._epochs) - 1

    @property
    def is_waiting(self) -> bool:
        """Whether steps in flight keep something that will be free once they are settled."""
        return any(holding.released or holding.parted for holding in self._held.values())

    def fits_ever(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits into the whole, empty pool."""
        return pages_for(num_tokens, self.page_size) <= self.num_pages

    # -- admission ------------------------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int], drafter: str, sibling: Holding | None = None) -> Match:
        """What is cached of `tokens`. The last token is always left to compute: its logits are needed.

        Args:
            drafter: whose draft KV counts; NOBODY: nobody's.
            sibling: holds the same prompt, `tokens`, and has launched it all: the page it goes on writing can be copied.
        """
        if not self.caching:
            return NO_MATCH
        size, most = self.page_size, len(tokens) - 1
        nodes = self._tree.match(salt, tokens)
        foreign = [place for place, node in enumerate(nodes) if drafter not in (node.drafter, NOBODY)]
        copied: int | Node | None = None
        computed = len(nodes) * size
        if computed > most:  # of the last page all but its last token
            copied, computed = nodes.pop(), computed - 1
            copied = copied if copied.page == NOWHERE else copied.page
        elif sibling is not None and computed < most and most // size == len(nodes):
            copied, computed = sibling.table.pages[len(nodes)], most
            is_whole = sibling.draft_from <= len(nodes) * size and computed <= sibling.draft_to
            if drafter not in (sibling.drafter, NOBODY) or not is_whole:
                foreign.append(len(nodes))
        if computed == len(nodes) * size:
            copied = None
        draft_from = min((foreign[-1] + 1) * size, computed) if foreign else 0
        return Match(tuple(nodes), copied, computed, draft_from)

    def room_for(self, match: Match, num_tokens: int) -> int:
        """Pages that would be left after an admission of `num_tokens` tokens with this match; below 0: it cannot be."""
        shared = [node.page for node in match.nodes if node.page != NOWHERE]
        wanted = [*shared, match.copied] if isinstance(match.copied, int) else shared
        pinned = sum(self._holders[page] == 0 for page in wanted)
        return self.num_available_pages - pinned - (pages_for(num_tokens, self.page_size) - len(shared))

    def admit(self, match: Match, num_tokens: int, salt: str, drafter: str) -> Holding:
        """Give a slot, the matched pages and pages for the rest of `num_tokens` tokens. Call `room_for` first.

        What must be copied for it is among the next `take_moves`.
        """
        slot = self._slots.take()
        self._epochs[slot] += 1
        holding = Holding(slot, self._epochs[slot], salt, drafter, match.draft_from, PageTable(self.page_size), list(match.nodes))
        self._held[slot] = holding
        pages = holding.table.pages
        for node in match.nodes:  # before any page is taken: none of these may be evicted for another
            if node.page != NOWHERE:
                self._hold(node.page)
            else:
                self._tree.keep(node)
        if isinstance(match.copied, int):  # neither evicted nor handed on before the step that copies it is settled
            self._hold(match.copied)
            holding.parted.append((1, match.copied))
        elif match.copied is not None:
            self._tree.keep(match.copied)
        for node in match.nodes:
            if node.page == NOWHERE:
                self._tree.place(node, self._take_page())
                self._loads.append((node.host_page, node.page))
            pages.append(node.page)
        if self.reserve(holding, num_tokens) is None:
            raise InvariantBroken(f"a request must be admitted only where its pages fit, but {num_tokens} tokens do not")
        if isinstance(match.copied, int):
            self._copies.append((match.copied, pages[len(match.nodes)]))
        elif match.copied is not None:
            self._loads.append((match.copied.host_page, pages[len(match.nodes)]))
        return holding

    # -- around steps ---------------------------------------------------------------------------------------------------

    def reserve(self, holding: Holding, num_tokens: int) -> tuple[int, ...] | None:
        """Make positions [0, num_tokens) writable; returns the pages added to the table (often none), or None: too few."""
        count = holding.table.missing(num_tokens)
        if count > self.num_available_pages:
            return None
        added = tuple(self._take_page() for _ in range(count))
        holding.table.pages.extend(added)
        return added

    def take_moves(self) -> Moves:
        """What the next step must begin with, handed out once."""
        saves = tuple((page, host_page) for host_page, page in self._saves.items())
        moves = Moves(saves, tuple(self._loads), tuple(self._copies))
        self._saves.clear()
        self._loads.clear()
        self._copies.clear()
        self._tree.planned()
        return moves

    def launch(self, holding: Holding) -> None:
        """A step that names this slot was submitted."""
        if holding.released:
            raise InvariantBroken(f"a step must not name slot {holding.slot} after its release")
        holding.num_launched += 1

    def cache(self, holding: Holding, tokens: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
        """Offer the full pages among the first `num_tokens` tokens, all of them launched, to the prefix cache.

        Where another request has cached the same prefix meanwhile its page is taken instead, so that one copy is left. Returns
        (place in the table, page) of these: steps launched later must use them.
        """
        if not self.caching or holding.detached:
            return []
        replaced: list[tuple[int, int]] = []
        for key in self._tree.keys(tokens, len(holding.nodes), num_tokens):
            place = len(holding.nodes)
            parent = holding.nodes[-1] if holding.nodes else self._tree.root(holding.salt)
            own, node = holding.table.pages[place], parent.children.get(key)
            first = place * self.page_size
            drafter = holding.drafter if holding.draft_from <= first <= holding.draft_to - self.page_size else NOBODY
            if node is None:
                node = self._tree.add(parent, key, own, drafter)
            elif drafter not in (node.drafter, NOBODY):
                break  # its draft KV is another drafter's: both copies stay
            elif node.page == NOWHERE:  # computed again, though the host has it
                self._tree.place(node, own)
                node.drafter = drafter  # which may be nobody's now, whatever the host has
            else:
                self._hold(node.page)
                holding.table.pages[place] = node.page
                holding.parted.append((holding.num_launched, own))
                replaced.append((place, node.page))
            holding.nodes.append(node)
        self._let_go(holding)
        return replaced

    def cover(self, holding: Holding) -> None:
        """Its drafter's KV is whole in all cached pages it holds: those with nobody's are the drafter's from now on."""
        for node in holding.nodes:
            if node.drafter == NOBODY and node.host_page == NOWHERE:  # a host copy lacks what has been filled in here
                node.drafter = holding.drafter

    def settle(self, holding: Holding) -> None:
        """A step that names this slot was settled; frees what waited for it."""
        if holding.num_in_flight == 0:
            raise InvariantBroken(f"a step must be settled once, but slot {holding.slot} has none in flight")
        holding.num_settled += 1
        self._let_go(holding)

    def release(self, holding: Holding) -> None:
        """The owner is gone. Slot and pages go back now, or when the last step in flight that names them is settled."""
        if holding.released:
            raise InvariantBroken(f"slot {holding.slot} must be released once")
        holding.released = True
        self._let_go(holding)

    def reset_cache(self) -> None:
        """Forget all cached work. What running requests hold stays theirs and is shared no more."""
        for holding in self._held.values():
            holding.detached = True
        self._saves.clear()
        for page in self._tree.clear():
            self._pages.give(page)

    def check_balanced(self) -> None:
        """With nothing running: no slot is held, and every page is free or evictable. Raises `InvariantBroken` otherwise."""
        if self._held or len(self._slots) != self._slots.total or self.num_available_pages != self.num_pages:
            raise InvariantBroken(
                f"an idle engine must hold nothing, but slots {sorted(self._held)} are held and of {self.num_pages} pages "
                f"{self.num_free_pages} are free and {self.num_evictable_pages} evictable"
            )
        if any(self._holders):
            raise InvariantBroken("an idle engine must hold no page, but some are still counted as held")

    # -- pages ----------------------------------------------------------------------------------------------------------

    def _take_page(self) -> int:
        if len(self._pages):
            page = self._pages.take()
        else:
            page, host_page = self._tree.evict()
            if host_page != NOWHERE:
                self._saves[host_page] = page
        self._holders[page] = 1
        return page

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            self._tree.pin(page)
        self._holders[page] += 1

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] < 0:
            raise InvariantBroken(f"page {page} must be let go of once by each who holds it")
        if self._holders[page] == 0:
            if self._tree.holds(page):
                self._tree.unpin(page)
            else:
                self._pages.give(page)

    def _let_go(self, holding: Holding) -> None:
        gone = holding.released and not holding.num_in_flight
        while holding.parted and (gone or holding.parted[0][0] <= holding.num_settled):
            self._drop(holding.parted.popleft()[1])
        if gone:
            del self._held[holding.slot]
            for page in reversed(holding.table.pages):  # children first: see cache/prefix.py
                self._drop(page)
            self._slots.give(holding.slot)
