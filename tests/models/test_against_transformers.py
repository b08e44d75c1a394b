"""Logits equal transformers' on tiny random models: every family, every way of feeding tokens, every rope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.weights import load
from tests.paged import PagedSequence, logits_in_chunks
from tests.tiny_checkpoints import FAMILIES, VOCAB, edit_json, reference_logits, save, tiny

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
NAME = {torch.float32: "float32", torch.float64: "float64"}


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def compare(model: Any, folder: Path, count: int = 40, chunks: tuple[int, ...] = (17, 9)) -> None:
    """Load the folder and compare logits, in the model's dtype."""
    ours = load(str(folder), dtype=NAME[model.dtype]).model
    ids = tokens(count)
    torch.testing.assert_close(
        logits_in_chunks(ours, ids, chunks), reference_logits(model, ids), rtol=0, atol=TOLERANCE[model.dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(family, dtype=dtype)
    compare(model, save(model, tmp_path))


@pytest.mark.parametrize("chunks", [(40,), (1,) * 5, (39, 1), ()])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_chunked_as_whole(family: str, chunks: tuple[int, ...], tmp_path: Path) -> None:
    model = tiny(family, dtype=torch.float64)
    compare(model, save(model, tmp_path), chunks=chunks)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"head_dim": 16},
        {"head_dim": 4, "num_attention_heads": 2},
        {"num_hidden_layers": 1},
    ],
)
def test_shapes(shape: dict[str, int], tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float64, **shape)
    compare(model, save(model, tmp_path))


@pytest.mark.parametrize("bias", [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}])
def test_llama_biases(bias: dict[str, bool], tmp_path: Path) -> None:
    model = tiny("llama", **bias)
    compare(model, save(model, tmp_path))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0}
# name -> (scaling, max_position_embeddings, the limit that follows).
ROPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "theta": ({"rope_type": "default", "rope_theta": 500.0}, 32, 32),
    "linear": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, 32, 128),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 16}, 128, 128),
    "llama3 without the original length": (LLAMA3, 128, 128),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}, 128, 128),
    "yarn without the original length": ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}, 32, 128),
    "yarn with everything": (
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1000.0,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
        512,
        512,
    ),
    "yarn with its attention factor": (
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "attention_factor": 0.8},
        32,
        128,
    ),
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_beyond_the_original_length(rope: str, family: str, tmp_path: Path) -> None:
    scaling, positions, limit = ROPES[rope]
    model = tiny(family, dtype=torch.float64, max_position_embeddings=positions, rope_parameters=dict(scaling))
    folder = save(model, tmp_path)
    ours = load(str(folder), dtype="float64").model
    assert ours.context_len == limit
    compare(model, folder, count=100, chunks=(60, 20))


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("rope", [name for name in ROPES if name != "theta"])
def test_the_old_spelling_of_rope_scaling(rope: str, kind_key: str, tmp_path: Path) -> None:
    given, positions, limit = ROPES[rope]
    model = tiny("llama", dtype=torch.float64, max_position_embeddings=positions, rope_parameters=dict(given))
    folder = save(model, tmp_path)
    scaling = {**given, kind_key: given["rope_type"]}
    theta = scaling.pop("rope_theta")
    if kind_key == "type":
        del scaling["rope_type"]
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert load(str(folder)).context_len == limit
    compare(model, folder, count=60)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}


@pytest.mark.parametrize(("original", "kind_key"), [(None, "type"), (8, "rope_type")])
def test_dynamic_scaling_is_what_a_cache_filled_token_by_token_holds(original: int | None, kind_key: str, tmp_path: Path) -> None:
    """Within the original length, however fed, and beyond it as `transformers` generates; chunks do not change it."""
    model = tiny("llama", dtype=torch.float64, max_position_embeddings=32, rope_parameters=dict(DYNAMIC))
    folder, ids = save(model, tmp_path), tokens(100)
    scaling = {kind_key: "dynamic", "factor": 4.0, **({"original_max_position_embeddings": original} if original else {})}
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=100.0, rope_scaling=scaling)
    reference_logits(model, ids[:1])  # exact norms from here on
    past, wanted = None, []
    with torch.no_grad():
        for piece in ids.split([20, *[1] * 80]):
            out = model(piece[None], cache=past, use_cache=True)
            past = out.past_key_values
            wanted.append(out.logits[0])
    ours = load(str(folder), dtype="float64").model
    assert ours.context_len == 128
    whole = logits_in_chunks(ours, ids, (60, 20))
    torch.testing.assert_close(whole, torch.cat(wanted), rtol=0, atol=1e-5)  # its base goes through float32 on another way
    torch.testing.assert_close(whole, logits_in_chunks(ours, ids, ()), rtol=0, atol=1e-9)
    static = {"rope_type": "default", "rope_theta": 100.0}
    edit_json(folder / "config.json", rope_scaling=None, rope_parameters=static, max_position_embeddings=128)
    other = logits_in_chunks(load(str(folder), dtype="float64").model, ids, (60, 20))
    assert (whole[:32] - other[:32]).abs().max() < 1e-9 < 1e-2 < (whole[32:] - other[32:]).abs().max()


