"""A weight matrix in the panels that csrc/matmul.h draws, and its product with rows of float32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import InvariantBroken, ModelError
from slipstream.kernels.cpu.library import Function, kernels
from slipstream.kernels.cpu.memory import ARENA
from slipstream.kernels.formats import Format, QuantizedTensor

_PANEL = 32
_GROUP = 32
_SLICE_BYTES = 8 << 20  # of a part, packed at once: bounds what lies between source and panels

_CODES = {Format.F32: 0, Format.BF16: 1, Format.Q8: 2, Format.Q4: 3, Format.Q4K: 4, Format.Q6K: 5, Format.Q5: 6}
_PLAIN = {torch.float32: Format.F32, torch.bfloat16: Format.BF16}

Part = Tensor | QuantizedTensor


class Mode(IntEnum):
    """How a product computes.

    EXACT: float32 sums of float32 weights (dequantised on the way) and activations, for any format.
    BFLOAT16: bfloat16 weights times activations rounded to bfloat16, float32 sums.
    QUANTIZED: integer weights times activations rounded to int8 with a scale for each 32, float32 sums of the groups' products.
    """

    EXACT = 0
    BFLOAT16 = 1
    QUANTIZED = 2


class Gate(IntEnum):
    """Activation of a paired matrix's gate."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


