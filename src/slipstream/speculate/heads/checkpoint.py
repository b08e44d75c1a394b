"""Reads published EAGLE heads: a folder with config.json and safetensors.

    EAGLE-1/2   fc, layers.0.{self_attn, mlp, post_attention_layernorm}, often embed_tokens
    EAGLE-3     fc, midlayer.{the same, input_layernorm, hidden_norm}, norm, lm_head, d2t, t2d, sometimes embed_tokens

`midlayer.` is also spelled `layers.0.`, and any name may begin with `model.`. A head has its own rope base (10,000 where its
config.json does not say), its own lm_head even if the target's is tied, and the target's embedding unless it stores another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError, shown
from slipstream.kernels.formats import Matrix, QuantizedTensor
from slipstream.layers.activation import ACTIVATIONS
from slipstream.layers.decoder import Attention, Decoder, GatedMLP
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Arithmetic, Product, gated, linear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rotary import Rotary
from slipstream.models.config import ModelConfig, parse_config
from slipstream.models.parameters import Holding, Parameters, TensorSource
from slipstream.models.reader import Reader
from slipstream.speculate.heads.layers import DraftHead, Eagle1Head, Eagle3Head, HeadLayer
from slipstream.weights.holding import DTYPES, choose_holding
from slipstream.weights.loaded import Numbers
from slipstream.weights.safetensors_files import SafetensorsFolder
from slipstream.weights.source import resolve
from slipstream.weights.tokenizer_files import read_json

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
AUX_MEANINGS = ("input", "output")
EMBEDDING = "embed_tokens.weight"
# Variants of the layer that change its numbers and that we do not compute.
_REFUSED_FLAGS = ("norm_before_residual", "norm_before_fc", "parallel_drafting")


@torch.inference_mode()
def load_head(
    source: str, target: Decoder, aux_layers: str | None = None, numbers: Numbers | None = None
) -> DraftHead:
    """The head at `source`, a folder or a hub id, for `target`.

    Args:
        source: see `weights.source.resolve`.
        target: whose states it looks at; it runs in the target's dtype or that of `numbers` (float32 instead of float16, which
            states overflow).
        aux_layers: whether the layers a config.json lists are meant as "input" (the state that enters them) or "output".
        numbers: how matrices are held and multiplied, where `quantization` is auto in 8 bits by the kernels; None: plain, by
            torch.

    Raises `ModelError` naming the tensor or setting that is missing, left over or does not fit the target.
    """
    found = resolve(source)
    if found.is_gguf:
        raise ModelError(f"a draft head must be a folder of safetensors, but got {shown(source)}")
    name = found.path.name
    if not (found.path / "config.json").is_file() and (found.path / "head" / "config.json").is_file():
        raise ModelError(f"a draft head's folder must hold config.json, but {shown(source)} does not", hint=f"{source}/head does")
    raw = read_json(found.path / "config.json")
    stored = SafetensorsFolder(found.path)
    is_eagle3 = _is_eagle3(raw, stored.names())
    dtype = DTYPES.get(numbers.dtype, target.dtype) if numbers is not None else target.dtype
    dtype = torch.float32 if dtype == torch.float16 else dtype
    tensors = _Renamed(stored, "midlayer." if is_eagle3 else "layers.0.")
    device = target.embedding.device
    holding = Holding.plain(dtype) if numbers is None else _holding(numbers, dtype, device)
    parameters = Parameters(tensors, holding, device)
    config = parse_config({"max_position_embeddings": target.context_len, **raw}, f"{name}/config.json")
    _check(config, raw, target, name)
    head = _Builder(config, parameters, target)
    built: DraftHead = head.eagle3(_taps(raw, target, aux_layers, name)) if is_eagle3 else head.eagle1(aux_layers)
    parameters.finish()
    built.num_parameters, built.weight_bytes = parameters.num_parameters, parameters.num_bytes
    return built


def _holding(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Holding:
    """How a head is held: in 8 bits where the kernels would take it as it is stored, which is wide.

    It is read for each drafted token, and what that rounds costs no answer anything.
    """
    holding = choose_holding(numbers, dtype, device)
    if holding.arithmetic is Arithmetic.KERNELS and numbers.quantization == "auto":
        return choose_holding(replace(numbers, quantization="q8"), dtype, device)
    return holding


def _is_eagle3(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and any("eagle3" in str(one).lower() for one in architectures):
        return True
    return any("midlayer." in name or name.endswith(("hidden_norm.weight", "d2t")) for name in names)


def _check(config: ModelConfig, raw: Mapping[str, Any], target: Decoder, name: str) -> None:
    for key in _REFUSED_FLAGS:
        if raw.get(key):
            raise ModelError(f"{name}: {key} must be false, but got {shown(raw[key])}", hint="such heads are not supported yet")
    if config.num_layers != 1:
        raise ModelError(f"{name}: num_hidden_layers must be 1, but got {config.num_layers}")
    if config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{name}: hidden_size must be the target's {target.hidden_size}, but got {config.hidden_size}",
            hint="the head was made for another model",
        )
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"{name}: vocab_size must be the target's {target.vocab_size}, but got {config.vocab_size}",
            hint="the head was made for another model",
        )
    if config.sliding_window is not None:
        raise ModelError(f"{name}: sliding_window must be null, but got {config.sliding_window}")
    if config.rope.rotary_share != 1 or config.rope.kind == "longrope":
        raise ModelError(f"{name}: rope must turn whole heads, and not be longrope")
    if (config.hidden_act or "silu") not in ACTIVATIONS:
        raise ModelError(f"{name}: hidden_act must be one of {', '.join(ACTIVATIONS)}, but got {shown(config.hidden_act)}")


def _taps(raw: Mapping[str, Any], target: Decoder, aux_layers: str | None, name: str) -> tuple[int, ...]:
    """Layers whose entering states an EAGLE-3 head looks at."""
    num_layers = target.num_layers
    nested = raw.get("eagle_config")
    listed = raw.get(AUX_KEY) or (nested.get(AUX_KEY) if isinstance(nested, Mapping) else None)
    if listed is None:
        if aux_layers is not None:
            raise ModelError(f"aux_layers must be left out where {name}/config.json has no {AUX_KEY}, but got {aux_layers}")
        if num_layers < 4:
            raise ModelError(f"{name}: the target must have at least 4 layers, but has {num_layers}", hint=f"or set {AUX_KEY}")
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(listed, list) or len(listed) != 3 or not all(type(one) is int for one in listed):
        raise ModelError(f"{name}: {AUX_KEY} must list three layers, but got {shown(listed)}")
    if aux_layers is None:
        raise ModelError(
            f"{name}: aux_layers must say whether {AUX_KEY} = {listed} are inputs or outputs of layers, but it is missing",
            hint="aux_layers=output for heads made with SGLang or SpecForge, aux_layers=input for those made for vLLM",
        )
    taps = tuple(one + (aux_layers == "output") for one in listed)
    if not all(0 <= one <= num_layers for one in taps):
        raise ModelError(f"{name}: {AUX_KEY} must list layers of the target, which has {num_layers}, but got {listed}")
    return taps


class _Renamed:
    """A head's tensors under one spelling; satisfies `TensorSource`."""

    def __init__(self, inner: TensorSource, layer: str) -> None:
        self._inner = inner
        self._stored: dict[str, str] = {}
        for stored in inner.names():
            name = stored.removeprefix("model.")
            for spelling in ("midlayer.", "layers.0."):
                if name.startswith(spelling):
                    name = layer + name.removeprefix(spelling)
            if name in self._stored:
                raise ModelError(f"{inner.name}: every tensor must be there once, but got {self._stored[name]} and {stored}")
            self._stored[name] = stored

    @property
    def name(self) -> str:
        """What to call the checkpoint in errors."""
        return self._inner.name

    def names(self) -> Collection[str]:
        """All tensors."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of them."""
        return self._inner.shape(self._stored[name])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One of them, in `dtype`."""
        return self._inner.read(self._stored[name], dtype)

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """One of them as it is stored, where that is a quantised format."""
        return self._inner.read_quantized(self._stored[name])


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes a head of its parameters."""

    config: ModelConfig
    parameters: Parameters
    target: Decoder

    def eagle1(self, aux_layers: str | None) -> Eagle1Head:
        """An EAGLE-1 or EAGLE-2 head."""
        if aux_layers is not None:
            raise ModelError(f"aux_layers must be left out for an EAGLE-1/2 head, but got {aux_layers}")
        hidden, has_bias = self.config.hidden_size, self.config.raw.get("bias", True)
        fuse = self._product({"fc": hidden}, 2 * hidden, has_bias)
        layer = self._layer("layers.0.", hidden)
        return Eagle1Head(
            self._embedding(), fuse, layer, self.target.norm, self._target_logits, (self.target.num_layers,)
        )

    def eagle3(self, taps: tuple[int, ...]) -> Eagle3Head:
        """An EAGLE-3 head. Its `fc` has a bias only where it stores one."""
        hidden = self.config.hidden_size
        fuse = self._product({"fc": hidden}, len(taps) * hidden, "fc.bias" in self.parameters)
        embedding_norm, state_norm = self._norm("midlayer.input_layernorm"), self._norm("midlayer.hidden_norm")
        layer = self._layer("midlayer.", 2 * hidden)
        norm = self._norm("norm")
        to_logits, target_ids = self._vocabulary()
        return Eagle3Head(self._embedding(), fuse, embedding_norm, state_norm, layer, norm, to_logits, target_ids, taps)

    def _layer(self, prefix: str, into: int) -> HeadLayer:
        config = self.config
        dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        said = config.raw.get("qkv_bias", config.attention_bias)
        bias = f"{prefix}self_attn.q_proj.bias" in self.parameters if said is None else bool(said)
        out_bias = f"{prefix}self_attn.o_proj.bias" in self.parameters
        parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        attention = Attention(
            layer=0,
            qkv=self._product({f"{prefix}self_attn.{part}": size for part, size in parts.items()}, into, bias),
            out=self._product({f"{prefix}self_attn.o_proj": config.hidden_size}, heads * dim, out_bias),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            head_norm=None,
            rotary=0,
            window=None,
            softcap=None,
        )
        inner = config.intermediate_size
        gate_up = {f"{prefix}mlp.gate_proj": inner, f"{prefix}mlp.up_proj": inner}
        mlp = GatedMLP(
            gated(
                *self._matrices(gate_up, config.hidden_size, config.mlp_bias),
                ACTIVATIONS[config.hidden_act or "silu"],
                dtype=self.parameters.dtype,
                arithmetic=self.parameters.holding.arithmetic,
            ),
            self._product({f"{prefix}mlp.down_proj": config.hidden_size}, inner, config.mlp_bias),
        )
        rotary = Rotary(config.rope, dim, self.parameters.device)
        norm, kv_dtype = self._norm(f"{prefix}post_attention_layernorm"), self.parameters.holding.kv_dtype
        return HeadLayer(attention, norm, mlp, rotary, self.parameters.dtype, kv_dtype)

    def _product(self, outputs: Mapping[str, int], into: int, bias: bool) -> Product:
        return self._linear(*self._matrices(outputs, into, bias))

    def _matrices(self, outputs: Mapping[str, int], into: int, bias: bool) -> tuple[list[Matrix], list[Tensor]]:
        take = self.parameters
        weights = [take.take_matrix(f"{name}.weight", (out, into)) for name, out in outputs.items()]
        return weights, [take.take(f"{name}.bias", (out,)) for name, out in outputs.items()] if bias else []

    def _linear(self, weights: list[Matrix], biases: list[Tensor]) -> Product:
        return linear(weights, biases, dtype=self.parameters.dtype, arithmetic=self.parameters.holding.arithmetic)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.parameters.take(f"{name}.weight", (self.config.hidden_size,)), self.config.norm_eps)

    def _embedding(self) -> Embedding:
        """The stored one, or the target's where none is stored or where both are the same: then there is one copy."""
        shared = self.target.embedding
        if EMBEDDING not in self.parameters:
            return shared
        shape = (self.target.vocab_size, self.target.hidden_size)
        own = self.parameters.take_matrix(EMBEDDING, shape, sensitive=True)
        if shared.holds(own):
            self.parameters.untake(own)
            return shared
        return Embedding(own, dtype=self.parameters.dtype)

    def _target_logits(self, states: Tensor) -> Tensor:
        return self.target.logits(states.to(self.target.dtype))

    def _vocabulary(self) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """The product to logits, and the target's ids of a reduced vocabulary."""
        config, take, vocab_size = self.config, self.parameters.take, self.target.vocab_size
        if config.raw.get("draft_vocab_size") is None:
            if "lm_head.weight" in self.parameters:
                raise ModelError(
                    f"{self.parameters.name}: draft_vocab_size must be given where lm_head.weight is stored, but it is missing",
                    hint="without it a head draws logits from the target's lm_head, and the stored one would mean nothing",
                )
            return self._target_logits, None
        read = Reader(config.raw, self.parameters.name)
        size = read.count("draft_vocab_size")
        if size > vocab_size:
            raise read.wrong("draft_vocab_size", f"be at most the target's {vocab_size}", size)
        reduced = size < vocab_size
        to_logits = self._linear([self.parameters.take_matrix("lm_head.weight", (size, config.hidden_size))], [])
        if not reduced and "d2t" not in self.parameters:
            if "t2d" in self.parameters:
                take("t2d", (vocab_size,), torch.bool)
            return to_logits, None
        ids = take("d2t", (size,), torch.int64) + torch.arange(size, device=self.parameters.device)
        if not bool(((ids >= 0) & (ids < vocab_size)).all()):
            raise ModelError(f"{self.parameters.name}: d2t must lead to ids from 0 to {vocab_size - 1}, but some are outside")
        if torch.zeros(vocab_size, device=ids.device).index_fill_(0, ids, 1.0).sum() != size:
            raise ModelError(f"{self.parameters.name}: d2t must give every draft token its own id, but some share one")
        if "t2d" in self.parameters:
            kept = take("t2d", (vocab_size,), torch.bool)
            if int(kept.sum()) != size or not bool(kept[ids].all()):
                raise ModelError(f"{self.parameters.name}: t2d must mark exactly the ids that d2t leads to, but it does not")
        return to_logits, ids if reduced or not torch.equal(ids, torch.arange(size, device=ids.device)) else None
