"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.cpu.matrix import PackedMatrix
from slipstream.kernels.formats import Matrix, QuantizedTensor, same_values

ROWS_AT_A_TIME = 4096


class Embedding:
    """Rows of a table [vocab, hidden], times a scale, which is rounded to the rows' dtype first.

    Args:
        weight: the table. A quantised one stays so: the rows that are asked for are dequantised. A packed one is the head's too.
        scale: of every row.
        dtype: of the rows; None: the table's (a quantised one's: float32).
    """

    __slots__ = ("_scale", "dtype", "hidden_size", "weight")

    def __init__(self, weight: Matrix | PackedMatrix, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        self.weight = weight
        stored = weight.dtype if isinstance(weight, Tensor) else torch.float32
        self.dtype: torch.dtype = dtype or stored
        self.hidden_size: int = weight.num_inputs if isinstance(weight, PackedMatrix) else weight.shape[1]
        self._scale = float(torch.tensor(scale, dtype=self.dtype))

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.weight.device if isinstance(self.weight, Tensor) else torch.device("cpu")

    def holds(self, table: Matrix) -> bool:
        """Whether the table, unscaled, has the same numbers as one of the same shape."""
        weight = self.weight
        if not isinstance(weight, PackedMatrix):
            return same_values(table, weight)
        for start in range(0, weight.num_outputs, ROWS_AT_A_TIME):  # all of it in float32 may be gigabytes
            rows = torch.arange(start, min(start + ROWS_AT_A_TIME, weight.num_outputs))
            if not same_values(table.narrow(0, start, len(rows)), weight.weight_rows(rows)):
                return False
        return True

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]."""
        if isinstance(self.weight, PackedMatrix):
            rows = self.weight.weight_rows(tokens).to(self.dtype)
        elif isinstance(self.weight, QuantizedTensor):
            rows = self.weight.rows(tokens).dequantize(self.dtype)
        else:
            rows = functional.embedding(tokens, self.weight).to(self.dtype)
        return rows if self._scale == 1 else rows * self._scale
