"""Who watches a row: hands rows from one drafter to another, and keeps account of what draft KV their pages hold.

    tokens        0 ......... 40 ......... 57 .... 60
    model drafts  ├───────────────────────┤             leaves at 57: its KV is whole up to 56 for sure (`draft_to`)
    off                                    ├─────┤
    comes back                            ├fill───┤     from 56 to wherever the row has come by the end of the step
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.cache.ledger import NO_END, Holding, Ledger
from slipstream.cache.prefix import NOBODY
from slipstream.engine.plan import Fill
from slipstream.engine.request import Request
from slipstream.speculate.choice import OFF, Choice, Shape


class Observers:
    """Changes observers, as choices say.

    Args:
        ledger: told whose draft KV cached pages hold.
        shapes: of every drafter, by name.
    """

    def __init__(self, ledger: Ledger, shapes: Mapping[str, Shape]) -> None:
        self._ledger = ledger
        self._shapes = shapes

    def change(self, request: Request, holding: Holding, choice: Choice, num_nodes: int, budget: int) -> Fill | None:
        """Hand a row over to whom the choice names, or bring that one nearer. Returns what the new one has to fill in.

        Args:
            num_nodes: nodes the row got in the end.
            budget: most tokens to fill in; less than all of them leaves the row with nobody for now.
        """
        drafting = request.drafting
        drafts = choice.drafter == drafting.observer and num_nodes > 0
        drafting.idle = 0 if drafts else drafting.idle + 1
        if choice.drafter == drafting.on_trial and num_nodes:
            drafting.on_trial = ""
        old, wanted = self._shapes[drafting.observer], choice.observer
        if wanted == drafting.observer and old.has_kv and old.catches_up and not drafts:
            wanted = OFF  # it was not asked, so its KV gets a hole here
        if wanted == drafting.observer:
            return None
        if old.has_kv:  # of what steps in flight add nothing is known
            holding.draft_to = max(holding.draft_from, len(request.tokens) - 1 - old.kv_behind)
        drafting.observer, drafting.idle = wanted, 0
        new = self._shapes[wanted]
        if not new.has_kv:
            return None
        if new.catches_up:
            return self._fill(request, holding, wanted, num_nodes, budget)
        holding.drafter, holding.draft_from, holding.draft_to = wanted, request.max_committed_len, NO_END
        return None

    def missing(self, request: Request, holding: Holding) -> int:
        """Tokens that the drafter which last had KV of this row would have to fill in."""
        return request.max_committed_len - self._covered(request, holding, holding.drafter)

    def _fill(self, request: Request, holding: Holding, drafter: str, num_nodes: int, budget: int) -> Fill | None:
        """All that is missing, up to the farthest the row can come in this step, or, of what is settled, as much as may be."""
        start = self._covered(request, holding, drafter)
        count = min(request.max_committed_len + 1 + num_nodes, request.limit) - start
        holding.drafter, holding.draft_from, holding.draft_to = drafter, 0, NO_END
        if count <= max(budget, 1):
            self._ledger.cover(holding)
        else:
            count = max(0, min(budget, len(request.tokens) - 1 - start))
            holding.draft_to = start + count
            request.drafting.observer = OFF
        return Fill(holding.slot, holding.epoch, drafter, start, count) if count else None

    def _covered(self, request: Request, holding: Holding, drafter: str) -> int:
        """Tokens, from the first on, that a drafter which catches up has KV of."""
        whole = holding.drafter == drafter != NOBODY and holding.draft_from == 0
        return min(holding.draft_to, request.max_committed_len) if whole else 0