class _Struct(ctypes.Structure):
    """slip_matrix of csrc/matmul.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("paired", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class PackedMatrix:
    """y = x W^T + b, or activation(x G^T) * (x U^T) for a paired matrix. A row's result depends on that row alone, bit for bit.

    Attributes:
        format: of the weight.
        mode: how it computes.
        num_inputs, num_outputs: of the product.
        num_bytes: that the panels take.
        address: of the C struct, valid as long as this object lives.
    """

    __slots__ = (
        "_bias", "_call", "_norm_call", "_panels", "_rows_call", "_struct",
        "address", "format", "mode", "num_inputs", "num_outputs",
    )  # fmt: skip

    def __init__(self, form: Format, mode: Mode, struct: _Struct, panels: Tensor, bias: Tensor | None) -> None:
        """For `pack`."""
        self.format = form
        self.mode = mode
        self.num_outputs: int = struct.outputs
        self.num_inputs: int = struct.inputs
        self._struct, self._panels, self._bias = struct, panels, bias  # the struct points into both
        self.address = ctypes.addressof(struct)
        self._call, self._norm_call, self._rows_call = _functions()

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels, padding included."""
        return self._panels.numel()

    @staticmethod
    @torch.inference_mode()  # the arena's memory may come from within it
    def pack(
        parts: Sequence[Part],
        bias: Tensor | None = None,
        *,
        paired: bool = False,
        gate: Gate = Gate.NONE,
        mode: Mode | None = None,
    ) -> PackedMatrix:
        """Copy weights into panels; the parts are not kept.

        Args:
            parts: [out_i, in] each, all of one format: float32 or bfloat16 tensors, or `QuantizedTensor`s; their outputs are
                one after the other. For `paired` exactly two of the same shape, gate and up.
            bias: [sum of out_i], in the parts' order.
            paired: whether the product is activation(gate) * up, with half as many outputs as the parts have rows.
            gate: the activation of that.
            mode: EXACT, or None for the format's own.

        Raises `InvariantBroken` for parts that do not fit together, `ModelError` where the kernels are not there.
        """
        form, inputs = _common(parts)
        rows = [part.shape[0] for part in parts]
        if paired and (len(parts) != 2 or rows[0] != rows[1]):
            raise InvariantBroken(f"a paired matrix must have two parts with as many outputs each, but got {rows}")
        if not paired and gate is not Gate.NONE:
            raise InvariantBroken(f"a matrix that is not paired must have no activation, but got {gate.name}")
        if bias is not None and tuple(bias.shape) != (sum(rows),):
            raise InvariantBroken(f"the bias must have {sum(rows)} values, but got {list(bias.shape)}")
        own = {Format.F32: Mode.EXACT, Format.BF16: Mode.BFLOAT16}.get(form, Mode.QUANTIZED)
        if mode not in (None, own, Mode.EXACT):
            raise InvariantBroken(f"a {form} matrix must be computed {own.name} or EXACT, but got {mode}")

        height = _PANEL // 2 if paired else _PANEL
        total = rows[0] if paired else sum(rows)
        num_panels = -(-total // height)
        panels = ARENA.take(num_panels * _panel_bytes(form, inputs)).view(num_panels, -1)
        step = max(1, _SLICE_BYTES // (_PANEL * inputs * 4))
        for first in range(0, num_panels, step):
            count = min(step, num_panels - first)
            chosen = _rows(parts, first * height, count * height, paired=paired)
            _FILLERS[form](panels[first : first + count], chosen, inputs)

        padded = None
        if bias is not None:
            values = torch.split(bias.detach().to(torch.float32), rows)
            padded = _fit(list(values), 0, num_panels * height, paired=paired).contiguous()
        struct = _Struct(_CODES[form], int(gate), int(paired), 0, total, inputs, panels.data_ptr(), _address(padded))
        return PackedMatrix(form, own if mode is None else mode, struct, panels, padded)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, num_inputs] -> float32 [T, num_outputs]. Raises `InvariantBroken` for another type or width."""
        x = self._rows(x)
        out = torch.empty((x.shape[0], self.num_outputs))
        self._call(self.address, self.mode, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), self.num_outputs, 0)
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the product of x, float32 [T, num_inputs], to out, float32 [T, num_outputs] contiguous."""
        x = self._rows(x)
        if out.dtype != torch.float32 or out.shape != (x.shape[0], self.num_outputs) or not out.is_contiguous():
            expected = f"contiguous float32 [{x.shape[0]}, {self.num_outputs}]"
            raise InvariantBroken(f"the sum must be {expected}, but got {out.dtype} {list(out.shape)} of strides {out.stride()}")
        self._call(self.address, self.mode, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), self.num_outputs, 1)

    def of_norm(self, x: Tensor, weight: Tensor, eps: float, *, adds_one: bool = False) -> Tensor:
        """The product of RMSNorm(x), which is not written anywhere: float32 [T, num_inputs] -> float32 [T, num_outputs].

        Args:
            x: as for a call.
            weight: float32 [num_inputs], contiguous.
            eps: of the norm.
            adds_one: whether the norm's factor is weight + 1.
        """
        x = self._rows(x)
        if weight.dtype != torch.float32 or weight.shape != (self.num_inputs,) or not weight.is_contiguous():
            raise InvariantBroken(f"a norm's weight must be contiguous float32 [{self.num_inputs}], but got {list(weight.shape)}")
        out = torch.empty((x.shape[0], self.num_outputs))
        self._norm_call(
            self.address,
            self.mode,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            weight.data_ptr(),
            eps,
            float(adds_one),
            out.data_ptr(),
            self.num_outputs,
            0,
        )
        return out

    def weight_rows(self, which: Tensor) -> Tensor:
        """Rows of the weight, [n] int64 -> float32 [n, num_inputs], each value as it is dequantised.

        Raises `InvariantBroken` for ids that are not int64, side by side, or of the matrix, and for a paired matrix.
        """
        if which.dtype != torch.int64 or which.dim() != 1 or not which.is_contiguous() or which.device.type != "cpu":
            given = f"{which.dtype} {list(which.shape)} on {which.device}"
            raise InvariantBroken(f"ids of rows must be dense int64 [n] on the CPU, but got {given}")
        out = torch.empty((which.shape[0], self.num_inputs))
        self._rows_call(self.address, which.data_ptr(), which.shape[0], out.data_ptr())
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """x, or a copy of it where its values do not lie side by side."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.num_inputs or x.device.type != "cpu":
            given = f"{x.dtype} {list(x.shape)} on {x.device}"
            raise InvariantBroken(f"rows must be float32 [T, {self.num_inputs}] on the CPU, but got {given}")
        return x if x.stride(1) == 1 and x.stride(0) >= self.num_inputs else x.contiguous()


def _functions() -> tuple[Function, Function, Function]:
    """slip_matmul, slip_norm_matmul and slip_matrix_rows."""
    library = kernels()
    if library is None:
        raise ModelError("a packed matrix must have the CPU kernels, but they are off", hint="the log says why")
    pointer, number, size, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
    rows = (pointer, size, size)
    return (
        library.bind("slip_matmul", pointer, number, *rows, pointer, size, number),
        library.bind("slip_norm_matmul", pointer, number, *rows, pointer, real, real, pointer, size, number),
        library.bind("slip_matrix_rows", pointer, pointer, size, pointer),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _common(parts: Sequence[Part]) -> tuple[Format, int]:
    """The parts' format and inputs."""
    found: set[tuple[Any, int]] = set()
    for part in parts:
        if isinstance(part, QuantizedTensor):
            found.add((part.format, part.shape[1]))
        elif part.dim() == 2 and part.dtype in _PLAIN:
            found.add((_PLAIN[part.dtype], part.shape[1]))
        else:
            found.add((part.dtype, part.shape[-1]))
    if len(found) != 1 or not isinstance((first := next(iter(found)))[0], Format):
        given = sorted(f"{kind} of {inputs} inputs" for kind, inputs in found)
        raise InvariantBroken(f"parts must be matrices of one format with as many inputs, but got {given}")
    if first[1] < 1 or any(part.shape[0] < 1 for part in parts):
        raise InvariantBroken(f"parts must not be empty, but got shapes {[tuple(part.shape) for part in parts]}")
    return first


