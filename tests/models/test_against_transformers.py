"""Logits equal transformers' on tiny random models: every family, every way of feeding tokens, every rope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
def test_chunked_as_whole(chunks: tuple[int, ...], tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float64)
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


ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 100.0,
    },
    "llama3 without the original length": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 100.0,
    },
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_beyond_the_original_length(rope: str, family: str, tmp_path: Path) -> None:
    positions = 128 if rope == "llama3" else 32
    model = tiny(family, dtype=torch.float64, max_position_embeddings=positions, rope_parameters=dict(ROPES[rope]))
    folder = save(model, tmp_path)
    ours = load(str(folder), dtype="float64").model
    assert ours.context_len == (128 if rope in ("linear", "llama3") else 32)
    compare(model, folder, count=100, chunks=(60, 20))


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("rope", ["linear", "llama3"])
def test_the_old_spelling_of_rope_scaling(rope: str, kind_key: str, tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float64, max_position_embeddings=32, rope_parameters=dict(ROPES[rope]))
    folder = save(model, tmp_path)
    scaling = {**ROPES[rope], kind_key: rope}
    theta = scaling.pop("rope_theta")
    if kind_key == "type":
        del scaling["rope_type"]
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    compare(model, folder, count=60)


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


def test_half_types_are_near(tmp_path: Path) -> None:
    model = tiny("llama")
    folder, ids = save(model, tmp_path), tokens(30)
    expected = reference_logits(model, ids)
    for dtype, tolerance in (("bfloat16", 0.2), ("float16", 0.03)):
        loaded = load(str(folder), dtype=dtype)
        got = logits_in_chunks(loaded.model, ids, (12, 8)).float()
        assert loaded.dtype == getattr(torch, dtype) == loaded.model.dtype
        assert (got - expected).abs().max() < tolerance


def test_overflow_shows_as_non_finite_logits(tmp_path: Path) -> None:
    """L07: what overflows float16 must come out as NaN or infinity, which the engine refuses, and not as some token."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(3e4)
    folder, ids = save(model, tmp_path), tokens(5)
    assert not logits_in_chunks(load(str(folder), dtype="float16").model, ids, (5,)).isfinite().all()
    assert logits_in_chunks(load(str(folder), dtype="bfloat16").model, ids, (5,)).isfinite().all()
