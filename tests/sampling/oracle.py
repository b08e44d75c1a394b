"""The sampler written again from its description, one node at a time: numpy in float64, hashes in Python's integers.

Imports nothing of slipstream.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
M32, M64 = 2**32 - 1, 2**64 - 1


@dataclass
class Asked:
    """What one request asks for, in plain values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int = 0


def splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    key = splitmix64(splitmix64(seed & M64) ^ ((position * 0x9E3779B97F4A7C15) & M64))
    return key >> 32, key & M32


def noise_hash(seed: int, position: int, token: int) -> int:
    """The 32 random bits of one token at one position."""
    ka, kb = noise_keys(seed, position)
    h = ((token * 0x9E3779B1) & M32) ^ ka
    h ^= h >> 16
    h = (h * 0x7FEB352D) & M32
    h ^= h >> 15
    h = (h + kb) & M32
    h ^= h >> 16
    h = (h * 0x846CA68B) & M32
    h ^= h >> 16
    h = (h * 0x2C1B3C6D) & M32
    return h ^ (h >> 15)


def exponential(h: int, dtype: type = np.float64) -> np.floating:
    """E of a hash, every operation rounded to dtype."""
    half, scale = dtype(0.5), dtype(2.0**-32)
    if h < 2**31:
        return -np.log((dtype(h) + half) * scale)
    return -np.log1p(-(dtype(M32 - h) + half) * scale)


def gumbel(seed: int, position: int, vocab_size: int, dtype: type = np.float64) -> Array:
    """-log E of each token."""
    return np.array([-np.log(exponential(noise_hash(seed, position, token), dtype)) for token in range(vocab_size)])


def edited(
    logits: Array, asked: Asked, prompt: Sequence[int], output: Sequence[int], eos: Iterable[int], allowed: set[int] | None
) -> Array:
    """Masks, bias and penalties. `output`: everything behind the prompt, the path to this node included."""
    x = np.array(logits, dtype=np.float64)
    vocab = range(len(x))
    banned: set[int] = set()
    if allowed is not None:
        banned |= set(vocab) - allowed
    if asked.allowed_token_ids is not None:
        banned |= set(vocab) - set(asked.allowed_token_ids)
    tokens = [*prompt, *output]
    for word in asked.bad_words:
        start = list(word[:-1])
        if tokens[len(tokens) - len(start) :] == start:
            banned.add(word[-1])
    if len(output) < asked.min_tokens:
        banned |= set(asked.stop_token_ids)
        if not asked.ignore_eos:
            banned |= set(eos)
    for token in banned:
        x[token] = -math.inf
    for token, bias in asked.logit_bias.items():
        x[token] += bias
    for token in set(tokens):
        x[token] = x[token] / asked.repetition_penalty if x[token] > 0 else x[token] * asked.repetition_penalty
    for token in set(output):
        x[token] = x[token] - asked.frequency_penalty * list(output).count(token) - asked.presence_penalty
    return x


def truncated(x: Array, asked: Asked) -> Array:
    """Temperature, top_k, top_p, min_p of edited scores."""
    if asked.temperature == 0:
        return x
    x = x / asked.temperature
    if x.max() == -math.inf:
        return x
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    best = x[order[0]]
    if asked.top_k > 0:
        order = order[: asked.top_k]
    if asked.top_p < 1:
        weights = [math.exp(x[token] - best) for token in order]
        target = asked.top_p * math.fsum(weights)
        order = order[: bisect_left(range(1, len(order)), target, key=lambda n: math.fsum(weights[:n])) + 1]
    if asked.min_p > 0:
        order = [token for token in order if x[token] >= best + math.log(asked.min_p)]
    kept = np.full_like(x, -math.inf)
    kept[order] = x[order]
    return kept


def perturbed(scores: Array, asked: Asked, position: int) -> Array:
    """Final scores."""
    return scores if asked.temperature == 0 else scores + gumbel(asked.seed, position, len(scores))
