"""Matrix product with an optional bias; several of them fused into one; and its form packed for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

# Types oneDNN has fast products for on every CPU; the others stay with the plain one.
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class Product(Protocol):
    """x -> x W^T + b."""

    num_outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, num_outputs]."""
        ...


class Linear:
    """y = x W^T + b, with W [out, in] and b [out] or None."""

    __slots__ = ("bias", "num_outputs", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_outputs: int = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same product with the weight in oneDNN's own blocked layout: about twice as fast for the few rows of a decode step."""

    __slots__ = ("_apply", "_weight", "bias", "num_outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._apply = torch.ops.mkldnn._linear_pointwise.default
        self.bias = bias
        self.num_outputs: int = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        out: Tensor = self._apply(x, self._weight, self.bias, "none", [], "")
        return out


def linear(weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Product:
    """The fastest product there is for the weights' device and dtype.

    Args:
        weights: [out_i, in] each; several make one product whose outputs are theirs one after the other.
        biases: [out_i] each, or none at all.
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    bias = torch.cat(list(biases)) if biases else None
    if weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES and torch._C._has_mkldnn:
        return PackedLinear(weight, bias)
    return Linear(weight, bias)
