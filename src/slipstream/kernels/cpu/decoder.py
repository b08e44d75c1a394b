"""All layers of a decoder as one call, the ctypes side of csrc/decoder.h.

    Layer, Layer, ...  ──DecoderKernel──>  C decoder, once a model        forward(pass) ──>  one call a pass, without the GIL
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slipstream.errors import InvariantBroken, ModelError
from slipstream.kernels.cpu.attention import AttentionBatch, CacheTensors
from slipstream.kernels.cpu.library import Function, kernels
from slipstream.kernels.cpu.matrix import Gate, PackedMatrix
from slipstream.types import nothing

_POINTER, _INT, _LONG, _REAL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Norm(ctypes.Structure):
    """slip_norm."""

    _fields_ = (("weight", _POINTER), ("eps", _REAL), ("offset", _REAL))


class _Part(ctypes.Structure):
    """slip_part."""

    _fields_ = (("matrix", _POINTER), ("mode", _LONG))


class _Product(ctypes.Structure):
    """slip_product."""

    _fields_ = (("parts", _POINTER), ("num_parts", _INT), ("gate", _INT))


class _Layer(ctypes.Structure):
    """slip_layer."""

    _fields_ = (
        ("attention_norm", _Norm),
        ("after_attention", _Norm),
        ("mlp_norm", _Norm),
        ("after_mlp", _Norm),
        ("qkv", _Product),
        ("out", _Product),
        ("inner", _Product),
        ("down", _Product),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("head_eps", _REAL),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("head_dim", _INT),
        ("rotary", _INT),
        ("scale", _REAL),
        ("softcap", _REAL),
        ("window", _LONG),
    )


class _Turn(ctypes.Structure):
    """slip_turn."""

    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("count", _LONG), ("dim", _LONG))


class _Pass(ctypes.Structure):
    """slip_pass."""

    _fields_ = (
        ("batch", _POINTER),
        ("kv", _POINTER),
        ("turns", _POINTER),
        ("positions", _POINTER),
        ("residual", _POINTER),
        ("input", _POINTER),
        ("out", _POINTER),
        ("taps", _POINTER),
        ("states", _POINTER),
        ("num_taps", _LONG),
    )


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight; weight float32, dense."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Product:
    """The outputs of its parts side by side; with a gate the first half of them gates the second."""

    parts: tuple[PackedMatrix, ...]
    gate: Gate = Gate.NONE


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        attention_norm, mlp_norm: before the two halves, weights [hidden]. A first layer without the former reads what the pass
            brings.
        after_attention, after_mlp: behind them, or None.
        qkv: hidden (or the pass's input) -> queries, keys and values, head by head. out: back to the residual.
        inner: hidden -> what `down` brings back to the residual; its gate is one of its own or its matrix's.
        heads, kv_heads, head_dim: sizes.
        head_norms: of each query and each key head, weights [head_dim], with one eps; or None.
        rotary: which of the pass's turns; None: none.
        scale: of the scores. softcap, window: as in `AttentionStep.__call__`.
    """

    attention_norm: Norm | None
    after_attention: Norm | None
    mlp_norm: Norm
    after_mlp: Norm | None
    qkv: Product
    out: Product
    inner: Product
    down: Product
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: tuple[Norm, Norm] | None
    rotary: int | None
    scale: float
    softcap: float | None
    window: int | None


@cache
def _functions() -> tuple[Function, Function, Function]:
    """make, forward and free. Raises `ModelError` where there are no kernels."""
    library = kernels()
    if library is None:
        raise ModelError("a decoder in one call must have the CPU kernels, but they are off", hint="the log says why")
    return (
        library.bind("slip_decoder_make", _POINTER, _LONG, _LONG, _INT, _POINTER, _POINTER),
        library.bind("slip_decoder_forward", _POINTER, _POINTER),
        library.bind("slip_decoder_free", _POINTER),
    )


