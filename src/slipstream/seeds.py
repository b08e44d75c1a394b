"""Integer hashing for seeds, in plain Python: the front draws and derives seeds without importing torch."""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """One step of splitmix64: mixes `value` (taken mod 2**64) into an unsigned 64-bit integer."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def seed_i(seed: int, index: int) -> int:
    """Seed of answer `index` of a request seeded with `seed`, as a signed 64-bit integer; answer 0 keeps the seed itself."""
    return signed64(seed) if index == 0 else signed64(splitmix64(seed ^ splitmix64(index)))


def draw_seed() -> int:
    """A fresh signed 64-bit seed for a request that brought none."""
    return signed64(secrets.randbits(64))


def signed64(value: int) -> int:
    """`value` mod 2**64 as a signed 64-bit integer."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
