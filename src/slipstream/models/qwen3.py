"""Qwen3: Llama's shape with norms of each query and key head."""

from __future__ import annotations

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Style, build_decoder
from slipstream.models.parameters import Parameters
from slipstream.models.qwen2 import upper_windows
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """Biases everywhere in the attention, or (as nearly always) nowhere."""
    bias = bool(config.attention_bias)
    style = Style(qkv_bias=bias, out_bias=bias, head_norms=True, windows=upper_windows(config))
    return build_decoder(config, parameters, style)


MODEL = ModelType(build, gguf_names={"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
