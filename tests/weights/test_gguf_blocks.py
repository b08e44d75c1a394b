"""Each kept GGUF type against an independent decode of the same bytes: the gguf library's, and the bit layouts written again."""

from __future__ import annotations

import struct
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from slipstream.kernels.formats import Format
from slipstream.weights.gguf_blocks import unpack
from slipstream.weights.held import KEPT

FORMATS = {
    Kind.Q8_0: Format.Q8, Kind.Q5_0: Format.Q5, Kind.Q4_0: Format.Q4, Kind.Q4_1: Format.Q4,
    Kind.Q4_K: Format.Q4K, Kind.Q6_K: Format.Q6K,
}  # fmt: skip
# Where the float16 numbers of a block lie: random bits there would be NaN, or so large that they overflow.
HALVES = {Kind.Q8_0: (0,), Kind.Q5_0: (0,), Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}


def random_bytes(kind: Kind, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Every pattern of bits a block may hold, scales between 2^-10 and 2 of both signs."""
    made = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = made.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        values = (np.exp2(made.uniform(-10, 1, len(blocks))) * made.choice([-1, 1], len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks


def f16(block: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, at)[0])


def q8_0(b: bytes) -> list[np.float32]:
    return [f16(b, 0) * np.float32(q) for q in struct.unpack_from("<32b", b, 2)]


def q4_0(b: bytes) -> list[np.float32]:
    return [f16(b, 0) * np.float32((b[2 + i % 16] >> (4 * (i // 16)) & 15) - 8) for i in range(32)]


def q4_1(b: bytes) -> list[np.float32]:
    return [f16(b, 0) * np.float32(b[4 + i % 16] >> (4 * (i // 16)) & 15) + f16(b, 2) for i in range(32)]


def q5_0(b: bytes) -> list[np.float32]:
    (high,) = struct.unpack_from("<I", b, 2)
    codes = [(b[6 + i % 16] >> (4 * (i // 16)) & 15) | (high >> i & 1) << 4 for i in range(32)]
    return [f16(b, 0) * np.float32(code - 16) for code in codes]


def q4_k(b: bytes) -> list[np.float32]:
    packed, out = b[4:16], []
    for i in range(256):
        j = i // 32
        if j < 4:
            scale, least = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            least = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        code = b[16 + 32 * (i // 64) + i % 32] >> (4 * (j % 2)) & 15
        out.append(f16(b, 0) * np.float32(scale) * np.float32(code) - f16(b, 2) * np.float32(least))
    return out


def q6_k(b: bytes) -> list[np.float32]:
    out, scales = [], struct.unpack_from("<16b", b, 192)
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, lane = divmod(within, 32)
        low = b[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
        high = b[128 + 32 * half + lane] >> (2 * quarter) & 3
        out.append(f16(b, 208) * np.float32(scales[i // 16]) * np.float32((low | high << 4) - 32))
    return out


DECODERS: dict[Kind, Callable[[bytes], list[np.float32]]] = {
    Kind.Q8_0: q8_0, Kind.Q4_0: q4_0, Kind.Q4_1: q4_1, Kind.Q5_0: q5_0, Kind.Q4_K: q4_k, Kind.Q6_K: q6_k,
}  # fmt: skip


def test_every_kept_type_is_tested() -> None:
    assert {kind.name: str(form) for kind, form in FORMATS.items()} == KEPT
    assert set(DECODERS) == set(FORMATS) == set(HALVES)


@pytest.mark.parametrize("kind", FORMATS)
def test_against_the_library_to_the_bit(kind: Kind) -> None:
    """More blocks than are unpacked at once."""
    shape = (1100, 512)
    raw = random_bytes(kind, shape)
    matrix = unpack(kind, torch.from_numpy(raw.reshape(-1)), shape)
    assert matrix is not None and matrix.format is FORMATS[kind] and matrix.shape == shape
    expected = gguf.dequantize(raw.reshape(shape[0], -1), kind)
    assert np.array_equal(matrix.dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_against_the_layout_written_again(kind: Kind) -> None:
    shape = (3, 256)
    raw = random_bytes(kind, shape, seed=1)
    matrix = unpack(kind, torch.from_numpy(raw.reshape(-1)), shape)
    assert matrix is not None
    expected = np.array([value for block in raw for value in DECODERS[kind](block.tobytes())], np.float32).reshape(shape)
    assert np.array_equal(matrix.dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_shares_the_files_memory(kind: Kind) -> None:
    raw = random_bytes(kind, (2, 256))
    matrix = unpack(kind, torch.from_numpy(raw.reshape(-1)), (2, 256))
    assert matrix is not None
    before = matrix.dequantize()
    raw[:] = 0
    assert torch.equal(matrix.dequantize(), before)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in FORMATS and kind.name in ("Q5_1", "Q5_K", "Q3_K", "F16")])
def test_other_types_are_not_kept(kind: Kind) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    assert unpack(kind, torch.zeros(256 // block * size, dtype=torch.uint8), (1, 256)) is None


def test_a_minimum_beyond_float16_is_not_kept() -> None:
    """Q4_0 has none of its own; ours is -8 times its scale."""
    raw = random_bytes(Kind.Q4_0, (2, 32))
    raw[1, :2] = np.array([9000], np.float16).view(np.uint8)
    assert unpack(Kind.Q4_0, torch.from_numpy(raw.reshape(-1)), (2, 32)) is None
