"""What the kernels compute, exactly: their operands as they round them, multiplied in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cpu.matrix import Mode
from slipstream.kernels.formats import Format, QuantizedTensor

Matrix = Tensor | QuantizedTensor


def random_matrix(form: Format, out: int, inputs: int, seed: int = 0) -> Matrix:
    g = torch.Generator().manual_seed(seed)
    if not form.is_quantized:
        return torch.randn(out, inputs, generator=g).to(torch.float32 if form is Format.F32 else torch.bfloat16)
    scales = (torch.rand(out, inputs // form.group, generator=g) * 0.02 - 0.005).to(form.scale_dtype)
    if form.has_mins:
        codes = torch.randint(0, 256, (out, inputs // 2), generator=g, dtype=torch.uint8)
        mins = (torch.randn(out, inputs // form.group, generator=g) * 0.1).to(form.scale_dtype)
        return QuantizedTensor(form, (out, inputs), codes, scales, mins)
    reach = {Format.Q5: 16, Format.Q6K: 32}.get(form, 128)
    low, high = -reach, reach  # both ends: their products are the largest sums
    codes = torch.randint(low, high, (out, inputs), generator=g, dtype=torch.int8)
    return QuantizedTensor(form, (out, inputs), codes, scales)


def operand(x: Tensor, mode: Mode) -> Tensor:
    """float32 [T, in] as the kernels read it, in float64."""
    if mode is Mode.EXACT:
        return x.double()
    if mode is Mode.BFLOAT16:
        return x.bfloat16().double()
    codes, scales = quantized(x)
    return (codes.double() * scales.double().unsqueeze(-1)).flatten(1)[:, : x.shape[1]]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, groups, 32] and scales [T, groups], both float32."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1)
    is_zero = largest < 2.0**-118
    inverse = torch.where(is_zero, 0.0, 127 / torch.where(is_zero, 1.0, largest))
    codes = (groups * inverse.unsqueeze(-1)).round()
    scales = torch.where(is_zero, 0.0, largest * torch.tensor(1 / 127, dtype=torch.float32))
    return codes, scales


def values(matrix: Matrix) -> Tensor:
    """Weights in float64: of the quantised ones scale * code + min without a rounding."""
    if isinstance(matrix, Tensor):
        return matrix.double()
    out, inputs = matrix.shape
    codes = matrix.codes
    if matrix.format.has_mins:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).view(out, inputs)
    whole = codes.double().view(out, -1, matrix.format.group) * matrix.scales.double().unsqueeze(-1)
    if matrix.mins is not None:
        whole += matrix.mins.double().unsqueeze(-1)
    return whole.view(out, inputs)


def product(x: Tensor, matrix: Matrix, mode: Mode) -> tuple[Tensor, Tensor]:
    """The product [T, out] in float64, and what its rounding errors are measured by: the product of the magnitudes."""
    left, right = operand(x, mode), values(matrix)
    return left @ right.T, left.abs() @ right.abs().T + 1e-30
