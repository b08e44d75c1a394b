"""Mistral: Llama's shape without biases; its sliding window must cover the context."""

from __future__ import annotations

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import build_decoder
from slipstream.models.parameters import Parameters
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """No biases."""
    return build_decoder(config, parameters, qkv_bias=False, out_bias=False)


MODEL = ModelType(build, gguf_interleaved_heads=True)
