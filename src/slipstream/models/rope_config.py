"""Reads the rotary embedding out of a configuration, in every spelling. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError, shown
from slipstream.layers.rope import ROPE_KINDS, RopeSpec
from slipstream.models.reader import Reader

# What a type's base is where its configuration does not say; the others' is 10,000.
_DEFAULT_THETA = {"gemma3_text": 1e6, "smollm3": 2e6}
# Types whose max_position_embeddings is the stretched length already, whatever the kind of scaling.
_STATES_STRETCHED_LEN = frozenset({"gemma3_text"})
_MAX_FACTOR = 1_000_000


def parse_ropes(raw: Mapping[str, Any], max_positions: int, source: str) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotary embedding, and that of windowed layers where a configuration has another one for them.

    Spellings: `rope_theta` + `rope_scaling`, or `rope_parameters`, which may hold an object for each kind of layer;
    `rope_local_base_freq` for the windowed layers; `type` or `rope_type`. Raises `ModelError`.
    """
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{source}: rope_scaling must be an object, but got {shown(given)}")
    local = None
    if any(isinstance(value, Mapping) for value in given.values()):
        full, sliding = given.get("full_attention") or {}, given.get("sliding_attention")
        local = None if sliding is None else _parse(raw, sliding, max_positions, f"{source}: sliding_attention rope")
        given = full
    elif raw.get("rope_local_base_freq") is not None:
        local = RopeSpec(Reader(raw, source).number("rope_local_base_freq"))
    return _parse(raw, given, max_positions, f"{source}: rope"), local


def context_limit(rope: RopeSpec, max_positions: int, model_type: str) -> int:
    """Most positions, scaling included.

    Linear and YaRN scaling stretch what the model knew before, dynamic scaling what it says it knows, by the factor. Other
    kinds state their stretched length themselves, and so do some types.
    """
    if rope.kind in ("linear", "yarn", "dynamic") and model_type not in _STATES_STRETCHED_LEN:
        return int(rope.original_context_len * rope.factor)
    return max_positions


def _parse(raw: Mapping[str, Any], given: object, max_positions: int, source: str) -> RopeSpec:
    if not isinstance(given, Mapping):
        raise ModelError(f"{source} must be an object, but got {shown(given)}")
    outer = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None}
    read = Reader({**outer, **given}, source)
    theta = read.number("rope_theta", _DEFAULT_THETA.get(str(raw.get("model_type")), 10000.0))
    if not theta > 0:
        raise read.wrong("rope_theta", "be above 0", theta)
    share = read.number("partial_rotary_factor", 1.0)
    if not 0 < share <= 1:
        raise read.wrong("partial_rotary_factor", "be above 0 and at most 1", share)
    divisors = tuple(raw.get("rope_frequency_factors", ()))
    kind = read.text("rope_type", read.text("type", "default"))
    if kind == "default":
        return RopeSpec(theta, frequency_factors=divisors, rotary_share=share)
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"{source} scaling must be one of {', '.join(ROPE_KINDS)}, but got {shown(kind)}",
            hint="other kinds are not supported yet",
        )
    inside, outside = given.get("original_max_position_embeddings"), raw.get("original_max_position_embeddings")
    original = max_positions
    if kind != "dynamic" and (inside is not None or outside is not None):
        # Beside the scaling it is a type's own statement and wins; dynamic scaling starts from what the model knows now.
        original = Reader({"original_max_position_embeddings": inside if outside is None else outside}, source).count(
            "original_max_position_embeddings"
        )
    # These two may leave the factor to the two lengths.
    ratio = max_positions / original if kind in ("yarn", "longrope") and original != max_positions else None
    factor = read.number("factor", ratio)
    if not 1 <= factor <= _MAX_FACTOR:
        raise read.wrong("factor", f"be at least 1 and at most {_MAX_FACTOR}", factor)
    if kind == "yarn" and not theta > 1:
        raise read.wrong("rope_theta", "be above 1 with yarn", theta)
    low, high = read.number("low_freq_factor", 1.0), read.number("high_freq_factor", 4.0)
    if kind == "llama3" and not 0 < low < high:
        raise read.wrong("high_freq_factor", f"be above low_freq_factor ({low:g}), both above 0", high)
    if kind == "longrope":
        divisors = _short_factors(read, given)
    truncate = read.flag("truncate")
    return RopeSpec(
        theta,
        kind,
        factor,
        original,
        low,
        high,
        divisors,
        share,
        _attention_factor(kind, read, factor, original),
        read.positive("beta_fast") or 32.0,
        read.positive("beta_slow") or 1.0,
        True if truncate is None else truncate,
    )


def _short_factors(read: Reader, given: Mapping[str, Any]) -> tuple[float, ...]:
    factors = given.get("short_factor")
    if not isinstance(factors, list) or not all(isinstance(one, (int, float)) for one in factors):
        raise read.wrong("short_factor", "be a list of numbers", factors)
    return tuple(float(one) for one in factors)


def _attention_factor(kind: str, read: Reader, factor: float, original: int) -> float:
    """What cos and sin are multiplied by: longer contexts make attention flatter, this makes up for it."""
    stated = read.positive("attention_factor")
    if stated is not None and kind in ("yarn", "longrope"):
        return stated
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else 1.0
    if kind != "yarn":
        return 1.0

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0  # factor is at least 1

    over, under = read.positive("mscale"), read.positive("mscale_all_dim")
    return mscale(over) / mscale(under) if over and under else mscale(1.0)
