"""Builds the shared decoder from a checkpoint's tensors under their usual names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ModelError, shown
from slipstream.kernels.cpu.matrix import PackedMatrix
from slipstream.kernels.formats import Matrix, same_values
from slipstream.layers.activation import ACTIVATIONS
from slipstream.layers.decoder import Attention, Block, Decoder, GatedMLP
from slipstream.layers.embedding import Embedding
from slipstream.layers.fused import fused
from slipstream.layers.linear import Product, gated, linear
from slipstream.layers.norm import HeadNorm, RMSNorm
from slipstream.layers.rope import RopeSpec
from slipstream.layers.rotary import Rotary
from slipstream.models.config import ModelConfig
from slipstream.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Style:
    """How a model type departs from Llama's shape. The defaults are Llama's.

    Attributes:
        qkv_bias, out_bias: biases of the attention's products.
        fused: query, key and value are one tensor (`qkv_proj`), gate and up another (`gate_up_proj`).
        head_norms: queries and keys are normalised head by head (`q_norm`, `k_norm`).
        after_norms: further norms behind the attention and the MLP, named as Gemma's are.
        norms_add_one: norms multiply by 1 + weight.
        embedding_scale: what embeddings are multiplied by.
        scale: of the scores; None: head_dim^-0.5.
        softcap, logit_softcap: of the scores and of the logits.
        partial_rotary: heads may turn in part.
        windows: of each layer; empty: none has one.
        ropes: rotary embeddings; empty: the configuration's alone.
        rotary: which of them turns each layer, or None; empty: the first turns all.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False
    head_norms: bool = False
    after_norms: bool = False
    norms_add_one: bool = False
    embedding_scale: float = 1.0
    scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    partial_rotary: bool = False
    windows: tuple[int | None, ...] = ()
    ropes: tuple[RopeSpec, ...] = ()
    rotary: tuple[int | None, ...] = ()


def layer_windows(config: ModelConfig, windowed: Callable[[int], bool] = lambda layer: True) -> tuple[int | None, ...]:
    """The window of each layer: of those that the configuration lists as windowed, else of those that `windowed` names."""
    types = config.layer_types
    return tuple(
        config.sliding_window if (windowed(layer) if types is None else types[layer] == "sliding_attention") else None
        for layer in range(config.num_layers)
    )


