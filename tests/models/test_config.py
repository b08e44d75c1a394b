"""What a configuration may say, what it means, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ModelError
from slipstream.models.config import ModelConfig, parse_config
from slipstream.models.registry import find_type, known_types

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def parse(**changes: Any) -> ModelConfig:
    merged = {**BASE, **changes}
    return parse_config({key: value for key, value in merged.items() if value is not ...}, "config.json")


def test_defaults() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.context_len) == (4, 8, 128)
    assert (config.rope.kind, config.rope.theta, config.norm_eps) == ("default", 10000.0, 1e-6)
    assert config.tie_word_embeddings is None
    assert config.sliding_window is None


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "model_type"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: {key} must be given"):
        parse(**{key: ...})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", True),
        ("hidden_size", 33),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("rms_norm_eps", float("nan")),
        ("hidden_act", 3),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", -1),
        ("eos_token_id", [1, "2"]),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object) -> None:
    with pytest.raises(ModelError, match="must"):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"num_experts": 64}, "mixture-of-experts"),
        ({"n_routed_experts": 64}, "mixture-of-experts"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"vision_config": {"hidden_size": 8}}, "vision"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_other_kinds_of_model_are_refused_by_name(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        parse(**keys)


@pytest.mark.parametrize("keys", [{"num_local_experts": 0}, {"num_experts": None}, {"vision_config": None}])
def test_a_key_that_says_no_is_no_reason_to_refuse(keys: dict[str, Any]) -> None:
    assert parse(**keys).model_type == "llama"


# L05: both spellings, the derived limit, unknown kinds, factors below 1.


@pytest.mark.parametrize("outer", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("inner", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"kind": "linear", "factor": 4.0}, 512),
        ({"kind": "linear", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"kind": "linear", "factor": 2.5}, 320),
        ({"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
        ({"kind": "llama3", "factor": 8.0}, 128),
        ({"kind": "dynamic", "factor": 4.0}, 512),
        ({"kind": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"kind": "yarn", "factor": 4.0}, 512),
        ({"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"kind": "yarn", "original_max_position_embeddings": 64}, 128),
        ({"kind": "default"}, 128),
    ],
)
def test_rope_scaling_in_every_spelling(outer: str, inner: str, scaling: dict[str, Any], limit: int) -> None:
    given = {inner if key == "kind" else key: value for key, value in scaling.items()}
    config = parse(**{outer: given, "rope_theta": 77.0})
    assert config.context_len == limit
    assert config.rope.kind == scaling["kind"]
    assert config.rope.theta == 77.0
    if scaling["kind"] == "llama3":
        assert config.rope.original_context_len == scaling.get("original_max_position_embeddings", 128)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["proportional", "su", "nonsense"])
def test_an_unknown_kind_of_rope_is_refused_by_name(key: str, kind: str) -> None:
    with pytest.raises(ModelError, match=kind):
        parse(rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("factor", [0.5, 0, -1, float("nan"), 1e308, "4", None, True])
def test_a_factor_below_1_is_refused(factor: object, kind: str) -> None:
    with pytest.raises(ModelError, match="factor"):
        parse(rope_scaling={"rope_type": kind, "factor": factor})


def test_llama3_bands_must_be_in_order() -> None:
    with pytest.raises(ModelError, match="high_freq_factor"):
        parse(rope_scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0})


@pytest.mark.parametrize("share", [0, -0.5, 1.5, "half"])
def test_a_share_of_the_head_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        parse(partial_rotary_factor=share)


def test_the_original_length_beside_the_scaling_wins() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse(rope_scaling=scaling, original_max_position_embeddings=32).context_len == 128


def test_a_rope_for_each_kind_of_layer() -> None:
    kinds = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 3.0, "rope_type": "linear", "factor": 2}}
    config = parse(rope_parameters=kinds)
    assert (config.rope.theta, config.rope.kind, config.context_len) == (5.0, "default", 128)
    assert config.local_rope is not None and (config.local_rope.theta, config.local_rope.kind) == (3.0, "linear")


@pytest.mark.parametrize(
    "wrong", [{"rope_theta": 1.0}, {"beta_fast": -1.0}, {"beta_slow": "1"}, {"truncate": 1}, {"mscale": -2.0}]
)
def test_yarn_settings_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(wrong))):
        parse(rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0, **wrong})


def test_longrope_needs_its_short_factors() -> None:
    with pytest.raises(ModelError, match="short_factor"):
        parse(rope_scaling={"rope_type": "longrope", "factor": 2.0})


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
    ],
)
def test_sliding_window(keys: dict[str, Any], window: int | None) -> None:
    assert parse(**keys).sliding_window == window


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([2, 5], (2, 5))])
def test_eos_ids(value: object, ids: tuple[int, ...]) -> None:
    assert parse(eos_token_id=value).eos_token_ids == ids


def test_every_model_file_is_found() -> None:
    assert set(known_types()) >= {"gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"}
    for name in known_types():
        find_type(name, "config.json")


@pytest.mark.parametrize("name", ["gpt2", "base", "registry", "config", "../llama", ""])
def test_an_unknown_architecture_is_named_and_the_known_ones_listed(name: str) -> None:
    with pytest.raises(ModelError, match="llama, mistral, phi3, qwen2") as caught:
        find_type(name, "config.json")
    assert repr(name) in str(caught.value)
