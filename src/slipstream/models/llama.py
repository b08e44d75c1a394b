"""Llama and what has its shape: SmolLM2, Llama 2 and 3, and others that name themselves so."""

from __future__ import annotations

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import build_decoder
from slipstream.models.parameters import Parameters
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """Biases everywhere in the attention, or (as nearly always) nowhere."""
    bias = bool(config.attention_bias)
    return build_decoder(config, parameters, qkv_bias=bias, out_bias=bias)


MODEL = ModelType(build, gguf_interleaved_heads=True)
