"""L03 and its kind: which files count, and that whatever is missing, cut or left over is named before anything runs."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ModelError
from slipstream.weights import load
from slipstream.weights.safetensors_files import INDEX
from tests.paged import logits_in_chunks
from tests.tiny_checkpoints import edit_json, reference_logits, save, tiny

TOKENS = torch.tensor([5, 9, 200, 3, 77])


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model in three shards with an index."""
    model = tiny("llama", dtype=torch.float32)
    folder = save(model, tmp_path, max_shard_size="150KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) >= 3
    torch.save(reference_logits(model, TOKENS), folder / "expected.pt")
    return folder


def assert_loads(folder: Path) -> None:
    expected = torch.load(folder / "expected.pt")
    torch.testing.assert_close(logits_in_chunks(load(str(folder)).model, TOKENS, (5,)), expected, rtol=0, atol=1e-4)


def refused(folder: Path, *named: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    for name in named:
        assert name in str(caught.value)
    assert str(folder.parent) not in str(caught.value)


def test_shards_with_an_index(sharded: Path) -> None:
    assert_loads(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert_loads(sharded)


def test_the_index_decides_which_copy_counts(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    first, second = load_file(shards[0]), load_file(shards[1])
    name = next(iter(first))
    save_file({**second, name: torch.zeros_like(first[name])}, shards[1])
    assert_loads(sharded)
    (sharded / INDEX).unlink()
    refused(sharded, name, shards[0].name, shards[1].name)


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(sharded, shard.name, "missing")


def test_a_missing_shard_without_an_index(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    name = next(iter(load_file(shard)))
    shard.unlink()
    (sharded / INDEX).unlink()
    refused(sharded, "model.layers" if "layers" in name else name)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_cut_shard(sharded: Path, part: float, indexed: bool) -> None:
    if not indexed:
        (sharded / INDEX).unlink()
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * part)])
    refused(sharded, shard.name)


@pytest.mark.parametrize("header", [b"not json", b"[1]", b'{"a": {"shape": [1]}}', b'{"a": 3}'])
def test_a_damaged_header(sharded: Path, header: bytes) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    shard.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    refused(sharded, shard.name)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"metadata": {}}])
def test_an_empty_index(sharded: Path, index: object) -> None:
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, INDEX)


def test_an_index_that_is_no_json(sharded: Path) -> None:
    (sharded / INDEX).write_text("{")
    refused(sharded, INDEX)


def index_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def test_an_index_that_places_a_tensor_wrongly(sharded: Path) -> None:
    weight_map = index_of(sharded)
    name, file = next(iter(weight_map.items()))
    other = next(f for f in weight_map.values() if f != file)
    edit_json(sharded / INDEX, weight_map={**weight_map, name: other})
    refused(sharded, name, other)


def test_an_index_that_names_a_tensor_nobody_has(sharded: Path) -> None:
    weight_map = index_of(sharded)
    edit_json(sharded / INDEX, weight_map={**weight_map, "model.ghost": next(iter(weight_map.values()))})
    refused(sharded, "model.ghost")


def test_an_index_that_leaves_a_tensor_out(sharded: Path) -> None:
    weight_map = index_of(sharded)
    weight_map.pop("model.norm.weight")
    edit_json(sharded / INDEX, weight_map=weight_map)
    refused(sharded, "model.norm.weight")


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "a/b.safetensors", 3])
def test_an_index_that_leads_out_of_the_folder(sharded: Path, file: object) -> None:
    edit_json(sharded / INDEX, weight_map={**index_of(sharded), "model.norm.weight": file})
    refused(sharded, INDEX, "model.norm.weight")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A model in one file."""
    model = tiny("llama")
    folder = save(model, tmp_path)
    torch.save(reference_logits(model, TOKENS), folder / "expected.pt")
    return folder


def change(folder: Path, edit: dict[str, torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **edit}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_a_parameter_never_filled(single: Path, name: str) -> None:
    change(single, {name: None})
    refused(single, name)


def test_a_tensor_of_another_shape(single: Path) -> None:
    change(single, {"model.norm.weight": torch.ones(47)})
    refused(single, "model.norm.weight", "[48]", "[47]")


def test_a_tensor_too_many(single: Path) -> None:
    change(single, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    refused(single, "model.layers.0.self_attn.q_proj.bias")


def test_derived_tensors_do_no_harm(single: Path) -> None:
    change(single, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_loads(single)


def test_a_tied_model_whose_head_differs(single: Path) -> None:
    edit_json(single / "config.json", tie_word_embeddings=True)
    refused(single, "lm_head.weight", "tie_word_embeddings")


def test_stored_types(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    mixed = {
        name: tensor.to([torch.float64, torch.bfloat16, torch.float16][number % 3])
        for number, (name, tensor) in enumerate(tensors.items())
    }
    save_file(mixed, single / "model.safetensors")
    expected = torch.load(single / "expected.pt")
    got = logits_in_chunks(load(str(single), dtype="float32").model, TOKENS, (5,))
    assert (got - expected).abs().max() < 0.2
    change(single, {"model.norm.weight": torch.ones(48, dtype=torch.int32)})
    refused(single, "model.norm.weight", "I32")


def test_a_folder_with_pickles_only(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    refused(single, "safetensors", "pytorch_model.bin")


def test_a_folder_without_a_configuration(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "config.json")


def test_an_unknown_architecture(single: Path) -> None:
    edit_json(single / "config.json", model_type="gpt_tiny")
    refused(single, "gpt_tiny", "llama, mistral, phi3, qwen2", "or a decoder that transformers knows")


def test_a_lora_adapter(single: Path) -> None:
    (single / "config.json").rename(single / "adapter_config.json")
    refused(single, "LoRA")


def test_a_context_longer_than_the_models(single: Path) -> None:
    with pytest.raises(ModelError, match=r"max_model_len must be at most the model's context \(256\), but got 257"):
        load(str(single), max_context=257)
    assert load(str(single), max_context=100).context_len == 100


def test_progress(single: Path) -> None:
    seen: list[tuple[str, float]] = []
    load(str(single), on_progress=lambda phase, share: seen.append((phase, share)))
    assert {phase for phase, _ in seen} == {"reading weights"}
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
