"""A checkpoint's configuration, typed and checked. Imports no torch: the front process reads it too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ModelError, shown
from slipstream.layers.rope import ROPE_KINDS, RopeSpec

# A key that only such a model has -> what to call it. Checked before anything else, so that the message names the real reason.
_REFUSED_KEYS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), "mixture-of-experts models"),
    (("kv_lora_rank",), "models with multi-head latent attention (MLA)"),
    (("vision_config", "vision_tower", "mm_vision_tower"), "vision models"),
    (("audio_config",), "audio models"),
    (("quantization_config",), "quantised safetensors checkpoints"),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder is made of.

    Attributes:
        model_type: architecture name; the file in `slipstream.models` that builds it.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        norm_eps: of the RMS norms.
        hidden_act: activation of the MLP's gate.
        rope: rotary embedding.
        context_len: most positions, rope scaling included.
        tie_word_embeddings: the head is the embedding; None where the checkpoint does not say.
        attention_bias: None where the checkpoint does not say (the model type decides).
        mlp_bias: whether the MLP's products have biases.
        sliding_window: keys a token sees where some layer is windowed; None without windows.
        eos_token_ids: as the configuration lists them.
        bos_token_id: likewise.
        dtype: the checkpoint's own dtype name, if it says.
        raw: the whole configuration, for what one model type alone needs.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    hidden_act: str
    rope: RopeSpec
    context_len: int
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a config.json's object; `source` names the file in errors.

    Raises `ModelError` for anything missing, ill-typed or of a kind that is not supported (mixture of experts, MLA, vision, ...).
    """
    for keys, what in _REFUSED_KEYS:
        for key in keys:
            if _says_yes(raw.get(key)):
                raise ModelError(
                    f"{source}: the model must be a dense text decoder, but got {key} = {shown(raw[key])}",
                    hint=f"{what} are not supported yet",
                )
    read = _Reader(raw, source)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.wrong("num_attention_heads", f"be a multiple of num_key_value_heads ({kv_heads})", heads)
    if raw.get("head_dim") is None and hidden % heads:
        raise read.wrong("hidden_size", f"be a multiple of num_attention_heads ({heads})", hidden)
    head_dim = read.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise read.wrong("head_dim", "be even", head_dim)
    max_positions = read.count("max_position_embeddings")
    rope = parse_rope(raw, max_positions, source)
    return ModelConfig(
        model_type=read.text("model_type"),
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        hidden_act=read.text("hidden_act", "silu"),
        rope=rope,
        context_len=context_limit(rope, max_positions),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        attention_bias=read.flag("attention_bias"),
        mlp_bias=bool(read.flag("mlp_bias")),
        sliding_window=_window(raw, read),
        eos_token_ids=token_ids(raw.get("eos_token_id"), source, "eos_token_id"),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"), source, "bos_token_id")), None),
        dtype=_dtype_name(raw),
        raw=raw,
    )


def parse_rope(raw: Mapping[str, Any], max_positions: int, source: str) -> RopeSpec:
    """Rotary embedding from either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`; `type` or `rope_type`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{source}: rope_scaling must be an object, but got {shown(given)}")
    read = _Reader({**{k: raw[k] for k in ("rope_theta",) if raw.get(k) is not None}, **given}, f"{source}: rope")
    if read.number("partial_rotary_factor", 1.0) != 1.0 or _says_other(raw.get("partial_rotary_factor"), 1.0):
        raise ModelError(f"{source}: partial_rotary_factor must be 1", hint="partly rotated heads are not supported yet")
    theta = read.number("rope_theta", 10000.0)
    if not theta > 0:
        raise read.wrong("rope_theta", "be above 0", theta)
    factors = raw.get("rope_frequency_factors", ())
    kind = read.text("rope_type", read.text("type", "default"))
    if kind == "default":
        return RopeSpec(theta, frequency_factors=tuple(factors))
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"{source}: rope scaling must be one of {', '.join(ROPE_KINDS)}, but got {shown(kind)}",
            hint="other kinds are not supported yet",
        )
    factor = read.number("factor")
    if not factor >= 1:
        raise read.wrong("factor", "be at least 1", factor)
    outside = raw.get("original_max_position_embeddings")
    original = read.count("original_max_position_embeddings", outside if isinstance(outside, int) else max_positions)
    low, high = read.number("low_freq_factor", 1.0), read.number("high_freq_factor", 4.0)
    if kind == "llama3" and not 0 < low < high:
        raise read.wrong("high_freq_factor", f"be above low_freq_factor ({low:g}), both above 0", high)
    return RopeSpec(theta, kind, factor, original, low, high, tuple(factors))


def context_limit(rope: RopeSpec, max_positions: int) -> int:
    """Most positions, scaling included.

    Linear scaling stretches what the model knew before, by the factor. A llama3 checkpoint states its stretched length itself.
    """
    if rope.kind == "linear":
        return int(rope.original_context_len * rope.factor)
    return max_positions


def token_ids(value: object, source: str, name: str) -> tuple[int, ...]:
    """An id or a list of ids (EOS often is) as a tuple; None is empty."""
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else [value]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise ModelError(f"{source}: {name} must be a token id or a list of them, but got {shown(value)}")
    return tuple(ids)


def _says_yes(value: object) -> bool:
    # num_experts = 0 or null and an empty object say that there is nothing of the kind.
    return bool(value)


def _says_other(value: object, default: float) -> bool:
    return value is not None and value != default


def _window(raw: Mapping[str, Any], read: _Reader) -> int | None:
    if raw.get("sliding_window") is None or raw.get("use_sliding_window") is False:
        return None
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list) and "sliding_attention" not in layer_types:
        return None
    first_windowed, num_layers = raw.get("max_window_layers"), read.count("num_hidden_layers")
    if layer_types is None and isinstance(first_windowed, int) and first_windowed >= num_layers:
        return None
    return read.count("sliding_window")


def _dtype_name(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype", raw.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None


class _Reader:
    """Typed look-ups in a JSON object with errors that name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw = raw
        self._source = source

    def wrong(self, key: str, must: str, given: object) -> ModelError:
        return ModelError(f"{self._source}: {key} must {must}, but got {shown(given)}")

    def _get(self, key: str, default: object) -> Any:
        value = self._raw.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self._source}: {key} must be given, but it is missing")
            return default
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "be an integer of at least 1", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, "be a finite number", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "be a string", value)
        return value

    def flag(self, key: str) -> bool | None:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "be true or false", value)
        return value
