"""Row by row kernels that are no products: RMS normalisation, and a gated MLP's gate."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from slipstream.errors import InvariantBroken, ModelError
from slipstream.kernels.cpu.library import Function, kernels
from slipstream.kernels.cpu.matrix import Gate

_POINTER, _NUMBER, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class RowKernels:
    """Both, bound once. Raises `ModelError` where the kernels are not there."""

    def __init__(self) -> None:
        library = kernels()
        if library is None:
            raise ModelError("row kernels must have the CPU kernels, but they are off", hint="the log says why")
        rows = (_POINTER, _SIZE)
        self._rmsnorm: Function = library.bind("slip_rmsnorm", *rows, _SIZE, _SIZE, _POINTER, _REAL, _REAL, *rows)
        self._gate: Function = library.bind("slip_gate", _NUMBER, *rows, *rows, _SIZE, _SIZE, *rows)

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, *, adds_one: bool = False) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * (weight, or weight + 1): float32 [T, n], contiguous float32 [n] -> float32 [T, n]."""
        _check("rows", x, 2)
        _check("a norm's weight", weight, 1)
        if weight.shape[0] != x.shape[1]:
            raise InvariantBroken(f"a norm's weight must have {x.shape[1]} values, but got {weight.shape[0]}")
        out = torch.empty((x.shape[0], x.shape[1]))
        where = (x.data_ptr(), x.stride(0), x.shape[0], x.shape[1])
        self._rmsnorm(*where, weight.data_ptr(), eps, float(adds_one), out.data_ptr(), out.stride(0))
        return out

    def gate(self, gate: Tensor, up: Tensor, activation: Gate) -> Tensor:
        """activation(gate) * up: float32 [T, n] each -> float32 [T, n]."""
        _check("gates", gate, 2)
        _check("what is gated", up, 2)
        if gate.shape != up.shape:
            raise InvariantBroken(f"gates must have the shape of what is gated, {list(up.shape)}, but got {list(gate.shape)}")
        out = torch.empty((gate.shape[0], gate.shape[1]))
        rows = (gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), gate.shape[0], gate.shape[1])
        self._gate(activation, *rows, out.data_ptr(), out.stride(0))
        return out


def _check(what: str, tensor: Tensor, dimensions: int) -> None:
    if tensor.dtype != torch.float32 or tensor.dim() != dimensions or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
        given = f"{tensor.dtype} {list(tensor.shape)} of strides {tensor.stride()} on {tensor.device}"
        must = f"float32 of {dimensions} dimensions, the last one dense, on the CPU"
        raise InvariantBroken(f"{what} must be {must}, but got {given}")
