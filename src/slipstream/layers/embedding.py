"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.formats import Matrix, QuantizedTensor


class Embedding:
    """Rows of a table [vocab, hidden], times a scale, which is rounded to the rows' dtype first.

    Args:
        weight: the table. A quantised one stays so: the rows that are asked for are dequantised.
        scale: of every row.
        dtype: of the rows; None: the table's (a quantised one's: float32).
    """

    __slots__ = ("_scale", "dtype", "hidden_size", "weight")

    def __init__(self, weight: Matrix, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        self.weight = weight
        stored = torch.float32 if isinstance(weight, QuantizedTensor) else weight.dtype
        self.dtype: torch.dtype = dtype or stored
        self.hidden_size: int = weight.shape[1]
        self._scale = float(torch.tensor(scale, dtype=self.dtype))

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return torch.device("cpu") if isinstance(self.weight, QuantizedTensor) else self.weight.device

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]."""
        if isinstance(self.weight, QuantizedTensor):
            rows = self.weight.rows(tokens).dequantize(self.dtype)
        else:
            rows = functional.embedding(tokens, self.weight).to(self.dtype)
        return rows if self._scale == 1 else rows * self._scale
