"""Phi-3, Phi-3.5 and Phi-4 mini: Llama's shape with fused products; heads may turn in part."""

from __future__ import annotations

from slipstream.errors import ModelError, shown
from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Style, build_decoder, layer_windows
from slipstream.models.parameters import Parameters
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """Raises `ModelError` for scaling other than longrope, which these models mean by other names too."""
    if config.rope.kind not in ("default", "longrope"):
        raise ModelError(f"rope scaling of phi3 must be longrope, but got {shown(config.rope.kind)}")
    style = Style(fused=True, partial_rotary=True, windows=layer_windows(config))
    return build_decoder(config, parameters, style)


MODEL = ModelType(build, gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
