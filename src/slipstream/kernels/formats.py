"""The formats weights are held in, and a matrix in one of the quantised ones.

A row of a quantised matrix is cut into groups, each with a scale of its own, and in some formats a minimum:

    row      | e0 e1 ... e31 | e32 ... e63 | ...          32 elements a group, 16 in q6k
    scales   |      s0       |     s1      | ...          value = scale * code (+ minimum)
    mins     |      m0       |     m1      | ...          q4 and q4k alone

    codes    q8, q5, q6k   one int8 an element; q5 from -16 to 15, q6k from -32 to 31
             q4, q4k       one byte for two: element 2j in the low four bits, 2j + 1 in the high four
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch
from torch import Tensor

from slipstream.errors import InvariantBroken

_BLOCK_ELEMENTS = 1 << 20  # so many are dequantised at once: what lies between codes and values stays small


class Format(StrEnum):
    """How a matrix is held. F32 and BF16 are plain tensors, the others `QuantizedTensor`s."""

    F32 = "f32"
    BF16 = "bf16"
    Q8 = "q8"
    Q4 = "q4"
    Q4K = "q4k"
    Q5 = "q5"
    Q6K = "q6k"

    @property
    def is_quantized(self) -> bool:
        """Whether it has codes and scales."""
        return self not in (Format.F32, Format.BF16)

    @property
    def group(self) -> int:
        """Elements of a row that share a scale; rows must be whole groups. 1 for the plain formats."""
        if not self.is_quantized:
            return 1
        return 16 if self is Format.Q6K else 32

    @property
    def has_mins(self) -> bool:
        """Whether each group has a minimum too; codes are then 0 to 15, two in a byte."""
        return self in (Format.Q4, Format.Q4K)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Type of scales and minimums: float16 where the formats of files have that, float32 where theirs are products."""
        return torch.float16 if self in (Format.Q8, Format.Q4, Format.Q5) else torch.float32

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """Bytes of a matrix [out, in] in this format, as its own kernel reads it."""
        elements = shape[0] * shape[1]
        if not self.is_quantized:
            return elements * (4 if self is Format.F32 else 2)
        bits = {Format.Q8: 8, Format.Q5: 5, Format.Q6K: 6}.get(self, 4)
        return elements * bits // 8 + elements // self.group * self.scale_dtype.itemsize * (2 if self.has_mins else 1)


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix [out, in] in a quantised format, on the CPU, row by row.

    Attributes:
        format: which one.
        shape: (out, in); `in` is whole groups.
        codes: int8 [out, in] for q8, q5 and q6k; uint8 [out, in / 2] for q4 and q4k.
        scales: [out, in / group], float16 for q8, q4 and q5, float32 for q4k and q6k.
        mins: as scales for q4 and q4k, else None.

    Raises `InvariantBroken` on construction where the parts do not fit together.
    """

    format: Format
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None

    def __post_init__(self) -> None:
        out, inputs = self.shape
        form = self.format
        if not form.is_quantized or inputs % form.group:
            raise InvariantBroken(f"rows of a {form} matrix must be whole groups of a quantised format, but got {inputs} inputs")
        codes = ((out, inputs // 2), torch.uint8) if form.has_mins else ((out, inputs), torch.int8)
        scales = ((out, inputs // form.group), form.scale_dtype)
        parts = {"codes": (self.codes, codes), "scales": (self.scales, scales)}
        if self.mins is not None:
            parts["mins"] = (self.mins, scales)
        if (self.mins is not None) != form.has_mins:
            raise InvariantBroken(f"{form} must {'' if form.has_mins else 'not '}have minimums")
        for name, (tensor, (shape, dtype)) in parts.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
                given = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                raise InvariantBroken(f"{name} of a {form} matrix must be {list(shape)} {dtype} on the CPU, but got {given}")

    @property
    def num_elements(self) -> int:
        """out * in."""
        return self.shape[0] * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes as its own kernel reads it; codes of five and six bits take eight here."""
        return self.format.bytes_of(self.shape)

    def rows(self, which: Tensor) -> QuantizedTensor:
        """The rows `which` (int64 [n]) as a matrix of their own, copied: [n, in]."""
        return self._of([part.index_select(0, which) for part in self._parts()])

    def narrow(self, dim: int, start: int, length: int) -> QuantizedTensor:
        """Rows [start, start + length), sharing memory; as a tensor's `narrow`, but `dim` must be 0."""
        if dim != 0:
            raise InvariantBroken(f"a quantised matrix must be cut along its rows, but got dimension {dim}")
        return self._of([part.narrow(0, start, length) for part in self._parts()])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [out, in]: computed in float32, then rounded to `dtype`."""
        out, inputs = self.shape
        values = torch.empty((out, inputs), dtype=dtype)
        step = max(1, _BLOCK_ELEMENTS // max(1, inputs))
        for start in range(0, out, step):
            block = self.narrow(0, start, min(step, out - start))
            values[start : start + step] = block._values()
        return values

    def equals(self, other: QuantizedTensor) -> bool:
        """Whether both hold the same format and the same parts."""
        return (
            self.format is other.format
            and self.shape == other.shape
            and all(torch.equal(mine, theirs) for mine, theirs in zip(self._parts(), other._parts(), strict=True))
        )

    def _values(self) -> Tensor:
        """float32 [out, in]."""
        out, inputs = self.shape
        grouped = (out, inputs // self.format.group, self.format.group)
        codes = self.codes
        if self.format.has_mins:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1)
        values = codes.view(grouped).to(torch.float32)
        values *= self.scales.to(torch.float32).unsqueeze(-1)
        if self.mins is not None:  # a rounding of its own, as in the files' own decoders: no fused multiply-add
            values += self.mins.to(torch.float32).unsqueeze(-1)
        return values.view(out, inputs)

    def _parts(self) -> Iterator[Tensor]:
        yield self.codes
        yield self.scales
        if self.mins is not None:
            yield self.mins

    def _of(self, parts: list[Tensor]) -> QuantizedTensor:
        mins = parts[2] if self.mins is not None else None
        return QuantizedTensor(self.format, (parts[0].shape[0], self.shape[1]), parts[0], parts[1], mins)


# A matrix as a model takes it.
Matrix: TypeAlias = Tensor | QuantizedTensor


def format_name(matrix: Matrix) -> str:
    """`q8`, `float32`: for people."""
    return str(matrix.format) if isinstance(matrix, QuantizedTensor) else str(matrix.dtype).removeprefix("torch.")


def same_values(one: Matrix, other: Matrix) -> bool:
    """Whether two matrices hold the same numbers."""
    if isinstance(one, QuantizedTensor) and isinstance(other, QuantizedTensor) and one.format is other.format:
        return one.equals(other)
    plain = [part.dequantize() if isinstance(part, QuantizedTensor) else part for part in (one, other)]
    wide = torch.promote_types(plain[0].dtype, plain[1].dtype)
    return torch.equal(plain[0].to(wide), plain[1].to(wide))