def _panel_bytes(form: Format, inputs: int) -> int:
    """As slip_panel_bytes() of csrc/matmul.h."""
    groups = -(-inputs // _GROUP)
    if form is Format.F32:
        return 128 * inputs
    if form is Format.BF16:
        return 64 * -(-inputs // 8) * 8
    return {Format.Q8: 1088, Format.Q4: 640, Format.Q4K: 768, Format.Q5: 704, Format.Q6K: 1024}[form] * groups


def _rows(parts: Sequence[Part], start: int, count: int, *, paired: bool) -> list[Tensor]:
    """What the panels of outputs [start, start + count) hold: of plain parts the values, else codes, scales and mins; each
    [rows of the panels, ...] and filled up with zeros.
    """
    plain = [part.detach() for part in parts if isinstance(part, Tensor)]
    if plain:
        return [_fit(plain, start, count, paired=paired)]
    whole = [part for part in parts if isinstance(part, QuantizedTensor)]
    fields = [[part.codes for part in whole], [part.scales for part in whole]]
    if mins := [part.mins for part in whole if part.mins is not None]:
        fields.append(mins)
    return [_fit(field, start, count, paired=paired) for field in fields]


def _fit(tensors: Sequence[Tensor], start: int, count: int, *, paired: bool) -> Tensor:
    """Rows [start, start + count) of the tensors one after the other, or of both, 16 by 16 in turn, where paired."""
    if paired:
        pieces = [_fit([one], start, count, paired=False).view(-1, _PANEL // 2, *one.shape[1:]) for one in tensors]
        return torch.stack(pieces, dim=1).flatten(0, 2)
    pieces, before = [], 0
    for one in tensors:
        low, high = max(start - before, 0), min(start + count - before, one.shape[0])
        if low < high:
            pieces.append(one[low:high])
        before += one.shape[0]
    missing = count - sum(piece.shape[0] for piece in pieces)
    if missing:
        pieces.append(tensors[0].new_zeros((missing, *tensors[0].shape[1:])))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _fill_f32(panels: Tensor, fields: list[Tensor], inputs: int) -> None:
    panels.view(torch.float32).view(-1, inputs, _PANEL).copy_(fields[0].view(-1, _PANEL, inputs).transpose(1, 2))


def _fill_bf16(panels: Tensor, fields: list[Tensor], inputs: int) -> None:
    pairs = -(-inputs // 8) * 4
    values = torch.nn.functional.pad(fields[0], (0, 2 * pairs - inputs)).contiguous().view(torch.int32)
    panels.view(torch.int32).view(-1, pairs, 2, 16).copy_(values.view(-1, 2, 16, pairs).permute(0, 3, 1, 2))


def _fill_bytes(panels: Tensor, fields: list[Tensor], inputs: int) -> None:
    """q8."""
    codes, scales = fields
    groups = -(-inputs // _GROUP)
    records = panels.view(panels.shape[0], groups, -1)
    codes = torch.nn.functional.pad(codes, (0, groups * _GROUP - inputs)).contiguous()
    fours = codes.bitwise_xor(-128).view(torch.int32)  # + 128, as unsigned
    target = records[:, :, : _PANEL * _GROUP].view(torch.int32).view(-1, groups, 8, 2, 16)
    target.copy_(fours.view(-1, 2, 16, groups, 8).permute(0, 3, 4, 1, 2))
    _fill_scales(records[:, :, _PANEL * _GROUP :], scales)


def _fill_planes(panels: Tensor, fields: list[Tensor], inputs: int) -> None:
    """q5 and q6k: four bits as `_fill_nibbles` has them, the further ones in planes."""
    codes, scales = fields
    groups = -(-inputs // _GROUP)
    records = panels.view(panels.shape[0], groups, -1)
    num_planes = 2 if scales.dtype == torch.float32 else 1
    codes = torch.nn.functional.pad(codes, (0, groups * _GROUP - inputs)).view(torch.uint8) + (8 << num_planes)
    _fill_low_bits(records, codes & 15)
    plane_bytes = _PANEL * _GROUP // 8
    for plane in range(num_planes):
        bits = (codes >> (4 + plane) & 1).view(-1, 2, 16, groups, 8, 4).permute(0, 3, 4, 1, 2, 5)
        bits = bits.reshape(-1, groups, plane_bytes, 8)
        packed = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
        records[:, :, 16 * _GROUP + plane * plane_bytes :][:, :, :plane_bytes].copy_(packed)
    _fill_scales(records[:, :, 16 * _GROUP + num_planes * plane_bytes :], scales)


def _fill_nibbles(panels: Tensor, fields: list[Tensor], inputs: int) -> None:
    """q4 and q4k."""
    codes, scales, mins = fields
    groups = inputs // _GROUP
    records = panels.view(panels.shape[0], groups, -1)
    _fill_low_bits(records, torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1))
    tail = records[:, :, 16 * _GROUP :]
    half = tail.shape[2] // 2
    _fill_scales(tail[:, :, :half], scales)
    _fill_scales(tail[:, :, half:], mins)


def _fill_low_bits(records: Tensor, codes: Tensor) -> None:
    """Codes 0 to 15, uint8 [rows, groups * 32]: outputs 0-15 of a panel in the low four bits, 16-31 in the high ones."""
    groups = records.shape[1]
    single = codes.view(-1, 2, 16 * groups * _GROUP)
    fours = (single[:, 0] | single[:, 1] << 4).view(torch.int32)
    target = records[:, :, : 16 * _GROUP].view(torch.int32).view(-1, groups, 8, 16)
    target.copy_(fours.view(-1, 16, groups, 8).permute(0, 2, 3, 1))


def _fill_scales(target: Tensor, scales: Tensor) -> None:
    """Scales [rows, n] into [panels, groups, bytes]: those of a group's parts one after the other, 32 outputs each."""
    groups = target.shape[1]
    parts = -(-scales.shape[1] // groups)
    scales = torch.nn.functional.pad(scales, (0, groups * parts - scales.shape[1]))
    placed, by_part = target.view(scales.dtype), scales.view(-1, _PANEL, groups, parts)
    for part in range(parts):
        placed[:, :, part * _PANEL : (part + 1) * _PANEL].copy_(by_part[..., part].transpose(1, 2))


_FILLERS = {
    Format.F32: _fill_f32,
    Format.BF16: _fill_bf16,
    Format.Q8: _fill_bytes,
    Format.Q5: _fill_planes,
    Format.Q6K: _fill_planes,
    Format.Q4: _fill_nibbles,
    Format.Q4K: _fill_nibbles,
}
