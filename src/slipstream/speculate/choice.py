"""Who drafts for a row in the next step, how far, and who watches it: the words, and the chooser without a cost model.

A drafter with state (KV of its own, or extras in the relay) can propose only for rows it watched in the step before. A light one,
which has neither, can step in at any time. So a row has an observer, whose payload the relay carries, and each step a proposer:

    step           1        2        3        4        5        6
    observer       head     head     head     off      model    model       head: cannot catch up, so it watches on while the
    proposes       head     ngram    head     ngram    -        model       ngram drafts, and leaves when it is idle for long
                                                       └─ fills its KV up   model: catches up from tokens alone, so it leaves
                                                                            whenever it gets no node, and comes back by a fill

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

OFF = "off"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the host must know of a drafter.

    Attributes:
        depth, num_nodes, max_writes, kv_behind, catches_up: as `speculate.base.Drafter` declares them.
        has_kv: it has KV of its own.
        relays: it relays extras.
    """

    depth: int
    num_nodes: int
    max_writes: int
    kv_behind: int = 0
    has_kv: bool = False
    relays: bool = False
    catches_up: bool = False

    @property
    def has_state(self) -> bool:
        """It must watch a row before it can propose for it."""
        return self.has_kv or self.relays


@dataclass(slots=True)
class Acceptance:
    """How drafts fare: levels accepted and levels tried, the older the less they count.

    Attributes:
        accepted, tried: sums.
        last_tried: number of the last step that drafted for it.
    """

    accepted: float = 0.0
    tried: float = 0.0
    last_tried: int = 0

    def add(self, num_accepted: int, num_levels: int, memory: float) -> None:
        """A draft of `num_levels` levels had `num_accepted` of them accepted; those behind the first refusal were never tried."""
        self.accepted = memory * self.accepted + num_accepted
        self.tried = memory * self.tried + min(num_accepted + 1, num_levels)

    def alpha(self, prior: float, weight: float) -> float:
        """Chance that the next level is accepted, when those before it are; the prior counts like `weight` levels tried."""
        return (self.accepted + weight * prior) / (self.tried + weight)


@dataclass(slots=True)
class RowDrafting:
    """How drafting stands for a request.

    Attributes:
        observer: who watched its last step, and whose payload the next one finds.
        idle: steps in which the observer has not proposed.
        missing: tokens the drafters that can catch up would have to fill in; set before a choice.
        on_trial: who is to come and be tried, or has come and not proposed yet.
        records: how each drafter has fared with it.
    """

    observer: str = OFF
    idle: int = 0
    missing: int = 0
    on_trial: str = ""
    records: dict[str, Acceptance] = field(default_factory=dict)

    def record(self, drafter: str) -> Acceptance:
        """How `drafter` has fared with it."""
        return self.records.setdefault(drafter, Acceptance())


@dataclass(frozen=True, slots=True)
class Choice:
    """For one row and step: who proposes how many nodes, and who is to watch.

    One who catches up and is given no node does not watch either, whatever is chosen: its KV would get a hole.
    """

    drafter: str
    num_nodes: int
    observer: str


class Chooser(Protocol):
    """Chooses drafters and widths. The scheduler asks it and tells it; one thread."""

    def first_observer(self, num_rows: int) -> str:
        """Who watches the prompt of a request that comes to `num_rows` running ones."""
        ...

    def choose(self, rows: Sequence[RowDrafting], most: Sequence[int], num_other_tokens: int) -> list[Choice]:
        """A choice for each row.

        Args:
            rows: how drafting stands.
            most: nodes each may have at most.
            num_other_tokens: prompt tokens of the step.
        """
        ...

    def step_took(
        self, num_rows: int, num_other_tokens: int, num_nodes: Mapping[str, int], step_s: float, draft_s: Mapping[str, float]
    ) -> None:
        """What a step took.

        Args:
            num_rows: rows that decoded.
            num_other_tokens: prompt tokens.
            num_nodes: nodes that were verified, by drafter.
            step_s: seconds without those in drafters.
            draft_s: seconds in drafters.
        """
        ...

    def filled(self, drafter: str, num_tokens: int, fill_s: float) -> None:
        """To catch up with `num_tokens` tokens took `drafter` fill_s seconds."""
        ...

    def watched(self, drafter: str, num_rows: int, watch_s: float) -> None:
        """To watch `num_rows` rows for which it did not draft took `drafter` watch_s seconds."""
        ...

    def draft_was(self, row: RowDrafting, drafter: str, num_accepted: int, num_nodes: int) -> None:
        """A row's draft of `num_nodes` nodes had `num_accepted` levels accepted."""
        ...


class Widest:
    """Always the same drafter, and as many nodes as there may be.

    Args:
        shapes: of every drafter.
        drafter: who drafts.
    """

    def __init__(self, shapes: Mapping[str, Shape], drafter: str) -> None:
        self._drafter = drafter
        self._shape = shapes[drafter]

    def first_observer(self, num_rows: int) -> str:
        """The drafter."""
        return self._drafter

    def choose(self, rows: Sequence[RowDrafting], most: Sequence[int], num_other_tokens: int) -> list[Choice]:
        """The drafter, once it has watched where it must."""
        return [self._choice(row, min(limit, self._shape.num_nodes)) for row, limit in zip(rows, most, strict=True)]

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

    def _choice(self, row: RowDrafting, num_nodes: int) -> Choice:
        if self._shape.has_state and row.observer != self._drafter:
            return Choice(OFF, 0, self._drafter if num_nodes else row.observer)  # nobody comes who may not draft
        return Choice(self._drafter, num_nodes, self._drafter)
