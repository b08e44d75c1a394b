"""GGUF's quantised blocks as `QuantizedTensor`s, without loss: the same codes, scales and minimums, sorted apart.

    Q8_0   | d f16 | 32 int8 |                                                value = d q
    Q4_0   | d f16 | 16 bytes |                                               value = d (q - 8)
    Q4_1   | d f16 | m f16 | 16 bytes |                                       value = d q + m
    Q5_0   | d f16 | 32 high bits | 16 bytes |                                value = d (q - 16)
    Q4_K   | d f16 | m f16 | 8 scales and 8 minimums of 6 bits | 128 bytes |   value = (d s) q - (m t)    256 a block, 32 a group
    Q6_K   | 128 bytes | 64 bytes | 16 scales int8 | d f16 |                  value = (d s) (q - 32)     256 a block, 16 a group

    16 bytes of 32 elements   byte i: element i low, i + 16 high
    128 bytes of Q4_K         four runs of 32 bytes; run j, byte i: element 64 j + i low, 64 j + 32 + i high
    Q6_K, each half of 128    low four bits: 64 bytes, byte i: element i low, 64 + i high
                              high two bits: 32 bytes, byte i: elements i, 32 + i, 64 + i, 96 + i from the lowest bits up
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from slipstream.kernels.formats import Format, QuantizedTensor

# Elements unpacked at once: what lies between a block's bytes and its codes stays small, and in the cache.
_CHUNK = 1 << 19

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, minimums: a row each block, not yet in their matrix's shape


def unpack(kind: GGMLQuantizationType, raw: Tensor, shape: tuple[int, int]) -> QuantizedTensor | None:
    """A tensor's bytes as a quantised matrix; None for a type that is not kept, and for Q4_0 whose minimums float16 cannot hold.

    Args:
        kind: its type.
        raw: uint8, all its bytes in order; may be the file's pages, nothing of the result shares them.
        shape: (out, in).
    """
    if kind not in _KEPT:
        return None
    form, unpacker = _KEPT[kind]
    out, inputs = shape
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, block_bytes)
    groups = block // form.group
    code_dtype = torch.uint8 if form.has_mins else torch.int8
    codes = torch.empty((len(blocks), block // 2 if form.has_mins else block), dtype=code_dtype)
    scales = torch.empty((len(blocks), groups), dtype=form.scale_dtype)
    mins = torch.empty_like(scales) if form.has_mins else None
    step = max(1, _CHUNK // block)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        codes[part], scales[part], some = unpacker(blocks[part])
        if mins is not None and some is not None:
            mins[part] = some
    if kind == GGMLQuantizationType.Q4_0 and mins is not None and not bool(mins.isfinite().all()):
        return None
    per_row = inputs // form.group
    return QuantizedTensor(
        form, shape, codes.view(out, -1), scales.view(out, per_row), None if mins is None else mins.view(out, per_row)
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """Bytes [..., n] -> codes [..., 2 n] in the order of elements: the low four bits of all, then the high ones of all."""
    return torch.cat((data & 15, data >> 4), -1)


def _paired(codes: Tensor) -> Tensor:
    """Codes 0 to 15 [..., n] -> bytes [..., n / 2], element 2j in the low four bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Parts:
    scales = _half(blocks, 0)
    return _paired(_nibbles(blocks[:, 2:])), scales, scales * -8  # by a power of two: no rounding


def _q4_1(blocks: Tensor) -> Parts:
    return _paired(_nibbles(blocks[:, 4:])), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    bits = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)).view(-1, 32) & 1
    codes = _nibbles(blocks[:, 6:]) | (bits << 4)
    return codes.to(torch.int8) - 16, _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> Parts:
    # Twelve bytes hold eight scales s and minimums t: the low six bits of bytes 0 to 3 are s 0 to 3, those of 4 to 7 t 0 to 3;
    # bytes 8 to 11 hold the low four bits of s and t 4 to 7, whose high two are the high bits of the bytes before.
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1).to(torch.float32)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1).to(torch.float32)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    d, m = _half(blocks, 0).to(torch.float32), _half(blocks, 2).to(torch.float32)
    return _paired(codes), d * scales, -(m * mins)


def _q6_k(blocks: Tensor) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = torch.cat([(blocks[:, 128:192].reshape(-1, 2, 32) >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (low | (high << 4)).view(-1, 256).to(torch.int8) - 32
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return codes, _half(blocks, 208).to(torch.float32) * scales, None


_KEPT: dict[GGMLQuantizationType, tuple[Format, Callable[[Tensor], Parts]]] = {
    GGMLQuantizationType.Q8_0: (Format.Q8, _q8_0),
    GGMLQuantizationType.Q5_0: (Format.Q5, _q5_0),
    GGMLQuantizationType.Q4_0: (Format.Q4, _q4_0),
    GGMLQuantizationType.Q4_1: (Format.Q4, _q4_1),
    GGMLQuantizationType.Q4_K: (Format.Q4K, _q4_k),
    GGMLQuantizationType.Q6_K: (Format.Q6K, _q6_k),
}
