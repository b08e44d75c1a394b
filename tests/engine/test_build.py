"""How large the KV pool becomes, and what assembling an engine refuses."""

from __future__ import annotations

import pytest
import torch

from slipstream.attention.kv import LayerKV
from slipstream.attention.registry import attention_backend, backend_for, backend_names
from slipstream.config import DEFAULT_MODEL, EngineConfig
from slipstream.engine import build
from slipstream.engine.build import engine_around, pick_device, pick_num_pages
from slipstream.errors import ConfigError
from slipstream.speculate import registry
from slipstream.speculate.base import Drafter
from slipstream.speculate.registry import Target
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.hash_lm import HashLM
from slipstream.weights.loaded import LoadedModel, LoadedText
from tests.cpu_kernels import WHY_NOT

MODEL = HashLM()  # 16 bytes a token


def config(**more: object) -> EngineConfig:
    return EngineConfig(model="in-memory", page_size=16, max_num_seqs=4, **more)


def test_the_pool_is_what_was_asked_for() -> None:
    assert pick_num_pages(MODEL, config(num_pages=7), 1024) == 7
    assert pick_num_pages(MODEL, config(kv_cache_memory_bytes=10 * 256 + 5), 1024) == 10


def test_by_default_it_holds_full_contexts_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_num_pages(MODEL, config(), 1024) == 4 * 64
    monkeypatch.setattr(build, "available_memory_bytes", lambda: 25_600)
    assert pick_num_pages(MODEL, config(), 1024) == int(25_600 * build.KV_MEMORY_SHARE) // 256


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one page of 256 bytes"):
        pick_num_pages(MODEL, config(kv_cache_memory_bytes=255), 1024)


def test_backends_are_found_by_file_name() -> None:
    assert "reference" in backend_names() and not {"base", "kv", "layout", "registry"} & set(backend_names())
    with pytest.raises(ConfigError, match="--attention-backend must be"):
        attention_backend("nope")


@pytest.mark.parametrize(
    ("dtype", "dim", "device", "setting", "ours"),
    [
        (torch.float32, 64, "cpu", "auto", True),
        (torch.bfloat16, 64, "cpu", "exact", True),
        (torch.float64, 64, "cpu", "auto", False),
        (torch.float32, 24, "cpu", "auto", False),
        (torch.float32, 64, "cuda", "auto", False),
        (torch.float32, 64, "cpu", "off", False),
    ],
)
def test_attention_is_our_kernels_where_they_run(dtype: torch.dtype, dim: int, device: str, setting: str, ours: bool) -> None:
    layers = (LayerKV(3, dim, dim, dtype),)
    expected = "cpu" if ours and WHY_NOT is None else "reference"
    assert type(backend_for("auto", layers, device, setting)) is type(attention_backend(expected))
    assert type(backend_for("reference", layers, device, setting)) is type(attention_backend("reference"))


def test_auto_is_the_cpu() -> None:
    assert pick_device("auto").type == "cpu"


@pytest.mark.parametrize(
    ("model", "speculate", "drafters"),
    [(DEFAULT_MODEL, (), ("ngram",)), (DEFAULT_MODEL, ("off",), ("off",)), ("another", (), ())],
)
def test_the_default_model_comes_with_ngram(
    model: str, speculate: tuple[str, ...], drafters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[str, ...]] = []

    def build_drafters(specs: tuple[str, ...], target: Target) -> dict[str, Drafter]:
        built.append(specs)
        return registry.build_drafters(specs, target)

    monkeypatch.setattr(build, "build_drafters", build_drafters)
    settings = EngineConfig(model=model, speculate=speculate, num_pages=8, max_model_len=64)
    text = LoadedText(model, "hash", ByteTokenizer(), None, None, (), {}, MODEL.vocab_size, 64)
    engine_around(LoadedModel(HashLM(), text, 0, MODEL.dtype, 0, {}, "torch"), settings).close()
    assert built == [drafters]
    assert settings.can_draft == (drafters == ("ngram",))
