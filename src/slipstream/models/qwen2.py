"""Qwen2 and Qwen2.5: Llama's shape with biases on query, key and value."""

from __future__ import annotations

from dataclasses import replace

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import build_decoder
from slipstream.models.parameters import Parameters
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """Biases on query, key and value; none on the output."""
    if not config.raw.get("use_sliding_window"):  # off unless said, unlike Mistral's
        config = replace(config, sliding_window=None)
    return build_decoder(config, parameters, qkv_bias=True, out_bias=False)


MODEL = ModelType(build)
