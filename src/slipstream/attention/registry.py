"""Finds an attention backend by name: attention/<name>.py with a `build` function. A new backend is a new file and no edit."""

from __future__ import annotations

import importlib
import pkgutil

import slipstream.attention
from slipstream.attention.base import AttentionBackend
from slipstream.errors import ConfigError

_NOT_BACKENDS = frozenset({"base", "kv", "layout", "registry"})


def backend_names() -> tuple[str, ...]:
    """Values of --attention-backend besides `auto`."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(slipstream.attention.__path__) if m.name not in _NOT_BACKENDS))


def attention_backend(name: str) -> AttentionBackend:
    """The backend of that name; `auto` is the reference for now."""
    chosen = "reference" if name == "auto" else name
    if chosen not in backend_names():
        raise ConfigError(f"--attention-backend must be auto or one of {', '.join(backend_names())}, but got {name!r}")
    backend: AttentionBackend = importlib.import_module(f"slipstream.attention.{chosen}").build()
    return backend
