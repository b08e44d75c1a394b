"""Finds the builder of a model type: the file of that name in this folder, and its `MODEL`.

Adding a model type is one new file:

    MODEL = ModelType(build)          # build(config, parameters) -> CausalLM
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import slipstream.models
from slipstream.errors import ModelError, shown
from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.parameters import Parameters

_NOT_MODEL_TYPES = frozenset({"base", "config", "parameters", "registry", "decoder"})


@dataclass(frozen=True, slots=True)
class ModelType:
    """What a model file declares.

    Attributes:
        build: makes the model; takes every tensor it needs from the parameters and leaves none.
        gguf_interleaved_heads: GGUF files of this type hold query and key rows in pairs (2i, 2i + 1) instead of halves.
        gguf_names: names of tensors inside a GGUF layer that are this type's own -> the usual name (`attn_q_norm` ->
            `self_attn.q_norm`).
    """

    build: Callable[[ModelConfig, Parameters], CausalLM]
    gguf_interleaved_heads: bool = False
    gguf_names: Mapping[str, str] = field(default_factory=dict)


def known_types() -> tuple[str, ...]:
    """Names of all model types, sorted."""
    found = (module.name for module in pkgutil.iter_modules(slipstream.models.__path__))
    return tuple(sorted(name for name in found if name not in _NOT_MODEL_TYPES))


def find_type(name: str, source: str) -> ModelType:
    """The model type `name`. Raises `ModelError` naming it and listing the known ones."""
    if name not in known_types():
        raise ModelError(f"{source}: model_type must be one of {', '.join(known_types())}, but got {shown(name)}")
    model = importlib.import_module(f"slipstream.models.{name}").MODEL
    assert isinstance(model, ModelType)
    return model
