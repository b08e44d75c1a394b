"""A checkpoint's configuration, typed and checked. Imports no torch: the front process reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ModelError, shown
from slipstream.layers.rope import RopeSpec
from slipstream.models.reader import Reader
from slipstream.models.rope_config import context_limit, parse_ropes

LAYER_TYPES = ("full_attention", "sliding_attention")

# A key that only such a model has -> what to call it. Checked before anything else, so that the message names the real reason.
_REFUSED_KEYS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), "mixture-of-experts models"),
    (("kv_lora_rank",), "models with multi-head latent attention (MLA)"),
    (("vision_config", "vision_tower", "mm_vision_tower"), "vision models"),
    (("audio_config",), "audio models"),
    (("quantization_config",), "quantised safetensors checkpoints"),
    (("is_encoder_decoder",), "encoder-decoder models"),
    (("alibi", "use_alibi"), "models with ALiBi"),
    (
        ("ssm_cfg", "ssm_state_size", "mamba_d_state", "linear_num_key_heads", "linear_attn_config", "conv_L_cache", "lru_width"),
        "models with recurrent or linear attention layers",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What every checkpoint's configuration says, whoever runs the model.

    Attributes:
        model_type: architecture name.
        vocab_size: rows of the head.
        context_len: most positions, rope scaling included.
        eos_token_ids: as the configuration lists them.
        bos_token_id: likewise.
        dtype: the checkpoint's own dtype name, if it says.
        raw: the whole configuration, for what one model type alone needs.
    """

    model_type: str
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(CheckpointConfig):
    """What a decoder of ours is made of; `model_type` is the file in `slipstream.models` that builds it.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        norm_eps: of the RMS norms.
        hidden_act: activation of the MLP's gate; None where the checkpoint does not say.
        rope: rotary embedding.
        local_rope: that of windowed layers, where they have another one.
        tie_word_embeddings: the head is the embedding; None where the checkpoint does not say.
        attention_bias: None where the checkpoint does not say (the model type decides).
        mlp_bias: whether the MLP's products have biases.
        sliding_window: keys a token sees where some layer is windowed; None without windows.
        layer_types: full_attention or sliding_attention for each layer; None where the checkpoint does not list them.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    hidden_act: str | None
    rope: RopeSpec
    local_rope: RopeSpec | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a config.json's object; `source` names the file in errors.

    Raises `ModelError` for anything missing, ill-typed or of a kind that is not supported (mixture of experts, MLA, vision, ...).
    """
    _refuse(raw, source)
    read = Reader(raw, source)
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
    model_type = read.text("model_type")
    rope, local_rope = parse_ropes(raw, max_positions, source)
    return ModelConfig(
        model_type=model_type,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        hidden_act=read.text("hidden_activation", read.text("hidden_act", "")) or None,
        rope=rope,
        local_rope=local_rope,
        context_len=context_limit(rope, max_positions, model_type),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        attention_bias=read.flag("attention_bias"),
        mlp_bias=bool(read.flag("mlp_bias")),
        sliding_window=_window(raw, read),
        layer_types=_layer_types(read),
        eos_token_ids=token_ids(raw.get("eos_token_id"), source, "eos_token_id"),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"), source, "bos_token_id")), None),
        dtype=_dtype_name(raw),
        raw=raw,
    )


def parse_foreign(raw: Mapping[str, Any], source: str) -> CheckpointConfig:
    """Read the config.json of a type that has no file here, as far as it concerns us; `transformers` reads the rest.

    Raises `ModelError` for kinds of model that are refused by name, and for rope scaling that turns the past anew as it grows.
    """
    _refuse(raw, source)
    read = Reader(raw, source)
    model_type = read.text("model_type")
    max_positions = read.count("max_position_embeddings", read.count("n_positions", 0) if "n_positions" in raw else None)
    rope, local_rope = parse_ropes(raw, max_positions, source)
    for one in (rope, local_rope):
        if one is not None and one.kind in ("dynamic", "longrope"):
            raise ModelError(
                f"{source}: rope scaling must not depend on a request's length, but got {one.kind}",
                hint=f"it is not supported for {model_type}, which has no implementation here",
            )
    return CheckpointConfig(
        model_type=model_type,
        vocab_size=read.count("vocab_size"),
        context_len=context_limit(rope, max_positions, model_type),
        eos_token_ids=token_ids(raw.get("eos_token_id"), source, "eos_token_id"),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"), source, "bos_token_id")), None),
        dtype=_dtype_name(raw),
        raw=raw,
    )


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


def _refuse(raw: Mapping[str, Any], source: str) -> None:
    for keys, what in _REFUSED_KEYS:
        for key in keys:
            if _says_yes(raw.get(key)):
                raise ModelError(
                    f"{source}: the model must be a dense text decoder, but got {key} = {shown(raw[key])}",
                    hint=f"{what} are not supported yet",
                )


def _layer_types(read: Reader) -> tuple[str, ...] | None:
    listed = read.per_layer("layer_types", read.count("num_hidden_layers"))
    for one in listed or ():
        if one not in LAYER_TYPES:
            raise read.wrong("layer_types", f"hold {' and '.join(LAYER_TYPES)} only", one, "other layers are not supported yet")
    return None if listed is None else tuple(listed)


def _window(raw: Mapping[str, Any], read: Reader) -> int | None:
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
