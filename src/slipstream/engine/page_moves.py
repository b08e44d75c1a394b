"""Copies whole pages at the beginning of a step: evicted ones to host memory, matched ones back, shared ones before a write."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.attention.kv import KVCache
from slipstream.engine.plan import StepPlan
from slipstream.errors import InvariantBroken
from slipstream.observe.guard import declared


class PageMoves:
    """Carries out a plan's page_saves, page_loads and page_copies, in this order.

    Args:
        caches: each cache whose pages the plan names, with its counterpart in host memory, if there is one.
    """

    def __init__(self, caches: Sequence[tuple[KVCache, KVCache | None]]) -> None:
        self._caches = tuple(caches)

    def move(self, plan: StepPlan) -> None:
        """Begin a step."""
        for device, host in self._caches:
            if plan.page_saves or plan.page_loads:
                if host is None:
                    raise InvariantBroken("a plan must move pages to and from host memory only where there is some set aside")
                with declared("pages travel between device and host"):
                    device.copy_pages_to(host, plan.page_saves)
                    host.copy_pages_to(device, plan.page_loads)
            device.copy_pages_to(device, plan.page_copies)