def build_decoder(config: ModelConfig, parameters: Parameters, style: Style) -> Decoder:
    """The decoder of `config`, filled. Raises `ModelError` for what the shared layers do not do."""
    ropes = style.ropes or (config.rope,)
    for rope in ropes:
        _check_rope(rope, config, style)
    builder = _Builder(config, parameters, style)
    embedding = parameters.take_matrix("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), sensitive=True)
    holding = parameters.holding
    blocks = tuple(builder.block(layer) for layer in range(config.num_layers))
    norm = builder.norm("model.norm")
    weight = _head(config, parameters, embedding)
    head = linear([weight], dtype=holding.dtype, arithmetic=holding.arithmetic)
    table = head if weight is embedding and isinstance(head, PackedMatrix) else embedding  # one copy is enough
    decoder = Decoder(
        Embedding(table, style.embedding_scale, holding.dtype),
        blocks,
        norm,
        head,
        tuple(Rotary(rope, config.head_dim, parameters.device) for rope in ropes),
        config.context_len,
        style.logit_softcap,
        holding.kv_dtype,
    )
    return fused(decoder)


def _check_rope(rope: RopeSpec, config: ModelConfig, style: Style) -> None:
    if rope.rotary_share != 1 and not style.partial_rotary:
        raise ModelError(
            f"partial_rotary_factor must be 1 for {config.model_type}, but got {rope.rotary_share:g}",
            hint="partly rotated heads are not supported for this type",
        )
    if rope.kind == "longrope" and config.context_len > rope.original_context_len:
        raise ModelError(
            f"the context must be at most {rope.original_context_len} with longrope, but got {config.context_len}",
            hint=f"beyond it the whole past would have to turn anew; --max-model-len {rope.original_context_len} serves the rest",
        )


def _head(config: ModelConfig, parameters: Parameters, embedding: Matrix) -> Matrix:
    name = "lm_head.weight"
    if config.tie_word_embeddings is None and name not in parameters:
        return embedding
    if config.tie_word_embeddings and name not in parameters:
        return embedding
    head = parameters.take_matrix(name, (config.vocab_size, config.hidden_size), sensitive=True)
    if not config.tie_word_embeddings:
        return head
    if not same_values(head, embedding):
        raise ModelError(
            f"{name} must equal model.embed_tokens.weight where tie_word_embeddings is true, but it differs",
            hint="set tie_word_embeddings to false if the head is its own",
        )
    parameters.untake(head)
    return embedding


class _Builder:
    """Makes the layers of one decoder."""

    def __init__(self, config: ModelConfig, parameters: Parameters, style: Style) -> None:
        self._config = config
        self._parameters = parameters
        self._style = style
        activation = config.hidden_act or "silu"
        if activation not in ACTIVATIONS:
            raise ModelError(
                f"hidden_act must be one of {', '.join(ACTIVATIONS)}, but got {shown(activation)}",
                hint="other activations are not supported yet",
            )
        self._activation = ACTIVATIONS[activation]

    def norm(self, name: str) -> RMSNorm:
        """A norm of the residual."""
        return RMSNorm(self._norm_weight(name, self._config.hidden_size), self._config.norm_eps)

    def block(self, layer: int) -> Block:
        """One layer."""
        config, style, prefix = self._config, self._style, f"model.layers.{layer}."
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = {"mlp.gate_up_proj": 2 * inner} if style.fused else {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        holding = self._parameters.holding
        mlp = GatedMLP(
            gated(
                *self._matrices(prefix, gate_up, hidden, config.mlp_bias),
                self._activation,
                dtype=holding.dtype,
                arithmetic=holding.arithmetic,
            ),
            self._product(prefix, {"mlp.down_proj": hidden}, inner, config.mlp_bias),
        )
        before, attention = self.norm(f"{prefix}input_layernorm"), self._attention(layer, prefix)
        if not style.after_norms:
            return Block(before, attention, self.norm(f"{prefix}post_attention_layernorm"), mlp)
        return Block(
            before,
            attention,
            self.norm(f"{prefix}pre_feedforward_layernorm"),
            mlp,
            self.norm(f"{prefix}post_attention_layernorm"),
            self.norm(f"{prefix}post_feedforward_layernorm"),
        )

    def _attention(self, layer: int, prefix: str) -> Attention:
        config, style, dim = self._config, self._style, self._config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if style.fused:
            names = {"self_attn.qkv_proj": (heads + 2 * kv_heads) * dim}
        else:
            names = {"self_attn.q_proj": heads * dim, "self_attn.k_proj": kv_heads * dim, "self_attn.v_proj": kv_heads * dim}
        norm = None
        if style.head_norms:
            query, key = (self._norm_weight(f"{prefix}self_attn.{name}", dim) for name in ("q_norm", "k_norm"))
            norm = HeadNorm(query, key, heads, kv_heads, config.norm_eps)
        return Attention(
            layer,
            self._product(prefix, names, config.hidden_size, style.qkv_bias),
            self._product(prefix, {"self_attn.o_proj": config.hidden_size}, heads * dim, style.out_bias),
            heads,
            kv_heads,
            dim,
            style.scale or dim**-0.5,
            norm,
            style.rotary[layer] if style.rotary else 0,
            style.windows[layer] if style.windows else None,
            style.softcap,
        )

    def _product(self, prefix: str, outputs: dict[str, int], into: int, bias: bool) -> Product:
        holding = self._parameters.holding
        weights, biases = self._matrices(prefix, outputs, into, bias)
        return linear(weights, biases, dtype=holding.dtype, arithmetic=holding.arithmetic)

    def _matrices(self, prefix: str, outputs: dict[str, int], into: int, bias: bool) -> tuple[list[Matrix], list[Tensor]]:
        take = self._parameters
        weights = [take.take_matrix(f"{prefix}{name}.weight", (out, into)) for name, out in outputs.items()]
        return weights, [take.take(f"{prefix}{name}.bias", (out,)) for name, out in outputs.items() if bias]

    def _norm_weight(self, name: str, size: int) -> Tensor:
        weight = self._parameters.take(f"{name}.weight", (size,))
        if not self._style.norms_add_one:
            return weight
        return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))  # in a half type 1 + w would lose most of w
