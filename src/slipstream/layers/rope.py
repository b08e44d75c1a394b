"""How a checkpoint describes its rotary embedding. Imports no torch: the front process reads it too."""

from __future__ import annotations

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding as a checkpoint describes it.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: one of `ROPE_KINDS`.
        factor: how much longer the context became; 1 without scaling.
        original_context_len: positions the model knew before scaling.
        low_freq_factor, high_freq_factor: llama3: frequencies between them are interpolated.
        frequency_factors: divisors, one for each pair of dimensions, where a file lists them itself; applied before `kind`.
        rotary_share: share of a head's dimensions that turn, the first ones.
        attention_factor: what cos and sin are multiplied by.
        beta_fast, beta_slow: yarn: turns within the original context above and below which a frequency is kept or stretched.
        truncate: yarn: whether these bounds are rounded outwards to whole dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    frequency_factors: tuple[float, ...] = ()
    rotary_share: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
