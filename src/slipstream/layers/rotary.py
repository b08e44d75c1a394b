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

MIN_TABLE = 256  # positions


def inverse_frequencies(spec: RopeSpec, dim: int) -> Tensor:
    """[dim / 2] float32: radians per position of each pair of dimensions; of dynamic scaling those of the original context.

    Raises `ModelError` for an unknown kind.
    """
    growth = spec.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if spec.frequency_factors:
        if len(spec.frequency_factors) != dim // 2:
            raise ModelError(f"rope frequency factors must number {dim // 2}, but got {len(spec.frequency_factors)}")
        if not all(0 < factor < math.inf for factor in spec.frequency_factors):
            raise ModelError("rope frequency factors must be finite and above 0, but some are not")
        growth = torch.tensor(spec.frequency_factors, dtype=torch.float32) * growth
    inverse = 1.0 / growth
    if spec.kind in ("default", "dynamic", "longrope"):
        return inverse
    if spec.kind == "linear":
        return inverse / spec.factor
    if spec.kind == "yarn":
        return _yarn(inverse, spec, dim)
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


def _yarn(inverse: Tensor, spec: RopeSpec, dim: int) -> Tensor:
    # "NTK-by-parts" (Peng et al., YaRN, 2023): as llama3's, but the blend is linear in the dimension, between those that turn
    # beta_fast and beta_slow times within the original context.
    def dimension(turns: float) -> float:
        return dim * math.log(spec.original_context_len / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - stretched
    return inverse / spec.factor * (1 - kept) + inverse * kept


class Rotary:
    """Makes the turns of one pass; `head_dim` is the whole head, of which the spec's share turns, in pairs (i, i + dim / 2).

    Dynamic scaling: beyond the original context a position p turns by the frequencies of a context of p + 1. The rule looks at
    nothing but the position, so chunks, batches and drafts do not change it, and it is what a cache filled token by token holds.
    """

    __slots__ = ("_dim", "_first", "_spec", "inverse_frequencies")

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._spec = spec
        self._dim = int(head_dim * spec.rotary_share)
        if self._dim < 2 or self._dim % 2:
            raise ModelError(f"the rotated part of a head must be an even number of dimensions, but got {self._dim}")
        if spec.kind == "dynamic" and self._dim < 4:
            raise ModelError(f"dynamic rope scaling must have at least 4 dimensions to turn, but got {self._dim}")
        self.inverse_frequencies = inverse_frequencies(spec, self._dim).to(device)
        self._first: tuple[Tensor, Tensor] = self.tables(torch.arange(0, device=device))

    def at(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """The turn of each of T positions [T] int64, in float32 for half types, else in `dtype`."""
        cos, sin = self.tables(positions)
        wide = torch.promote_types(dtype, torch.float32)
        return Turn(torch.cat((cos, cos), -1).to(wide)[:, None], torch.cat((-sin, sin), -1).to(wide)[:, None], dtype != wide)

    def first_tables(self, count: int) -> tuple[Tensor, Tensor]:
        """`tables` of positions 0, 1, ... to at least count - 1, made once and kept."""
        first = self._first
        if len(first[0]) < count:
            size = max(MIN_TABLE, 1 << (count - 1).bit_length())
            first = self._first = self.tables(torch.arange(size, device=self.inverse_frequencies.device))
        return first

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each of T positions [T] int64 and pair of dimensions: [T, dim / 2] float32 each, dense."""
        frequencies = self._dynamic(positions) if self._spec.kind == "dynamic" else self.inverse_frequencies
        angles = positions.to(torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._spec.attention_factor != 1:
            cos, sin = cos * self._spec.attention_factor, sin * self._spec.attention_factor
        return cos, sin

    def _dynamic(self, positions: Tensor) -> Tensor:
        """[T, dim / 2] float32."""
        spec, dim = self._spec, self._dim
        length = (positions + 1).clamp(min=spec.original_context_len)
        stretch = spec.factor * length / spec.original_context_len - (spec.factor - 1)
        theta = spec.theta * stretch ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
        grown = 1.0 / (theta[:, None] ** exponents)
        return torch.where((length > spec.original_context_len)[:, None], grown, self.inverse_frequencies)


@dataclass(frozen=True, slots=True)
class Turn:
    """cos and signed sin of a pass, [T, 1, dim]: x -> x * cos + swap(x) * sin, swap exchanging the two halves.

    Where a head is longer than dim, the rest of it does not turn.
    """

    cos: Tensor
    sin: Tensor
    widen: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, head_dim] -> the same shape and dtype."""
        dim = self.cos.shape[-1]
        if dim < x.shape[-1]:
            return torch.cat((self(x[..., :dim]), x[..., dim:]), -1)
        wide = x.to(self.cos.dtype) if self.widen else x
        out = (wide * self.cos).addcmul_(torch.roll(wide, dim // 2, -1), self.sin)
        return out.to(x.dtype) if self.widen else out
