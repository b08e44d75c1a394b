"""Sliding windows and softcaps: logits equal transformers' beyond the window, however the tokens are fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models.base import CausalLM
from slipstream.weights import load
from tests.paged import logits_in_chunks, path_of, tree_logits
from tests.tiny_checkpoints import edit_json, reference_logits, save, tiny

IDS = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(1))
# Each smaller than the 60 tokens, some smaller than a chunk.
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 9}),
    "mistral, window 1": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}),
    "gemma3": ("gemma3_text", {"sliding_window": 5}),
    "smollm3": ("smollm3", {"sliding_window": 9, "use_sliding_window": True}),
    "phi3": ("phi3", {"sliding_window": 9}),
}


def loaded(model: Any, folder: Path, dtype: str = "float64") -> CausalLM:
    return load(str(save(model, folder)), dtype=dtype).model


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("chunks", [(60,), (17, 20), ()])
def test_beyond_the_window(name: str, chunks: tuple[int, ...], tmp_path: Path) -> None:
    family, settings = WINDOWED[name]
    model = tiny(family, dtype=torch.float64, **settings)
    wanted = reference_logits(model, IDS)
    torch.testing.assert_close(logits_in_chunks(loaded(model, tmp_path), IDS, chunks), wanted, rtol=0, atol=1e-9)


def test_a_window_matters(tmp_path: Path) -> None:
    """The comparisons above would not pass without the window."""
    model = tiny("mistral", dtype=torch.float64, sliding_window=9)
    wanted = reference_logits(model, IDS)
    folder = save(model, tmp_path)
    edit_json(folder / "config.json", sliding_window=None)
    got = logits_in_chunks(load(str(folder), dtype="float64").model, IDS, (60,))
    assert (got[:9] - wanted[:9]).abs().max() < 1e-9 < 1e-2 < (got[9:] - wanted[9:]).abs().max()


def test_layers_listed_one_by_one(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny("qwen3", dtype=torch.float64, sliding_window=9, use_sliding_window=True, layer_types=kinds)
    wanted = reference_logits(model, IDS)
    torch.testing.assert_close(logits_in_chunks(loaded(model, tmp_path), IDS, (30,)), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("kinds", "must"),
    [
        (["full_attention"], "list of 3"),
        (["full_attention", "linear_attention", "full_attention"], "full_attention and sliding_attention only"),
        ("full_attention", "list of 3"),
    ],
)
def test_other_kinds_of_layers_are_refused(kinds: object, must: str, tmp_path: Path) -> None:
    folder = save(tiny("qwen3"), tmp_path)
    edit_json(folder / "config.json", layer_types=kinds)
    with pytest.raises(ModelError, match=must):
        load(str(folder))


@pytest.mark.parametrize("use", [None, False])
def test_qwen2_has_no_window_unless_it_says_so(use: bool | None, tmp_path: Path) -> None:
    model = tiny("qwen2", dtype=torch.float64)
    wanted, folder = reference_logits(model, IDS), save(model, tmp_path)
    edit_json(folder / "config.json", sliding_window=9, use_sliding_window=use, layer_types=None, max_window_layers=0)
    torch.testing.assert_close(logits_in_chunks(load(str(folder), dtype="float64").model, IDS, (60,)), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunks", [(60,), (17, 20), ()])
def test_gemma3_softcaps(chunks: tuple[int, ...], tmp_path: Path) -> None:
    """The reference takes the scores' cap as an argument of its eager attention, whose softmax is float32's."""
    model = tiny("gemma3_text", attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    model.set_attn_implementation("eager")
    wanted = reference_logits(model, IDS, softcap=2.0)
    assert wanted.abs().max() < 3.0
    assert (wanted - reference_logits(model, IDS)).abs().max() > 1e-2, "the cap must matter"
    torch.testing.assert_close(logits_in_chunks(loaded(model, tmp_path, "float32"), IDS, chunks), wanted, rtol=0, atol=1e-4)


def test_gemma3_both_ways_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("gemma3_text"), tmp_path)
    edit_json(folder / "config.json", use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="use_bidirectional_attention must be false"):
        load(str(folder))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "smollm3"])
@pytest.mark.parametrize("length", [3, 20])
def test_each_node_of_a_tree_is_the_end_of_its_path(name: str, length: int, tmp_path: Path) -> None:
    """A node's logits are those of the prompt and its path alone: positions and windows follow the path, not the places.

    root ┬─ 1 ─── 3 ─── 6
         ├─ 2 ┬─ 4 ─── 7
         │    └─ 5
    """
    family, settings = WINDOWED[name]
    model = tiny(family, dtype=torch.float64, **{**settings, "sliding_window": 3})
    ours = loaded(model, tmp_path)
    parents = [0, 0, 1, 2, 2, 3, 4]
    prompt, nodes = IDS[:length], IDS[length : length + 8]
    got = tree_logits(ours, prompt, nodes, parents)
    for node in range(8):
        wanted = reference_logits(model, torch.cat([prompt, nodes[path_of(node, parents)]]))[-1]
        torch.testing.assert_close(got[node], wanted, rtol=0, atol=1e-9)
