"""Typed look-ups in a JSON object, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError, shown


class Reader:
    """Reads `raw`, the object in `source`. A key that is null counts as missing; every method raises `ModelError`."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw = raw
        self._source = source

    def wrong(self, key: str, must: str, given: object, hint: str | None = None) -> ModelError:
        """The error that says what `key` must be."""
        return ModelError(f"{self._source}: {key} must {must}, but got {shown(given)}", hint=hint)

    def _get(self, key: str, default: object) -> Any:
        value = self._raw.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self._source}: {key} must be given, but it is missing")
            return default
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"be an integer of at least {least}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, "be a finite number", value)
        return float(value)

    def positive(self, key: str) -> float | None:
        """A number above 0, or None where it is not given."""
        if self._raw.get(key) is None:
            return None
        value = self.number(key)
        if not value > 0:
            raise self.wrong(key, "be above 0", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "be a string", value)
        return value

    def flag(self, key: str) -> bool | None:
        """True or false, or None where it is not given."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "be true or false", value)
        return value

    def per_layer(self, key: str, num_layers: int) -> list[Any] | None:
        """A list with one entry a layer, or None where it is not given."""
        value = self._raw.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != num_layers):
            raise self.wrong(key, f"be a list of {num_layers}", value)
        return value
