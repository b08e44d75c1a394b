"""Rotary position embedding: which angle each dimension turns by per position, and the turn itself.

Angles are float32 whatever the model's dtype, as the reference implementation has them, so that a float64 model turns by
exactly the same angles. They are computed once per pass from the positions and shared by all layers; there is no table, so a
long context costs no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ModelError, shown
from slipstream.layers.rope import ROPE_KINDS, RopeSpec


def inverse_frequencies(spec: RopeSpec, dim: int) -> Tensor:
    """[dim / 2] float32: radians per position of each pair of dimensions. Raises `ModelError` for an unknown kind."""
    inverse = 1.0 / (spec.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if spec.frequency_factors:
        if len(spec.frequency_factors) != dim // 2:
            raise ModelError(f"rope frequency factors must number {dim // 2}, but got {len(spec.frequency_factors)}")
        if not all(0 < factor < math.inf for factor in spec.frequency_factors):
            raise ModelError("rope frequency factors must be finite and above 0, but some are not")
        inverse = inverse / torch.tensor(spec.frequency_factors, dtype=torch.float32)
    if spec.kind == "default":
        return inverse
    if spec.kind == "linear":
        return inverse / spec.factor
    if spec.kind == "llama3":
        return _llama3(inverse, spec)
    raise ModelError(f"rope scaling must be one of {', '.join(ROPE_KINDS)}, but got {shown(spec.kind)}")


def _llama3(inverse: Tensor, spec: RopeSpec) -> Tensor:
    # Long waves (more than original / low positions) are stretched, short ones (less than original / high) kept, and between
    # the two a linear blend in the number of turns that fit into the original context.
    wavelength = 2 * math.pi / inverse
    low, high = spec.low_freq_factor, spec.high_freq_factor
    blend = (spec.original_context_len / wavelength - low) / (high - low)
    between = (1 - blend) * inverse / spec.factor + blend * inverse
    out = torch.where(wavelength > spec.original_context_len / low, inverse / spec.factor, inverse)
    middle = (wavelength >= spec.original_context_len / high) & (wavelength <= spec.original_context_len / low)
    return torch.where(middle, between, out)


class Rotary:
    """Makes the turns of one pass; `dim` is the head dimension, pairs are (i, i + dim / 2)."""

    __slots__ = ("inverse_frequencies",)

    def __init__(self, spec: RopeSpec, dim: int, device: torch.device) -> None:
        self.inverse_frequencies = inverse_frequencies(spec, dim).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """The turn of each of T positions [T] int64, in float32 for half types, else in `dtype`."""
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        wide = torch.promote_types(dtype, torch.float32)
        return Turn(torch.cat((cos, cos), -1).to(wide)[:, None], torch.cat((-sin, sin), -1).to(wide)[:, None], dtype != wide)


@dataclass(frozen=True, slots=True)
class Turn:
    """cos and signed sin of a pass, [T, 1, dim]: x -> x * cos + swap(x) * sin, swap exchanging the two halves."""

    cos: Tensor
    sin: Tensor
    widen: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, dim] -> the same shape and dtype."""
        wide = x.to(self.cos.dtype) if self.widen else x
        out = (wide * self.cos).addcmul_(torch.roll(wide, x.shape[-1] // 2, -1), self.sin)
        return out.to(x.dtype) if self.widen else out
