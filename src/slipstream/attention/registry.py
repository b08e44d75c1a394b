"""Finds an attention backend by name: attention/<name>.py with a `build` function. A new backend is a new file and no edit."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Sequence

import slipstream.attention
from slipstream.attention.base import AttentionBackend
from slipstream.attention.kv import LayerKV
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.library import kernels

_NOT_BACKENDS = frozenset({"base", "kv", "layout", "registry"})

logger = logging.getLogger("slipstream.attention")


def backend_names() -> tuple[str, ...]:
    """Values of --attention-backend besides `auto`."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(slipstream.attention.__path__) if m.name not in _NOT_BACKENDS))


def attention_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises `ConfigError` where there is none, or it cannot run here."""
    if name not in backend_names():
        raise ConfigError(f"--attention-backend must be auto or one of {', '.join(backend_names())}, but got {name!r}")
    backend: AttentionBackend = importlib.import_module(f"slipstream.attention.{name}").build()
    return backend


def backend_for(name: str, layers: Sequence[LayerKV], device: str, cpu_kernels: str) -> AttentionBackend:
    """The backend of that name, for `layers` on a device of that kind.

    `auto` is our kernels where they run, `cpu_kernels` (of --cpu-kernels) lets them and they take the layers; else the reference.
    Raises `ConfigError` for another one that does not take the layers.
    """
    if name != "auto":
        backend = attention_backend(name)
        backend.check(layers)
        return backend
    if device == "cpu" and cpu_kernels != "off" and kernels() is not None:
        backend = attention_backend("cpu")
        try:
            backend.check(layers)
        except ConfigError as error:
            logger.info("attention runs on the reference backend: %s", error.message)
        else:
            return backend
    return attention_backend("reference")
