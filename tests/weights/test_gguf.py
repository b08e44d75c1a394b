"""GGUF files: logits equal the same weights in transformers; every quantisation; extras; damage is named."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from slipstream.errors import ModelError
from slipstream.weights import load, load_text
from slipstream.weights.gguf_file import GgufFile
from tests.gguf_checkpoints import write
from tests.paged import logits_in_chunks
from tests.tiny_checkpoints import reference_logits, tiny

# Rows are whole blocks of 32 or 256 of every quantisation that the library can write.
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.tensor([5, 9, 200, 3, 77, 1, 250])


def model(family: str = "llama", **overrides: Any) -> Any:
    return tiny(family, **{**SHAPE, **overrides})


def assert_equal_to(reference: Any, path: Path) -> None:
    ours = load(str(path), dtype=str(reference.dtype).removeprefix("torch.")).model
    torch.testing.assert_close(logits_in_chunks(ours, TOKENS, (4,)), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.Q4_0, Kind.Q4_1])
def test_each_stored_type(kind: Kind, tmp_path: Path) -> None:
    reference = model()
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf", kind=kind))


def test_qwen2_with_its_biases(tmp_path: Path) -> None:
    reference = model("qwen2")
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf", architecture="qwen2", kind=Kind.Q8_0))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0])
def test_qwen3_with_its_head_norms(kind: Kind, tmp_path: Path) -> None:
    reference = model("qwen3", head_dim=24, tie_word_embeddings=True)
    metadata = {"qwen3.attention.key_length": 24, "qwen3.attention.value_length": 24}
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf", architecture="qwen3", kind=kind, metadata=metadata))


@pytest.mark.parametrize("layers", [4, 62])
def test_gemma3_with_its_shifted_norms(layers: int, tmp_path: Path) -> None:
    """Base 10,000 in windowed layers and the scale of the scores are not in the file; that of 62 layers goes by the width."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    scale = {"query_pre_attn_scalar": 32, "head_dim": 32} if layers == 4 else {"query_pre_attn_scalar": 16, "head_dim": 32}
    shape = {"num_hidden_layers": layers, "sliding_window": 4, "sliding_window_pattern": 6, "final_logit_softcapping": 5.0}
    reference = model("gemma3_text", rope_parameters=ropes, tie_word_embeddings=True, **shape, **scale)
    metadata = {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": 4,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "final_logit_softcapping": 5.0,
    }
    named = {f"gemma3.{key}": value for key, value in metadata.items()}
    path = write(reference, tmp_path / "m.gguf", architecture="gemma3", metadata=named)
    assert_equal_to(reference.double(), path)  # 62 layers add up float32's rounding
    assert load_text(str(path)).context_len == 256


def test_smollm3_with_interleaved_heads(tmp_path: Path) -> None:
    reference = model("smollm3", no_rope_layer_interval=4, num_hidden_layers=5)
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf", architecture="smollm3"))


def test_phi3_with_fused_tensors_and_partly_turning_heads(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    reference = model("phi3", rope_parameters=rope, sliding_window=4)
    metadata = {"phi3.attention.sliding_window": 4, "phi3.rope.dimension_count": 8}
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf", architecture="phi3", metadata=metadata))


def test_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
    reference = model("qwen2", rope_parameters=rope)
    metadata = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
    }
    path = write(reference, tmp_path / "m.gguf", architecture="qwen2", metadata=metadata)
    assert_equal_to(reference, path)
    assert load_text(str(path)).context_len == 256


def test_mixed_types(tmp_path: Path) -> None:
    reference = model("qwen2", tie_word_embeddings=True)
    kinds = {"ffn_up": Kind.Q8_0, "attn_v": Kind.BF16, "token_embd": Kind.F16}
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf", architecture="qwen2", kinds=kinds))


def test_llama_with_biases(tmp_path: Path) -> None:
    reference = model(attention_bias=True)
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf"))


def test_without_an_output_tensor_the_head_is_tied(tmp_path: Path) -> None:
    reference = model(tie_word_embeddings=True)
    path = write(reference, tmp_path / "m.gguf")
    assert "output.weight" not in GgufFile(path).tensors
    assert_equal_to(reference, path)


