"""A scheduler that gives each request a drafter of its own, so that steps hold rows of several: the device side can do it."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.cache.ledger import Ledger
from slipstream.engine.policy import Policy
from slipstream.engine.request import Request
from slipstream.engine.scheduler import DraftLimits, Scheduler
from slipstream.speculate.width import WidthModel


class MixedScheduler(Scheduler):
    """Request number i drafts with drafter i modulo their number; room is reserved for the widest of them."""

    def __init__(
        self,
        ledger: Ledger,
        drafters: Mapping[str, DraftLimits],
        drafter: str,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        widths: WidthModel | None = None,
    ) -> None:
        self._names = tuple(drafters)
        each = drafters.values()
        widest = DraftLimits(
            max(one.depth for one in each),
            max(one.num_nodes for one in each),
            max(one.max_writes for one in each),
            kv_behind=max(one.kv_behind for one in each),
        )
        super().__init__(ledger, dict.fromkeys(drafters, widest), drafter, max_num_batched_tokens, policy, widths)

    def _drafter_of(self, request: Request) -> str:
        return self._names[request.arrival % len(self._names)]
