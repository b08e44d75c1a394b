"""Matrix product with an optional bias, and several of them fused into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x W^T + b, with W [out, in] and b [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return functional.linear(x, self.weight, self.bias)

    @classmethod
    def fused(cls, parts: Sequence[Linear]) -> Linear:
        """One product whose outputs are those of `parts`, one after the other; all of them have a bias, or none."""
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
