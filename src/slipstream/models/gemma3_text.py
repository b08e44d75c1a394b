"""Gemma 3, its text side: norms before and behind each part, norms of query and key heads, most layers windowed.

layer     0 1 2 3 4 5 6 7 ...        with a pattern of 6
window    w w w w w · w w            windowed layers turn by the local base, the others by the global one
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.layers.rope import RopeSpec
from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Style, build_decoder, layer_windows
from slipstream.models.parameters import Parameters
from slipstream.models.reader import Reader
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """Raises `ModelError` for attention in both directions, which embedding models have."""
    read = Reader(config.raw, "config.json")
    if read.flag("use_bidirectional_attention"):
        raise read.wrong("use_bidirectional_attention", "be false", True, "such models embed; they do not generate")
    pattern = read.count("sliding_window_pattern", read.count("_sliding_window_pattern", 6))

    def windowed(layer: int) -> bool:
        return (layer + 1) % pattern != 0

    if config.sliding_window is None:
        local = (False,) * config.num_layers
    elif config.layer_types is None:
        local = tuple(windowed(layer) for layer in range(config.num_layers))
    else:
        local = tuple(kind == "sliding_attention" for kind in config.layer_types)
    bias = bool(config.attention_bias)
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        after_norms=True,
        norms_add_one=True,
        embedding_scale=config.hidden_size**0.5,
        scale=(read.positive("query_pre_attn_scalar") or 256.0) ** -0.5,
        softcap=read.positive("attn_logit_softcapping"),
        logit_softcap=read.positive("final_logit_softcapping"),
        windows=layer_windows(config, windowed),
        ropes=(config.rope, config.local_rope or RopeSpec(10000.0)),
        rotary=tuple(int(one) for one in local),
    )
    return build_decoder(replace(config, hidden_act=config.hidden_act or "gelu_pytorch_tanh"), parameters, style)


MODEL = ModelType(
    build,
    gguf_names={
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    gguf_shifted_norms=True,
)
