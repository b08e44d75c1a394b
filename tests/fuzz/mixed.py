"""A scheduler that gives each request a drafter of its own, so that steps hold rows of several: the device side can do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slipstream.cache.ledger import Ledger
from slipstream.engine.plan import Chunk, PageDelta, VerifyRow
from slipstream.engine.request import Request
from slipstream.engine.scheduler import DraftLimits, Scheduler


class MixedScheduler(Scheduler):
    """Request number i drafts with drafter i modulo their number; room is reserved for the widest of them."""

    def __init__(self, ledger: Ledger, drafters: Mapping[str, DraftLimits], drafter: str, max_num_batched_tokens: int) -> None:
        self._names = tuple(drafters)
        each = drafters.values()
        widest = DraftLimits(
            max(one.depth for one in each), max(one.num_nodes for one in each), max(one.max_writes for one in each)
        )
        super().__init__(ledger, dict.fromkeys(drafters, widest), drafter, max_num_batched_tokens)

    def _chunk(self, request: Request, budget: int, deltas: list[PageDelta]) -> Chunk:
        return replace(super()._chunk(request, budget, deltas), drafter=self._own(request))

    def _row(self, request: Request, num_nodes: int, deltas: list[PageDelta]) -> VerifyRow:
        return replace(super()._row(request, num_nodes, deltas), drafter=self._own(request))

    def _own(self, request: Request) -> str:
        return self._names[request.arrival % len(self._names)]