def test_partly_rotated_heads(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    model = tiny("phi3", dtype=torch.float64, rope_parameters=rope)
    compare(model, save(model, tmp_path))


def test_partly_rotated_heads_are_refused_where_the_reference_does_not_have_them(tmp_path: Path) -> None:
    folder = save(tiny("llama"), tmp_path)
    edit_json(folder / "config.json", partial_rotary_factor=0.5)
    with pytest.raises(ModelError, match="partial_rotary_factor must be 1 for llama"):
        load(str(folder))


def test_longrope_within_the_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4}
    model = tiny("phi3", dtype=torch.float64, rope_parameters=rope, original_max_position_embeddings=64)
    folder = save(model, tmp_path)
    with pytest.raises(ModelError, match="the context must be at most 64 with longrope, but got 256") as caught:
        load(str(folder))
    assert "--max-model-len 64" in str(caught.value)
    ours = load(str(folder), dtype="float64", max_context=64).model
    torch.testing.assert_close(logits_in_chunks(ours, tokens(60), (30,)), reference_logits(model, tokens(60)), rtol=0, atol=1e-9)


def test_phi3_by_another_name_of_longrope_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("phi3"), tmp_path)
    edit_json(folder / "config.json", rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0})
    with pytest.raises(ModelError, match="rope scaling of phi3 must be longrope"):
        load(str(folder))


def test_gemma3_scales_its_global_layers_alone(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    model = tiny("gemma3_text", dtype=torch.float64, rope_parameters=ropes)
    folder = save(model, tmp_path)
    assert load(str(folder)).context_len == 256, "its max_position_embeddings is the stretched length"
    compare(model, folder)
    edit_json(
        folder / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    compare(model, folder)


def test_smollm3_lists_the_layers_that_turn(tmp_path: Path) -> None:
    model = tiny("smollm3", dtype=torch.float64, no_rope_layers=[0, 1, 0])
    compare(model, save(model, tmp_path))


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "swish"])
def test_activations(activation: str, tmp_path: Path) -> None:
    model = tiny("llama", hidden_act=activation)
    compare(model, save(model, tmp_path))


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("llama"), tmp_path)
    edit_json(folder / "config.json", hidden_act="relu")
    with pytest.raises(ModelError, match="hidden_act must be one of silu"):
        load(str(folder))


# L01: tied embeddings in four spellings.


def test_tied_without_a_head(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    folder = save(model, tmp_path)
    compare(model, folder)
    ours = load(str(folder))
    assert ours.num_parameters == sum(p.numel() for p in model.parameters())


def test_tied_with_an_equal_head(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.config.tie_word_embeddings = False
    folder = save(model, tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    compare(model, folder)
    assert load(str(folder)).num_parameters == sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel()


def test_not_tied_with_a_head_of_its_own(tmp_path: Path) -> None:
    model = tiny("llama")
    compare(model, save(model, tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_tying_not_said(tied: bool, tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=tied)
    folder = save(model, tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=None)
    compare(model, folder)


def test_taps_are_the_residuals_entering_the_layers(tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float64)
    ours = load(str(save(model, tmp_path)), dtype="float64").model
    ids = tokens(9)
    logits, taps = PagedSequence(ours, 9).feed(ids, taps=(3, 0, 2))
    assert taps is not None
    reference_logits(model, ids)  # exact norms from here on
    entering: dict[int, torch.Tensor] = {}
    for layer in (0, 2):
        model.model.layers[layer].register_forward_pre_hook(lambda _, args, layer=layer: entering.__setitem__(layer, args[0][0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: entering.__setitem__(3, args[0][0]))
    expected = reference_logits(model, ids)
    torch.testing.assert_close(taps, torch.cat([entering[3], entering[0], entering[2]], -1).detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_half_types_are_near(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    folder, ids = save(model, tmp_path), tokens(30)
    expected = reference_logits(model, ids)
    for dtype, tolerance in (("bfloat16", 0.2), ("float16", 0.03)):
        loaded = load(str(folder), dtype=dtype)
        got = logits_in_chunks(loaded.model, ids, (12, 8)).float()
        assert loaded.dtype == getattr(torch, dtype) == loaded.model.dtype
        if family == "gemma3_text":  # the scale of its embeddings is rounded with them: sqrt(48) is 6.94 in bfloat16
            tolerance *= 3
        assert (got - expected).abs().max() < tolerance


def test_overflow_shows_as_non_finite_logits(tmp_path: Path) -> None:
    """L07: what overflows float16 must come out as NaN or infinity, which the engine refuses, and not as some token."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(3e4)
    folder, ids = save(model, tmp_path), tokens(5)
    assert not logits_in_chunks(load(str(folder), dtype="float16").model, ids, (5,)).isfinite().all()
    assert logits_in_chunks(load(str(folder), dtype="bfloat16").model, ids, (5,)).isfinite().all()
