"""Decoders of every kind, fed with sequences over paged KV in any pieces; and their layers kernel by kernel, as an oracle."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.cpu import CpuBackend, CpuStep
from slipstream.kernels.cpu.attention import Turn
from slipstream.kernels.cpu.matrix import PackedMatrix
from slipstream.kernels.cpu.rows import RowKernels
from slipstream.kernels.formats import Format
from slipstream.layers.activation import ACTIVATIONS
from slipstream.layers.decoder import Attention, Block, Decoder, GatedMLP
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import GATES, Arithmetic, Gated, Product, Side, gated, linear
from slipstream.layers.norm import HeadNorm, RMSNorm
from slipstream.layers.rope import RopeSpec
from slipstream.layers.rotary import Rotary
from slipstream.weights import load
from tests.kernels.emulate import Matrix, random_matrix
from tests.kernels.paged_world import PagedWorld, Part
from tests.tiny_checkpoints import save, tiny

# Sizes that every format takes.
_SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama of one head a KV head": ("llama", {"num_key_value_heads": 6, "head_dim": 48, "num_attention_heads": 6}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3_text": ("gemma3_text", {}),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {"sliding_window": 6, "partial_rotary_factor": 0.5}),
}
# dtype and quantization of a holding.
HOLDINGS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "q8": ("float32", "q8"),
    "q4": ("float32", "q4"),
}


@cache
def _folder(name: str) -> Path:
    family, own = MODELS[name]
    folder = Path(tempfile.mkdtemp(prefix="slipstream-decoder-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save(tiny(family, **{**_SIZES, **own}), folder)


@cache
def model(name: str, holding: str = "float32", cpu_kernels: str = "auto", kv: str = "auto") -> Decoder:
    """A model that the loader made."""
    dtype, quantization = HOLDINGS[holding]
    loaded = load(str(_folder(name)), dtype=dtype, quantization=quantization, cpu_kernels=cpu_kernels, kv_cache_dtype=kv)
    assert isinstance(loaded.model, Decoder)
    return loaded.model


def everything(
    form: Format,
    other: Format = Format.Q8,
    kv: torch.dtype = torch.bfloat16,
    arithmetic: Arithmetic = Arithmetic.KERNELS,
    activation: str = "silu",
) -> Decoder:
    """A plain decoder, not fused, with all that layers may have, and matrices of two formats."""
    hidden, inner, heads, kv_heads, dim, vocab = 96, 128, 4, 2, 32, 50
    g = torch.Generator().manual_seed(5)
    seeds = iter(range(1000))
    ropes = RopeSpec(theta=100.0), RopeSpec(theta=10000.0, rotary_share=0.5)

    def matrix(kind: Format, out: int, inputs: int) -> Matrix:
        return random_matrix(kind, out, inputs, next(seeds))

    def bias(size: int) -> Tensor:
        return torch.randn(size, generator=g)

    def norm(size: int = hidden) -> Tensor:
        return torch.rand(size, generator=g) + 0.5

    def block(layer: int) -> Block:
        sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
        kinds = ((form, form, other), (form, other, form), (form, form, form))[layer]
        parts = [matrix(kind, size, hidden) for kind, size in zip(kinds, sizes, strict=True)]
        attention = Attention(
            layer,
            linear(parts, [bias(size) for size in sizes], arithmetic=arithmetic),
            linear([matrix(form, hidden, heads * dim)], [bias(hidden)], arithmetic=arithmetic),
            heads,
            kv_heads,
            dim,
            dim**-0.5,
            HeadNorm(norm(dim), norm(dim), heads, kv_heads, 1e-6) if layer != 1 else None,
            (0, 1, None)[layer],
            (None, 5, 70)[layer],
            (8.0, None, 3.0)[layer],
        )
        gate_up = [matrix(form, inner, hidden), matrix(form if layer != 1 else other, inner, hidden)]
        mlp = GatedMLP(
            gated(gate_up, [bias(inner), bias(inner)], ACTIVATIONS[activation], arithmetic=arithmetic),
            linear([matrix(other, hidden, inner)], [bias(hidden)], arithmetic=arithmetic),
        )
        after = [RMSNorm(norm(), 1e-5) if layer != there else None for there in (0, 1)]
        return Block(RMSNorm(norm(), 1e-5), attention, RMSNorm(norm(), 1e-6), mlp, *after)

    return Decoder(
        Embedding(torch.randn(vocab, hidden, generator=g)),
        tuple(block(layer) for layer in range(3)),
        RMSNorm(norm(), 1e-5),
        linear([matrix(form, vocab, hidden)], arithmetic=arithmetic),
        tuple(Rotary(rope, dim, torch.device("cpu")) for rope in ropes),
        512,
        kv_dtype=kv,
    )


class DecoderWorld(PagedWorld):
    """Sequences over the KV of a decoder. `fused`: as the model is, else layer by layer."""

    def __init__(self, model: Decoder, num_sequences: int = 1, max_len: int = 160, *, fused: bool = True) -> None:
        super().__init__(model.kv_layers, num_sequences, max_len, seed=1)
        self.model, self._fused = model, fused
        self.backend = CpuBackend()

    def begin(self, *parts: Part[Tensor]) -> CpuStep:
        return self.backend.begin(self.layout(parts), self.kv)

    @torch.inference_mode()
    def feed(self, *parts: Part[Tensor], taps: tuple[int, ...] = ()) -> tuple[list[Tensor], list[Tensor] | None]:
        """One pass: [tokens, hidden] of each part and, with taps, their states."""
        step, tokens = self.begin(*parts), torch.cat([part.tokens for part in parts])
        forward = type(self.model).forward if self._fused else Decoder.forward
        hidden, states = forward(self.model, tokens, step, taps)
        sizes = [len(part.tokens) for part in parts]
        return list(hidden.split(sizes)), None if states is None else list(states.split(sizes))


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (count,), generator=torch.Generator().manual_seed(seed))


def whole(model: Decoder, of: Tensor, fused: bool = True) -> Tensor:
    """Hidden states of a sequence as one prompt, alone: what all other ways must repeat."""
    return DecoderWorld(model, fused=fused).feed(Part(0, 0, of, chunk=True))[0][0]


@torch.inference_mode()
def kernel_by_kernel(model: Decoder, ids: Tensor, step: CpuStep, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What a fused decoder computes, by the same kernels called one at a time."""
    rows = RowKernels()
    x = model.embedding(ids)
    turns = [rotary.tables(step.layout.positions) for rotary in model.rotaries]
    entering = []
    for number, block in enumerate(model.blocks):
        entering.append(x)
        attention, heads, kv_heads = block.attention, block.attention.num_heads, block.attention.num_kv_heads
        qkv = _product(rows, attention.qkv, rows.rmsnorm(x, block.attention_norm.weight, block.attention_norm.eps))
        qkv = qkv.view(len(ids), -1, attention.head_dim)
        norm = attention.head_norm
        norms = (None, None, 0.0) if norm is None else (norm.query, norm.key, norm.eps)
        turn = None
        if attention.rotary is not None:
            turn = Turn(*turns[attention.rotary], *norms)
        elif norm is not None:
            turn = Turn(x[:, :0], x[:, :0], *norms)
        query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        how = attention.scale, attention.window, attention.softcap
        mixed = step.batch.attend(step.cache.layers[number], query, key, value, *how, turn).flatten(1)
        x = x + _after(rows, block.after_attention, _product(rows, attention.out, mixed))
        inner = _product(rows, block.mlp.inner, rows.rmsnorm(x, block.mlp_norm.weight, block.mlp_norm.eps))
        x = x + _after(rows, block.after_mlp, _product(rows, block.mlp.down, inner))
    entering.append(x)
    return rows.rmsnorm(x, model.norm.weight, model.norm.eps), torch.cat([entering[tap] for tap in taps], -1)


def _product(rows: RowKernels, product: Product, x: Tensor) -> Tensor:
    if isinstance(product, Gated):
        gate, up = _product(rows, product.gate_up, x).chunk(2, -1)
        return rows.gate(gate, up, GATES[product.activation])
    assert isinstance(product, PackedMatrix | Side)
    return product(x)


def _after(rows: RowKernels, norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else rows.rmsnorm(x, norm.weight, norm.eps)