class DecoderKernel:
    """A decoder's layers and its final norm.

    Args:
        layers: in order.
        norm: the final one.
        num_rotaries: turns that a pass brings.

    Raises `InvariantBroken` for layers that do not fit together.
    """

    def __init__(self, layers: Sequence[Layer], norm: Norm, num_rotaries: int) -> None:
        self.hidden_size: int = norm.weight.shape[0]
        self.num_layers = len(layers)
        self._num_rotaries = num_rotaries
        self._layers = tuple(layers)  # hold what the structs point to
        self._norm = norm
        is_bare = bool(layers) and layers[0].attention_norm is None
        self._first_inputs = layers[0].qkv.parts[0].num_inputs if is_bare else None
        self._held: list[ctypes.Array[_Part]] = []
        array = (_Layer * len(layers))(*(self._layer(layer) for layer in layers))
        final = self._norm_struct(norm, self.hidden_size)
        made = ctypes.c_void_p()
        make, self._forward, free = _functions()
        make(
            ctypes.addressof(array), len(layers), self.hidden_size, num_rotaries, ctypes.addressof(final), ctypes.addressof(made)
        )
        self._address = made.value
        weakref.finalize(self, free, self._address).atexit = False

    def forward(
        self,
        residual: Tensor,
        batch: AttentionBatch,
        kv: CacheTensors,
        positions: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        taps: Sequence[int] = (),
        computes: Callable[[], None] = nothing,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """All layers and the final norm: [T, hidden] float32, and the residuals that enter the layers `taps` names (the number
        of layers: what leaves the last), side by side, [T, len(taps) * hidden]; None without taps.

        Args:
            residual: [T, hidden] float32, dense; changed.
            batch: the pass's tokens.
            kv: the cache of as many layers.
            positions: [T] int64, dense.
            turns: cos and sin of each rotary embedding at positions 0, 1, ..., [more than the last position, dim / 2] float32,
                dense.
            taps: see above.
            computes: called just before the call that takes long, without the GIL.
            first: what the first layer's qkv reads where that has no norm, [T, its inputs] float32, dense.

        Raises `InvariantBroken` for what does not fit.
        """
        num_tokens = batch.num_tokens
        _check("the residual", residual, (num_tokens, self.hidden_size))
        if len(kv.layers) != self.num_layers:
            raise InvariantBroken(f"the cache must have {self.num_layers} layers, but has {len(kv.layers)}")
        if len(turns) != self._num_rotaries:
            raise InvariantBroken(f"a pass must bring {self._num_rotaries} turns, but got {len(turns)}")
        for cos, sin in turns:
            _check("cosines", cos, tuple(cos.shape))
            _check("sines", sin, tuple(cos.shape))
        _check("positions", positions, (num_tokens,), torch.int64)
        if self._first_inputs != (None if first is None else first.shape[-1]):
            given = None if first is None else list(first.shape)
            raise InvariantBroken(f"the first layer's qkv must read {self._first_inputs or 'a norm'}, but got {given}")
        if first is not None:
            _check("what the first layer reads", first, (num_tokens, first.shape[-1]))
        out = torch.empty_like(residual)
        states = residual.new_empty((num_tokens, len(taps) * self.hidden_size)) if taps else None
        tapped = (_LONG * len(taps))(*taps)
        angles = (_Turn * len(turns))(*(_Turn(cos.data_ptr(), sin.data_ptr(), len(cos), 2 * cos.shape[-1]) for cos, sin in turns))
        whole = _Pass(
            batch.address,
            kv.address,
            ctypes.addressof(angles),
            positions.data_ptr(),
            residual.data_ptr(),
            None if first is None else first.data_ptr(),
            out.data_ptr(),
            ctypes.addressof(tapped),
            None if states is None else states.data_ptr(),
            len(taps),
        )
        computes()
        self._forward(self._address, ctypes.addressof(whole))
        return out, states

    def _layer(self, layer: Layer) -> _Layer:
        hidden, size = self.hidden_size, layer.head_dim
        query, key = layer.head_norms or (None, None)
        return _Layer(
            self._norm_struct(layer.attention_norm, hidden),
            self._norm_struct(layer.after_attention, hidden),
            self._norm_struct(layer.mlp_norm, hidden),
            self._norm_struct(layer.after_mlp, hidden),
            *(self._product_struct(product) for product in (layer.qkv, layer.out, layer.inner, layer.down)),
            self._norm_struct(query, size).weight,
            self._norm_struct(key, size).weight,
            0.0 if query is None else query.eps,
            layer.heads,
            layer.kv_heads,
            size,
            -1 if layer.rotary is None else layer.rotary,
            layer.scale,
            layer.softcap or 0.0,
            layer.window or 0,
        )

    def _norm_struct(self, norm: Norm | None, size: int) -> _Norm:
        if norm is None:
            return _Norm(None, 0.0, 0.0)
        _check("a norm's weight", norm.weight, (size,))
        return _Norm(norm.weight.data_ptr(), norm.eps, 0.0)

    def _product_struct(self, product: Product) -> _Product:
        parts = (_Part * len(product.parts))(*(_Part(part.address, part.mode) for part in product.parts))
        self._held.append(parts)
        return _Product(ctypes.addressof(parts), len(parts), product.gate)


def _check(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    fits = tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.device.type == "cpu"
    if not fits or not tensor.is_contiguous():
        name = str(dtype).removeprefix("torch.")
        given = f"{tensor.dtype} {list(tensor.shape)} of strides {tensor.stride()} on {tensor.device}"
        raise InvariantBroken(f"{what} must be dense {name} {list(shape)} on the CPU, but got {given}")
