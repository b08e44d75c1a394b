"""The noise of sampling: a pure function of (seed, absolute position, token id). Nothing is stored and nothing is drawn.

A token is chosen as argmax(score - log E), E standard exponential: the Gumbel-max trick. All arithmetic on integers wraps.

What it is for is told apart by a salt (`Noise`), 0 for the target's own samples: `seed ^ salt` stands where `seed` does below.

    64 bit   splitmix64(z):  z += 0x9E3779B97F4A7C15
                             z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB;  z ^ z >> 31
             key = splitmix64(splitmix64(seed) ^ (position * 0x9E3779B97F4A7C15))
             ka = key >> 32,  kb = key & 0xffffffff

    32 bit   h = (id * 0x9E3779B1) ^ ka
             h ^= h >> 16;  h *= 0x7FEB352D;  h ^= h >> 15;  h += kb
             h ^= h >> 16;  h *= 0x846CA68B;  h ^= h >> 16;  h *= 0x2C1B3C6D;  h ^= h >> 15

    float    u = (h + 1/2) * 2^-32, E = -log u:
             h <  2^31:  x = (float(h) + 1/2) * 2^-32,            E = -log x
             h >= 2^31:  x = (float(2^32 - 1 - h) + 1/2) * 2^-32, E = -log1p(-x)

float() rounds to the dtype of the scores (float32 or float64). The half keeps u inside (0, 1); log1p keeps E exact and above 0
where u is near 1: 2^-33 <= E <= 33 log 2. All shifts are logical.

torch has no unsigned arithmetic, so the same bits are computed in signed integers, which wrap alike; a logical shift is an
arithmetic one and a mask.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

GOLDEN_64 = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_64 = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
GOLDEN_32 = 0x9E3779B1
MIX_32 = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x2C1B3C6D)
SIGN_32 = -(1 << 31)


class Noise(IntEnum):
    """What noise is for: the salt of each use, the fractional parts of the square roots of 2, 3 and 5. Uses share nothing.

    TARGET: the target's own samples. DRAFT: what a drafter draws by itself. ACCEPT: whether that is accepted. RESIDUAL: what is
    said instead.
    """

    TARGET = 0
    DRAFT = 0x6A09E667F3BCC908
    ACCEPT = 0xBB67AE8584CAA73B - (1 << 64)
    RESIDUAL = 0x3C6EF372FE94F82B


def noise_keys(seeds: Tensor, positions: Tensor, noise: Noise = Noise.TARGET) -> tuple[Tensor, Tensor]:
    """Keys ka, kb [n] int32 of sampling at positions [n] int64 with seeds [n] int64."""
    if noise is not Noise.TARGET:
        seeds = seeds ^ int(noise)
    key = _splitmix64(_splitmix64(seeds) ^ (positions * GOLDEN_64))
    return _low32(key >> 32), _low32(key)


def noise_bits(ka: Tensor, kb: Tensor, id_bits: Tensor) -> Tensor:
    """The hash h, with its sign bit flipped so that signed order is the order of h: [n, C] int32.

    Args:
        ka, kb: [n] int32, from `noise_keys`.
        id_bits: [1 or n, C] int32, `id * GOLDEN_32` of each token id: from `all_id_bits`.
    """
    h = id_bits ^ ka[:, None]
    spare = torch.empty_like(h)
    _xor_shift(h, 16, spare)
    h *= MIX_32[0]
    _xor_shift(h, 15, spare)
    h += kb[:, None]
    _xor_shift(h, 16, spare)
    h *= MIX_32[1]
    _xor_shift(h, 16, spare)
    h *= MIX_32[2]
    _xor_shift(h, 15, spare)
    h ^= SIGN_32
    return h


def log_exponential(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """log E of `noise_bits`, in `dtype` (float32 or float64), shape kept. Monotone: more bits, smaller E (up to rounding)."""
    upper = bits >> 31  # of the flipped bits: 0 where h >= 2^31, -1 below
    distance = bits ^ upper  # non-negative; h is distance + 2^31 above, 2^31 - 1 - distance below
    distance ^= (1 << 31) - 1  # now 2^32 - 1 - h above, h below
    x = distance.to(dtype)
    x += 0.5
    x *= 2.0**-32
    e = torch.where(upper == 0, (-x).log1p_(), x.log())
    return e.neg_().log_()


def uniform(ka: Tensor, kb: Tensor) -> Tensor:
    """u of token 0, one number a key: [n] float64 inside (0, 1)."""
    h = noise_bits(ka, kb, torch.zeros((1, 1), dtype=torch.int32, device=ka.device))[:, 0]
    return (h.to(torch.float64) + (0.5 + 2.0**31)) * 2.0**-32


@lru_cache(maxsize=8)
def all_id_bits(vocab_size: int, device: torch.device) -> Tensor:
    """`id * GOLDEN_32` of every token id: [1, vocab_size] int32."""
    return _low32(torch.arange(vocab_size, device=device) * GOLDEN_32)[None]


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32. Spelled out: what a cast does beyond the range is not promised."""
    x = x & 0xFFFFFFFF
    return torch.where(x > 0x7FFFFFFF, x - (1 << 32), x).to(torch.int32)


def _splitmix64(z: Tensor) -> Tensor:
    z = z + GOLDEN_64
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * MIX_64[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * MIX_64[1]
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _xor_shift(h: Tensor, shift: int, spare: Tensor) -> None:
    torch.bitwise_right_shift(h, shift, out=spare)
    spare &= (1 << (32 - shift)) - 1
    h ^= spare
