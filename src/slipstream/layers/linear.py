"""Matrix product with an optional bias; several of them fused into one; and its forms packed for the CPU.

    weights     plain          torch (packed by oneDNN where it can be)        our kernels
                quantised      dequantised to the model's dtype, then torch    our kernels, as they are
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.cpu.matrix import Gate, Mode, PackedMatrix
from slipstream.kernels.formats import Matrix, QuantizedTensor, format_name
from slipstream.layers.activation import ACTIVATIONS, Activation

# Activations that our kernels know.
GATES = {ACTIVATIONS["silu"]: Gate.SILU, ACTIVATIONS["gelu_pytorch_tanh"]: Gate.GELU_TANH}

# Types oneDNN has fast products for on every CPU; the others stay with the plain one.
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class Arithmetic(StrEnum):
    """What multiplies matrices.

    TORCH: torch's products. KERNELS: ours, with activations as each format is fastest: 8 bit for quantised weights, bfloat16 for
    bfloat16, float32 for float32. EXACT: ours, in float32 whatever the weights are.
    """

    TORCH = "torch"
    KERNELS = "kernels"
    EXACT = "exact"


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


class Side:
    """Products of one input, their outputs side by side: parts of one matrix that are held in different formats."""

    __slots__ = ("num_outputs", "parts")

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = tuple(parts)
        self.num_outputs = sum(part.num_outputs for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, num_outputs]."""
        return torch.cat([part(x) for part in self.parts], -1)


class Gated:
    """act(gate) * up, the first half of a gated MLP; `gate_up` gives gate's outputs and then up's."""

    __slots__ = ("activation", "gate_up", "num_outputs")

    def __init__(self, gate_up: Product, activation: Activation) -> None:
        self.gate_up = gate_up
        self.activation = activation
        self.num_outputs = gate_up.num_outputs // 2

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, inner]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.activation(gate).mul_(up)


def linear(
    weights: Sequence[Matrix],
    biases: Sequence[Tensor] = (),
    *,
    dtype: torch.dtype = torch.float32,
    arithmetic: Arithmetic = Arithmetic.TORCH,
) -> Product:
    """The fastest product there is for the weights' device and format.

    Args:
        weights: [out_i, in] each; several make one product whose outputs are theirs one after the other.
        biases: [out_i] each, or none at all.
        dtype: of what is multiplied; quantised weights that torch multiplies are dequantised to it.
        arithmetic: what multiplies; but for TORCH, x is float32.
    """
    if arithmetic is not Arithmetic.TORCH:
        return _packed(weights, biases, arithmetic)
    plain = [weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight for weight in weights]
    weight = torch.cat(plain) if len(plain) > 1 else plain[0]
    bias = torch.cat(list(biases)) if biases else None
    if weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES and torch._C._has_mkldnn:
        return PackedLinear(weight, bias)
    return Linear(weight, bias)


def gated(
    weights: Sequence[Matrix],
    biases: Sequence[Tensor],
    activation: Activation,
    *,
    dtype: torch.dtype = torch.float32,
    arithmetic: Arithmetic = Arithmetic.TORCH,
) -> Product:
    """act(gate) * up, as one product.

    Args:
        weights: gate's and up's [inner, in], or one [2 inner, in] of both, gate first.
        biases: theirs, or none at all.
        activation: of the gate.
        dtype, arithmetic: as in `linear`.
    """
    if len(weights) == 1:
        inner = weights[0].shape[0] // 2
        weights = [weights[0].narrow(0, 0, inner), weights[0].narrow(0, inner, inner)]
    gate = GATES.get(activation)
    if arithmetic is Arithmetic.TORCH or gate is None or format_name(weights[0]) != format_name(weights[1]):
        return Gated(linear(weights, biases, dtype=dtype, arithmetic=arithmetic), activation)
    bias = torch.cat(list(biases)) if biases else None
    return PackedMatrix.pack(weights, bias, paired=True, gate=gate, mode=_mode(arithmetic))


def _packed(weights: Sequence[Matrix], biases: Sequence[Tensor], arithmetic: Arithmetic) -> Product:
    """One packed matrix, or, as one holds one format, one for each run of weights of the same."""
    bias = torch.cat(list(biases)) if biases else None
    made: list[Product] = []
    start = 0
    for _, run in itertools.groupby(weights, format_name):
        parts = list(run)
        size = sum(part.shape[0] for part in parts)
        own = None if bias is None else bias[start : start + size]
        made.append(PackedMatrix.pack(parts, own, mode=_mode(arithmetic)))
        start += size
    return made[0] if len(made) == 1 else Side(made)


def _mode(arithmetic: Arithmetic) -> Mode | None:
    """None: the format's own."""
    return Mode.EXACT if arithmetic is Arithmetic.EXACT else None
