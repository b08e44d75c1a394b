"""A chooser that lets drafters come, go, sleep, wake and take turns at random: whoever drafts, the answers are the same."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from slipstream.speculate.choice import OFF, Choice, RowDrafting, Shape


class RandomChooser:
    """Draws an observer now and then, and a proposer among those that may.

    Args:
        shapes: of every drafter, by name.
        seed: of what is drawn.
    """

    def __init__(self, shapes: Mapping[str, Shape], seed: int) -> None:
        self._shapes = shapes
        self._rng = random.Random(seed)
        self._first = seed

    def first_observer(self, num_rows: int) -> str:
        """Any; the same between two steps, as a request that is looked at must be admitted as it was looked at."""
        return sorted(self._shapes)[(self._first + num_rows) % len(self._shapes)]

    def choose(self, rows: Sequence[RowDrafting], most: Sequence[int], num_other_tokens: int) -> list[Choice]:
        """Draw."""
        return [self._choice(row, limit) for row, limit in zip(rows, most, strict=True)]

    def step_took(
        self, num_rows: int, num_other_tokens: int, num_nodes: Mapping[str, int], step_s: float, draft_s: Mapping[str, float]
    ) -> None:
        """Nothing to learn."""

    def filled(self, drafter: str, num_tokens: int, fill_s: float) -> None:
        """Nothing to learn."""

    def watched(self, drafter: str, num_rows: int, watch_s: float) -> None:
        """Nothing to learn."""

    def draft_was(self, row: RowDrafting, drafter: str, num_accepted: int, num_nodes: int) -> None:
        """Nothing to learn."""

    def _choice(self, row: RowDrafting, limit: int) -> Choice:
        rng = self._rng
        may = [name for name, shape in self._shapes.items() if name == row.observer or not shape.has_state]
        drafter = row.observer if rng.random() < 0.6 else rng.choice(may)
        most = min(limit, self._shapes[drafter].num_nodes)
        num_nodes = most if rng.random() < 0.7 else rng.randint(0, most)
        observer = rng.choice((*self._shapes, OFF)) if rng.random() < 0.3 else row.observer
        return Choice(drafter, num_nodes, observer)
