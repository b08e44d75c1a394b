"""The one payload: what a step leaves behind, for every row that sampled, for its next step to start from.

This module knows tensors and nothing else: no request, no scheduler, no drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXTRAS: tuple[str, ...] = ("topk_p", "topk_index", "hidden_states", "draft_probs")


@dataclass(frozen=True, slots=True)
class DraftInput:
    """What a drafter's `observe` hands its own next `propose`; one row for each row that sampled.

    Fields are those of `RelayPayload` without the bonus, which is the engine's.
    """

    topk_p: Tensor | None = None
    topk_index: Tensor | None = None
    hidden_states: Tensor | None = None
    draft_probs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RelayPayload:
    """What travels from one step to the next: across iterations, pipeline stages and machines.

    Attributes:
        bonus_tokens: [rows] int64, always: the one token every next step starts from.
        topk_p: [rows, k] float32, first draft level: scores in the drafter's order.
        topk_index: [rows, k] int64, first draft level: target token ids.
        hidden_states: [rows, hidden], the state the drafter continues from.
        draft_probs: [rows, (steps,) vocab] float32, the q of rejection sampling.
    """

    bonus_tokens: Tensor
    topk_p: Tensor | None = None
    topk_index: Tensor | None = None
    hidden_states: Tensor | None = None
    draft_probs: Tensor | None = None

    @classmethod
    def from_draft_input(cls, bonus_tokens: Tensor, draft_input: DraftInput | None) -> RelayPayload:
        """The bonus from the verdict plus whatever `observe` returned; None makes a bonus-only payload."""
        if draft_input is None:
            return cls(bonus_tokens)
        return cls(bonus_tokens, **{name: getattr(draft_input, name) for name in EXTRAS})

    def extras(self) -> dict[str, Tensor]:
        """The fields present besides the bonus, by name."""
        return {name: value for name in EXTRAS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Shape of one row (without the row axis) and dtype of a relayed field."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """Which extras a drafter relays. Declared by the drafter; never read off a payload's shape."""

    fields: Mapping[str, FieldSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.fields:
            if name not in EXTRAS:
                raise ValueError(f"a relayed field must be one of {EXTRAS}, but got {name!r}")
