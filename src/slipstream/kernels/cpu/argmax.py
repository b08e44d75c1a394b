"""The largest number of each row, the ctypes side of csrc/argmax.cpp."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from slipstream.errors import InvariantBroken
from slipstream.kernels.cpu.library import Function, loaded


def takes(x: Tensor) -> bool:
    """Whether `argmax` does x: float32 rows on the CPU whose numbers lie side by side, where the kernels are in use already."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 2 or loaded() is None:
        return False
    return x.stride(1) == 1 and (len(x) < 2 or x.stride(0) >= x.shape[1])  # rows may not share numbers


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Id [n] int64 and value [n] of the largest number of each row of x [n, V]: the lowest id on ties; a NaN counts as largest.

    Numbers that are not normal count as 0. Raises `InvariantBroken` for rows that `takes` refuses, or of no numbers.
    """
    if not takes(x):
        raise InvariantBroken(f"rows must be float32 side by side on the CPU, but got {x.dtype} {list(x.shape)} on {x.device}")
    ids, values = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x))
    _function()(x.data_ptr(), max(x.stride(0), x.shape[1]), len(x), x.shape[1], ids.data_ptr(), values.data_ptr())
    return ids, values


@cache
def _function() -> Function:
    library = loaded()
    assert library is not None  # `takes` has seen to it
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    return library.bind("slip_argmax", pointer, size, size, size, pointer, pointer)
