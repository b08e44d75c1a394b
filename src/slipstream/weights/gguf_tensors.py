"""The tensors of a GGUF file under their usual names: as values, or as the quantised matrices they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kernels.formats import QuantizedTensor
from slipstream.models.config import ModelConfig
from slipstream.models.registry import ModelType
from slipstream.weights.gguf_blocks import unpack
from slipstream.weights.gguf_config import ROPE_FACTORS
from slipstream.weights.gguf_file import GgufFile

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufTensors:
    """Satisfies `models.parameters.TensorSource`.

    A name that is not a usual one keeps the file's own name, so that it is reported as left over.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, model_type: ModelType) -> None:
        self._file = file
        self._config = config
        self._interleaved = model_type.gguf_interleaved_heads
        self._shifted_norms = model_type.gguf_shifted_norms
        layer_names = {**_LAYER, **model_type.gguf_names}
        # The frequency factors are part of the configuration: gguf_config has read them.
        self._own = {_usual(name, layer_names): name for name in file.tensors if name != ROPE_FACTORS}

    @property
    def name(self) -> str:
        """The file's name."""
        return self._file.name

    def names(self) -> Collection[str]:
        """All tensors."""
        return self._own.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of them, without reading it."""
        return self._file.tensors[self._own[name]].shape

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor on the CPU, dequantised, in `dtype`."""
        own = self._own[name]
        values = self._file.data(own)
        heads = self._paired_heads(name)
        if heads is not None:
            values = _halves(values, heads)
        if self._shifted_norms and name.endswith("norm.weight"):
            values = values - 1
        if np.shares_memory(values, self._file.raw(own)):
            values = values.copy()
        self._file.forget(own)
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """One matrix as it is stored; None where it is no matrix, or stored in a type that is not kept."""
        own = self._own[name]
        shape = self._file.tensors[own].shape
        if len(shape) != 2:
            return None
        matrix = unpack(self._file.tensors[own].kind, torch.from_numpy(self._file.raw(own)), (shape[0], shape[1]))
        if matrix is None:
            return None
        self._file.forget(own)
        heads = self._paired_heads(name)
        return matrix if heads is None else matrix.rows(torch.from_numpy(_halves(np.arange(shape[0]), heads)))

    def _paired_heads(self, name: str) -> int | None:
        """Heads whose rows lie in pairs; None where rows lie as we want them."""
        if self._interleaved and ".self_attn.q_proj." in name:
            return self._config.num_heads
        if self._interleaved and ".self_attn.k_proj." in name:
            return self._config.num_kv_heads
        return None


def _usual(name: str, layer_names: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    match = _IN_LAYER.fullmatch(name)
    if match and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    return name


def _halves(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of each head from pairs (2i, 2i + 1) to halves (i, i + dim / 2), the order our rotary embedding turns."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
