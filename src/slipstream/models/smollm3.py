"""SmolLM3: Llama's shape where every fourth layer has no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from slipstream.models.base import CausalLM
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Style, build_decoder, layer_windows
from slipstream.models.parameters import Parameters
from slipstream.models.reader import Reader
from slipstream.models.registry import ModelType


def build(config: ModelConfig, parameters: Parameters) -> CausalLM:
    """The configuration lists the layers that turn (1) and those that do not (0), or gives the interval of the latter."""
    read = Reader(config.raw, "config.json")
    listed, interval = read.per_layer("no_rope_layers", config.num_layers), read.count("no_rope_layer_interval", 4)
    turns = [(layer + 1) % interval != 0 for layer in range(config.num_layers)] if listed is None else [bool(x) for x in listed]
    if not read.flag("use_sliding_window"):
        config = replace(config, sliding_window=None)
    bias = bool(config.attention_bias)
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        windows=layer_windows(config, lambda layer: not turns[layer]),
        rotary=tuple(0 if turn else None for turn in turns),
    )
    return build_decoder(config, parameters, style)


MODEL = ModelType(build, gguf_interleaved_heads=True)
