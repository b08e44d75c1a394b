"""Builds the shared decoder from a checkpoint's tensors under their usual names."""

from __future__ import annotations

import torch

from slipstream.errors import ModelError, shown
from slipstream.layers.decoder import Attention, Block, Decoder, GatedMLP
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Product, linear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rotary import Rotary
from slipstream.models.config import ModelConfig
from slipstream.models.parameters import Parameters


def build_decoder(config: ModelConfig, parameters: Parameters, *, qkv_bias: bool, out_bias: bool) -> Decoder:
    """The decoder of `config`, filled. Raises `ModelError` for what the shared layers do not do."""
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(
            f"hidden_act must be silu, but got {shown(config.hidden_act)}", hint="other activations are not supported yet"
        )
    if config.sliding_window is not None and config.sliding_window < config.context_len:
        raise ModelError(
            f"sliding_window must be at least the context ({config.context_len}), but got {config.sliding_window}",
            hint=f"sliding windows are not supported yet; --max-model-len {config.sliding_window} makes the window irrelevant",
        )
    embedding = parameters.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    blocks = tuple(_block(config, parameters, layer, qkv_bias, out_bias) for layer in range(config.num_layers))
    norm = RMSNorm(parameters.take("model.norm.weight", (config.hidden_size,)), config.norm_eps)
    head = _head(config, parameters, embedding)
    rotary = Rotary(config.rope, config.head_dim, parameters.device)
    return Decoder(Embedding(embedding), blocks, norm, linear([head]), rotary, config.context_len)


def _head(config: ModelConfig, parameters: Parameters, embedding: torch.Tensor) -> torch.Tensor:
    name = "lm_head.weight"
    if config.tie_word_embeddings is None and name not in parameters:
        return embedding
    if config.tie_word_embeddings and name not in parameters:
        return embedding
    head = parameters.take(name, (config.vocab_size, config.hidden_size))
    if not config.tie_word_embeddings:
        return head
    if not torch.equal(head, embedding):
        raise ModelError(
            f"{name} must equal model.embed_tokens.weight where tie_word_embeddings is true, but it differs",
            hint="set tie_word_embeddings to false if the head is its own",
        )
    parameters.num_parameters -= head.numel()
    return embedding


def _block(config: ModelConfig, parameters: Parameters, layer: int, qkv_bias: bool, out_bias: bool) -> Block:
    prefix = f"model.layers.{layer}."
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim

    def product(outputs: dict[str, int], into: int, bias: bool) -> Product:
        weights = [parameters.take(f"{prefix}{name}.weight", (out, into)) for name, out in outputs.items()]
        biases = [parameters.take(f"{prefix}{name}.bias", (out,)) for name, out in outputs.items() if bias]
        return linear(weights, biases)

    qkv = product({"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}, hidden, qkv_bias)
    out = product({"self_attn.o_proj": hidden}, heads, out_bias)
    gate_up = product({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias)
    down = product({"mlp.down_proj": hidden}, inner, config.mlp_bias)
    return Block(
        RMSNorm(parameters.take(f"{prefix}input_layernorm.weight", (hidden,)), config.norm_eps),
        Attention(layer, qkv, out, config.num_heads, config.num_kv_heads, dim),
        RMSNorm(parameters.take(f"{prefix}post_attention_layernorm.weight", (hidden,)), config.norm_eps),
        GatedMLP(gate_up, down),
    )