def test_frequency_factors_carry_llama3_scaling(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 100.0,
    }
    reference = model(rope_parameters=rope)
    plain = 1.0 / (100.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16))
    factors = (plain / reference.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() == pytest.approx(8.0)
    assert_equal_to(reference, write(reference, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}))


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")]])
def test_nonsense_frequency_factors_are_refused(factors: list[float], tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    refused(write(model(), tmp_path / "m.gguf", extra=extra), "rope frequency factors")


def test_linear_scaling(tmp_path: Path) -> None:
    reference = model(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = write(reference, tmp_path / "m.gguf", metadata=metadata)
    assert_equal_to(reference, path)
    assert load_text(str(path)).context_len == 512


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name))
def test_every_quantisation_of_the_library(kind: Kind, tmp_path: Path) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 256, (3, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        got = GgufFile(tmp_path / "m.gguf").data("t")
        expected = gguf.dequantize(gguf.GGUFReader(tmp_path / "m.gguf").tensors[0].data, kind)
    assert got.shape == (3, 2 * block)
    np.testing.assert_array_equal(got, expected)


def test_a_type_nobody_dequantises_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", np.zeros((2, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="t must be of a type that we can read, but got I32"):
        GgufFile(tmp_path / "m.gguf").data("t")


def test_metadata_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    path = write(model(), tmp_path / "m.gguf", metadata={"general.name": "Ünïcode", "a.b": True, "a.c": [1.5, 2.5]})
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    assert GgufFile(path).metadata == theirs


def refused(path: Path, *named: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(str(path))
    for name in named:
        assert name in str(caught.value)
    assert str(path.parent) not in str(caught.value)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight", "blk.0.attn_k.weight"])
def test_a_parameter_never_filled(name: str, tmp_path: Path) -> None:
    refused(write(model(), tmp_path / "m.gguf", without=(name,)), "m.gguf", "the checkpoint must hold model.")


def test_a_tensor_too_many(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_mystery.weight": np.ones((2, 2), np.float32)}
    refused(write(model(), tmp_path / "m.gguf", extra=extra), "blk.0.ffn_mystery.weight")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"general.type": "adapter"}, "LoRA"),
        ({"split.count": 3}, "3 parts"),
        ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 4.0}, "su"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ({"llama.embedding_length": None}, "hidden_size"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.pre": "dbrx"}, "dbrx"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id"),
        ({"tokenizer.ggml.merges": ["h e", "x yz"]}, "merges"),
    ],
)
def test_metadata_that_is_refused(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    refused(write(model(), tmp_path / "m.gguf", metadata=metadata), "m.gguf", named)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    refused(write(model(), tmp_path / "m.gguf", architecture="mamba"), "mamba", "llama, mistral, phi3, qwen2")


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    refused(path, "m.gguf", "GGUF")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    refused(tmp_path / "m.gguf", "m.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_an_unknown_version(version: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    refused(path, "version", str(version))


@pytest.mark.parametrize("part", [0.0001, 0.005, 0.01, 0.05, 0.3, 0.99])
def test_a_cut_file(part: float, tmp_path: Path) -> None:
    data = write(model(), tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(data[: max(5, int(len(data) * part))])
    refused(path, "m.gguf", "cut")


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_header_never_passes_as_another_error(seed: int, tmp_path: Path) -> None:
    """Random bytes of the header overwritten: a `ModelError` or, where the damage is harmless, a model; never anything else."""
    data = bytearray(write(model(num_hidden_layers=1), tmp_path / "whole.gguf").read_bytes())
    rng = np.random.default_rng(seed)
    end = len(data) if seed % 3 == 0 else 400 if seed % 3 == 1 else 30
    for at in rng.integers(4, end, rng.integers(1, 6)):
        data[at] = rng.integers(0, 256)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with np.errstate(all="ignore"), contextlib.suppress(ModelError):
        load(str(path))


def test_several_eos_ids(tmp_path: Path) -> None:
    path = write(model(), tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 7})
    assert set(load_text(str(path)).eos_token_ids) == {2, 7, 0}  # 0 is <|endoftext|>, a control token that ends a turn


@pytest.mark.parametrize(("add", "first"), [(True, [1]), (False, []), (None, [])])
def test_add_bos(add: bool | None, first: list[int], tmp_path: Path) -> None:
    tokenizer = load_text(str(write(model(), tmp_path / "m.gguf", metadata={"tokenizer.ggml.add_bos_token": add}))).tokenizer
    ids = tokenizer.encode("he", add_special_tokens=False)
    assert tokenizer.encode("he") == first + ids
    assert 1 not in ids


def test_text_side(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.25}
    path = write(model(), tmp_path / "m.gguf", metadata=metadata)
    text = load_text(str(path), max_context=100)
    assert text.chat_template == "{{ messages }}"
    assert text.generation_defaults == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.25}
    assert (text.vocab_size, text.context_len, text.bos_token_id, text.architecture) == (320, 100, 1, "llama")
    assert text.tokenizer.decode(text.tokenizer.encode("hello, wörld 😀"), skip_special_tokens=True) == "hello, wörld 😀"
