"""Who comes first, who is let in, and who has to go when pages run short. All of the policy; the scheduler only carries it out.

    rank        (priority, arrival): a running or waiting request of lower rank value is served before the others
    admission   by rank, and only while every running request keeps some room to grow; nobody overtakes, so nobody starves
    pressure    1. fewer draft nodes: a row that cannot have the pages of its nodes decodes plainly
                2. pause: a row that cannot have its next page keeps what it holds and sits out
                3. retraction: once a paused row outranks somebody, and no page is about to come free, the lowest rank gives up
                   its slot and pages; its work stays in the prefix cache as long as it can, and it resumes by rank

The highest rank is never retracted, and the whole pool holds any one request, so it always gets on: no deadlock.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.cache.ledger import Ledger, Match
from slipstream.cache.pages import pages_for
from slipstream.engine.request import Request

Order = Literal["fcfs", "cache-aware"]
NUM_LOOKED_AT = 16  # waiting requests among which a cache-aware order chooses
MAX_OVERTAKEN = 16  # how often one of them may be passed over


def rank(request: Request) -> tuple[int, int]:
    """Smaller comes first."""
    return request.request.priority, request.arrival


class RankedList:
    """Requests in the order of their rank."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, place: int) -> Request:
        return self._requests[place]

    def add(self, request: Request) -> None:
        """Put a request where its rank belongs."""
        bisect.insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be there."""
        place = bisect.bisect_left(self._requests, rank(request), key=rank)
        if place == len(self._requests) or self._requests[place] is not request:
            raise ValueError(f"{request.request_id} must be in the list")
        del self._requests[place]


@dataclass(frozen=True, slots=True)
class Policy:
    """What can be chosen.

    Attributes:
        order: of requests of one priority that wait.
        headroom_tokens: tokens every running request must have room to grow by when another one is admitted.
    """

    order: Order = "fcfs"
    headroom_tokens: int = 64

    def candidate(self, waiting: RankedList, match: Callable[[Request], Match]) -> tuple[Request, Match] | None:
        """The request to admit next, with what it finds cached; None: nobody waits."""
        if not waiting:
            return None
        head = waiting[0]
        if self.order == "fcfs" or head.num_overtaken >= MAX_OVERTAKEN:
            return head, match(head)
        near = [each for _, each in zip(range(NUM_LOOKED_AT), waiting, strict=False)]
        alike = [(each, match(each)) for each in near if each.request.priority == head.request.priority]
        return max(alike, key=lambda pair: pair[1].computed_len)  # the first of equals

    def note_admitted(self, request: Request, waiting: RankedList) -> None:
        """Count for those of lower rank value that `request`, no longer among the waiting, has overtaken them."""
        for other in waiting:
            if rank(other) > rank(request):
                break
            other.num_overtaken += 1

    def may_admit(self, request: Request, match: Match, running: Sequence[Request], ledger: Ledger) -> bool:
        """Whether a slot and the pages of its tokens are there, and room to grow for everybody is left behind."""
        if not ledger.has_free_slot:
            return False
        room = ledger.room_for(match, len(request.tokens))
        if not running:
            return room >= 0
        own = pages_for(len(request.tokens), ledger.page_size)
        growth = self._pages(request, len(request.tokens), ledger) - own
        for each in running:
            if each.holding is not None:
                held = len(each.holding.table.pages)
                length = max(len(each.tokens), each.max_committed_len + 1)
                growth += max(0, self._pages(each, length, ledger) - held)
        return room >= growth

    def _pages(self, request: Request, length: int, ledger: Ledger) -> int:
        return pages_for(min(length + self.headroom_tokens, request.limit), ledger.page_size)


def victim_of_pressure(running: RankedList, paused: Sequence[Request], ledger: Ledger) -> Request | None:
    """Who is retracted for the rows that are paused (by rank); None: nobody, or pages are about to come free anyway."""
    if not paused or ledger.is_waiting or any(each.is_leaving or each.surely_done for each in running):
        return None
    last = running[-1]
    return last if rank(last) > rank(paused[0]) else None


def victim_of_priority(running: RankedList, waiting: RankedList) -> Request | None:
    """Who is retracted for a waiting request of better priority that cannot be admitted; None: nobody."""
    if not waiting or not running or any(each.is_leaving or each.surely_done for each in running):
        return None
    return running[-1] if running[-1].request.priority > waiting[0].request.priority else None
