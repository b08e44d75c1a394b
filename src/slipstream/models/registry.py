"""Finds the builder of a model type: the file of that name in this folder, and its `MODEL`.

Adding a model type is one new file:

    MODEL = ModelType(build)          # build(config, parameters) -> CausalLM
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.errors import ModelError, shown
from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.known import known_types
from slipstream.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class ModelType:
    """What a model file declares.

    Attributes:
        build: makes the model; takes every tensor it needs from the parameters and leaves none.
        gguf_interleaved_heads: GGUF files of this type hold query and key rows in pairs (2i, 2i + 1) instead of halves.
        gguf_names: names of tensors inside a GGUF layer that are this type's own -> the usual name (`attn_q_norm` ->
            `self_attn.q_norm`).
        gguf_shifted_norms: GGUF files of this type hold norm weights with 1 added.
    """

    build: Callable[[ModelConfig, Parameters], CausalLM]
    gguf_interleaved_heads: bool = False
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_shifted_norms: bool = False


def find_type(name: str, source: str) -> ModelType:
    """The model type `name`. Raises `ModelError` naming it and listing the known ones."""
    if name not in known_types():
        raise ModelError(f"{source}: model_type must be one of {', '.join(known_types())}, but got {shown(name)}")
    model = importlib.import_module(f"slipstream.models.{name}").MODEL
    assert isinstance(model, ModelType)
    return model
