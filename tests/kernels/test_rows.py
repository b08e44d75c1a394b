"""Normalisation, gates and the activations' quantisation, against float64 and against what they are said to be."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.errors import InvariantBroken
from slipstream.kernels.cpu.library import Kernels
from slipstream.kernels.cpu.matrix import Gate
from slipstream.kernels.cpu.rows import RowKernels
from tests.kernels.emulate import quantized

pytestmark = pytest.mark.usefixtures("library")

WIDTHS = (1, 15, 16, 17, 31, 33, 576, 1000, 9000)


def rows(count: int, width: int) -> Tensor:
    g = torch.Generator().manual_seed(width)
    return torch.randn(count, width, generator=g) * torch.logspace(-2, 2, count).unsqueeze(1)


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rmsnorm(width: int, adds_one: bool) -> None:
    x, weight = rows(40, width), torch.randn(width)
    got = RowKernels().rmsnorm(x, weight, 1e-6, adds_one=adds_one)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + adds_one)
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_rmsnorm_of_a_row_does_not_depend_on_the_others(library: Kernels) -> None:
    x, weight = rows(130, 576), torch.randn(576)
    library.set_threads(2)
    whole = RowKernels().rmsnorm(x, weight, 1e-6)
    library.set_threads(1)
    for row in range(130):
        assert torch.equal(RowKernels().rmsnorm(x[row : row + 1], weight, 1e-6)[0], whole[row])


def test_rmsnorm_keeps_what_is_not_finite_in_its_row() -> None:
    x, weight = rows(5, 100), torch.ones(100)
    good = RowKernels().rmsnorm(x, weight, 1e-6)
    x[2, 7] = float("nan")
    got = RowKernels().rmsnorm(x, weight, 1e-6)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


@pytest.mark.parametrize("activation", Gate)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate(width: int, activation: Gate) -> None:
    gate, up = rows(21, width), rows(21, width + 1)[:, 1:]
    got = RowKernels().gate(gate, up, activation)
    wide = gate.double()
    if activation is Gate.SILU:
        wide = functional.silu(wide)
    elif activation is Gate.GELU_TANH:
        # As a sigmoid: 1 + tanh has no digits left where tanh is near -1.
        wide = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    # e^y is off by as many times float32's precision as y is large.
    assert torch.allclose(got.double(), wide * up.double(), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("activation", [Gate.SILU, Gate.GELU_TANH])
def test_gates_at_the_ends(activation: Gate) -> None:
    gate = torch.tensor([[0.0, -0.0, 200.0, -200.0, 1e30, -1e30, 1e-30, float("nan")]])
    got = RowKernels().gate(gate, torch.ones_like(gate), activation)[0]
    assert torch.equal(got[:3], torch.tensor([0.0, 0.0, 200.0]))
    assert abs(float(got[3])) < 1e-30
    assert float(got[4]) == pytest.approx(1e30)
    assert abs(float(got[5])) < 1e-7
    assert float(got[6]) == pytest.approx(5e-31)
    assert got[7].isnan()


def quantize(library: Kernels, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [T, groups, 32], scales [T, groups], and the four numbers behind the codes as raw int32 [T, groups, 4]."""
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    call = library.bind("slip_quantize", pointer, size, size, size, pointer, real, real, pointer)
    raw = torch.empty(x.shape[0], -(-x.shape[1] // 32), 48, dtype=torch.int8)
    call(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], None, 0.0, 0.0, raw.data_ptr())
    rest = raw[:, :, 32:].contiguous().view(torch.int32)
    return raw[:, :, :32], rest[:, :, 0].contiguous().view(torch.float32), rest


@pytest.mark.parametrize("width", [16, 32, 48, 576])
def test_quantisation_is_the_one_that_is_emulated(library: Kernels, width: int) -> None:
    x = rows(20, width)
    x[3] = 0
    x[4] = 1e-37
    codes, scales, rest = quantize(library, x)
    expected_codes, expected_scales = quantized(x)
    assert torch.equal(codes.float(), expected_codes)
    assert torch.equal(scales, expected_scales)
    sums = codes.int().sum(-1)
    assert torch.equal(rest[:, :, 1].contiguous().view(torch.float32), scales * sums)
    assert torch.equal(rest[:, :, 2], -128 * sums.int())
    assert torch.equal(rest[:, :, 3], -128 * codes[:, :, :16].int().sum(-1).int())


def test_quantisation_of_what_is_not_finite(library: Kernels) -> None:
    x = rows(3, 64)
    x[0, 40], x[1, 0] = float("inf"), float("nan")
    codes, scales, _ = quantize(library, x)
    assert scales[0, 1].isnan()
    assert scales[1, 0].isnan()
    assert not codes[0, 1].any()
    assert scales[[0, 1, 2, 2], [0, 1, 0, 1]].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    kernels = RowKernels()
    with pytest.raises(InvariantBroken, match="rows must be float32 of 2 dimensions"):
        kernels.rmsnorm(torch.zeros(4), torch.zeros(4), 1e-6)
    with pytest.raises(InvariantBroken, match="must have 4 values"):
        kernels.rmsnorm(torch.zeros(2, 4), torch.zeros(5), 1e-6)
    with pytest.raises(InvariantBroken, match="shape of what is gated"):
        kernels.gate(torch.zeros(2, 4), torch.zeros(2, 5), Gate.SILU)
    with pytest.raises(InvariantBroken, match="last one dense"):
        kernels.gate(torch.zeros(4, 2).T, torch.zeros(2, 4), Gate.SILU)
    assert kernels.gate(torch.zeros(0, 4), torch.zeros(0, 4), Gate.SILU).shape == (0, 4)
