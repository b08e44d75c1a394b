"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; half types are computed in float32.

    A weight of a wider type than x's multiplies before the result is rounded to x's type.
    """

    __slots__ = ("_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape and dtype."""
        if x.dtype != self.weight.dtype:
            return functional.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)
        return functional.rms_norm(x, self._shape, self.weight, self.eps)


class HeadNorm:
    """RMS normalisation of each query and key head, one call for both: weights `query` [dim] for queries and `key` for keys."""

    __slots__ = ("_shape", "_weight", "eps", "key", "query")

    def __init__(self, query: Tensor, key: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        self._weight = torch.cat((query.expand(num_heads, -1), key.expand(num_kv_heads, -1)))
        self.query, self.key = query, key
        self.eps = eps
        self._shape = (query.shape[0],)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, num_heads + num_kv_heads, dim], queries first -> the same shape and dtype."""
        wide = x.to(self._weight.dtype)
        return functional.rms_norm(wide, self._shape, None, self.eps).mul_(self._weight).to(x.dtype)
