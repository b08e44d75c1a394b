"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Embedding:
    """Rows of a table [vocab, hidden], times a scale, which is rounded to the table's dtype first."""

    __slots__ = ("_scale", "weight")

    def __init__(self, weight: Tensor, scale: float = 1.0) -> None:
        self.weight = weight
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]."""
        rows = functional.embedding(tokens, self.weight)
        return rows if self._scale == 1 else rows * self._scale
