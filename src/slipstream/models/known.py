"""Which model types have a file of their own in this folder. Imports no torch: the front process asks too."""

from __future__ import annotations

import pkgutil

import slipstream.models

_NOT_MODEL_TYPES = frozenset(
    {"base", "config", "decoder", "known", "parameters", "reader", "registry", "rope_config", "transformers_fallback"}
)


def known_types() -> tuple[str, ...]:
    """Names of all model types, sorted."""
    found = (module.name for module in pkgutil.iter_modules(slipstream.models.__path__))
    return tuple(sorted(name for name in found if name not in _NOT_MODEL_TYPES))
