"""Mistral: Llama's shape without biases; all layers may have a sliding window."""

from __future__ import annotations

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Style, build_decoder, layer_windows
from slipstream.models.parameters import Parameters
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """No biases."""
    return build_decoder(config, parameters, Style(windows=layer_windows(config)))


MODEL = ModelType(build, gguf_interleaved_heads=True)
