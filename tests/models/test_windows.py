"""Sliding windows: harmless where they cover the context, refused by name where they would cut it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import ModelError
from slipstream.weights import load
from tests.tiny_checkpoints import edit_json, save, tiny


def test_a_window_smaller_than_the_context_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("mistral", sliding_window=64), tmp_path)
    with pytest.raises(ModelError, match="sliding_window must be at least the context") as caught:
        load(str(folder))
    assert "--max-model-len 64" in str(caught.value)


def test_a_context_within_the_window_is_served(tmp_path: Path) -> None:
    folder = save(tiny("mistral", sliding_window=64), tmp_path)
    loaded = load(str(folder), max_context=64)
    assert loaded.context_len == loaded.model.context_len == 64


@pytest.mark.parametrize("use", [None, False])
def test_qwen2_has_no_window_unless_it_says_so(use: bool | None, tmp_path: Path) -> None:
    folder = save(tiny("qwen2"), tmp_path)
    edit_json(folder / "config.json", sliding_window=64, use_sliding_window=use, layer_types=None, max_window_layers=0)
    assert load(str(folder)).context_len == 256


def test_qwen2_with_a_window_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("qwen2"), tmp_path)
    edit_json(folder / "config.json", sliding_window=64, use_sliding_window=True, layer_types=None, max_window_layers=0)
    with pytest.raises(ModelError, match="sliding_window"):
        load(str(folder))
