"""Qwen2 and Qwen2.5: Llama's shape with biases on query, key and value."""

from __future__ import annotations

from dataclasses import replace

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Style, build_decoder, layer_windows
from slipstream.models.parameters import Parameters
from slipstream.models.reader import Reader
from slipstream.models.registry import ModelType


def upper_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Windows in the layers from max_window_layers on, where use_sliding_window asks for them."""
    if not config.raw.get("use_sliding_window"):  # off unless said, unlike Mistral's
        config = replace(config, sliding_window=None)
    first = Reader(config.raw, "config.json").count("max_window_layers", 28, least=0)
    return layer_windows(config, lambda layer: layer >= first)


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """Biases on query, key and value; none on the output."""
    return build_decoder(config, parameters, Style(qkv_bias=True, windows=upper_windows(config)))


MODEL = ModelType(build)
