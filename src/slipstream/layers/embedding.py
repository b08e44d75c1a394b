"""Token embedding."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class Embedding:
    """Rows of a table [vocab, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]."""
        return functional.embedding(tokens, self.weight)
