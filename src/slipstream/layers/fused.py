"""A decoder whose layers are one call of our kernels, where they know all of its parts. `fused` decides it when a model is built.

    all products packed, float32 states,        CpuStep         other attention steps
    an activation and heads that kernels take
      yes: FusedDecoder                         one call        layer by layer, as Decoder
      no:  Decoder                              layer by layer  layer by layer

A single layer that has no norm in front, as those of draft heads, goes the same way: `bare_layer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.attention.cpu import CpuStep
from slipstream.kernels.cpu import decoder as kernel
from slipstream.kernels.cpu.attention import DIM_STEP, MAX_DIM, MIN_DIM
from slipstream.kernels.cpu.matrix import Gate, PackedMatrix
from slipstream.layers.decoder import Attention, Decoder, GatedMLP
from slipstream.layers.linear import GATES, Gated, Product, Side
from slipstream.layers.norm import RMSNorm
from slipstream.types import nothing


class FusedDecoder(Decoder):
    """A decoder with its layers as one call. Made by `fused`.

    What it computes differs from a `Decoder`'s in the last bits: norms, turns and gates are our kernels'. A model keeps to one of
    the two, as its attention backend does.
    """

    def __init__(self, plain: Decoder, layers: kernel.DecoderKernel) -> None:
        super().__init__(
            plain.embedding,
            plain.blocks,
            plain.norm,
            plain.head,
            plain.rotaries,
            plain.context_len,
            plain.logit_softcap,
            plain.kv_layers[0].dtype,
        )
        self.kernel = layers

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.base.CausalLM.forward`."""
        if not isinstance(attention, CpuStep):
            return super().forward(tokens, attention, taps, computes)
        layout, embedded = attention.layout, self.embedding(tokens)
        turns = [rotary.first_tables(max(layout.max_key_lens)) for rotary in self.rotaries]
        return self.kernel.forward(embedded, attention.batch, attention.cache, layout.positions, turns, taps, computes)


def fused(plain: Decoder) -> Decoder:
    """`plain` with its layers as one call, where that can be; else `plain` itself."""
    if plain.dtype != torch.float32 or plain.embedding.device.type != "cpu" or not plain.blocks:
        return plain
    layers = []
    for number, block in enumerate(plain.blocks):
        norms = block.after_attention, block.after_mlp
        layer = _layer(block.attention_norm, block.attention, block.mlp_norm, block.mlp, *norms)
        if layer is None or block.attention.layer != number:
            return plain
        layers.append(layer)
    norm = _norm(plain.norm)
    if norm is None:
        return plain
    return FusedDecoder(plain, kernel.DecoderKernel(layers, norm, len(plain.rotaries)))


def bare_layer(attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> kernel.DecoderKernel | None:
    """One layer whose qkv reads what a pass brings as `first`; None where the kernels do not know all of its parts.

    It has no final norm either: its result is what becomes of the residual, and what the kernel returns means nothing.
    """
    norm, layer = _norm(mlp_norm), _layer(None, attention, mlp_norm, mlp)
    return None if norm is None or layer is None else kernel.DecoderKernel([layer], norm, 1)


def _layer(
    attention_norm: RMSNorm | None,
    attention: Attention,
    mlp_norm: RMSNorm,
    mlp: GatedMLP,
    attention_after: RMSNorm | None = None,
    mlp_after: RMSNorm | None = None,
) -> kernel.Layer | None:
    """None: there is something in the layer that the kernels do not know."""
    dim = attention.head_dim
    if not MIN_DIM <= dim <= MAX_DIM or dim % DIM_STEP:
        return None
    norms = (attention_norm, mlp_norm, attention_after, mlp_after)
    before, between, after_attention, after_mlp = (None if norm is None else _norm(norm) for norm in norms)
    unknown = [norm for norm in norms if norm is not None and _norm(norm) is None]
    qkv, out, inner, down = (_product(one) for one in (attention.qkv, attention.out, mlp.inner, mlp.down))
    if unknown or between is None or qkv is None or out is None or inner is None or down is None:
        return None
    if qkv.gate or out.gate or down.gate:
        return None
    head_norms = None
    if (norm := attention.head_norm) is not None:
        if norm.query.dtype != torch.float32 or norm.key.dtype != torch.float32:
            return None
        head_norms = kernel.Norm(norm.query.contiguous(), norm.eps), kernel.Norm(norm.key.contiguous(), norm.eps)
    return kernel.Layer(
        before,
        after_attention,
        between,
        after_mlp,
        qkv,
        out,
        inner,
        down,
        attention.num_heads,
        attention.num_kv_heads,
        dim,
        head_norms,
        attention.rotary,
        attention.scale,
        attention.softcap,
        attention.window,
    )


def _norm(norm: RMSNorm) -> kernel.Norm | None:
    return kernel.Norm(norm.weight.contiguous(), norm.eps) if norm.weight.dtype == torch.float32 else None


def _product(product: Product) -> kernel.Product | None:
    if isinstance(product, PackedMatrix):
        return kernel.Product((product,))
    if isinstance(product, Gated):
        gate, both = GATES.get(product.activation, Gate.NONE), _product(product.gate_up)
        return None if both is None or both.gate or gate is Gate.NONE else kernel.Product(both.parts, gate)
    if isinstance(product, Side):
        parts = tuple(part for part in product.parts if isinstance(part, PackedMatrix))
        return kernel.Product(parts) if len(parts) == len(product.parts) else None
    return None
