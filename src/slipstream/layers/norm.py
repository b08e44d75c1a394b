"""Root mean square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; half types are computed in float32."""

    __slots__ = ("_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape and dtype."""
        return functional.rms_norm(x, self._shape, self.weight, self.eps)
