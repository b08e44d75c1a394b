"""Llama and what has its shape: SmolLM2, Llama 2 and 3, and others that name themselves so."""

from __future__ import annotations

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Style, build_decoder, layer_windows
from slipstream.models.parameters import Parameters
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """Biases everywhere in the attention, or (as nearly always) nowhere."""
    bias = bool(config.attention_bias)
    return build_decoder(config, parameters, Style(qkv_bias=bias, out_bias=bias, windows=layer_windows(config)))


MODEL = ModelType(build, gguf_interleaved_heads=True)
