"""Tiny GGUF files, written with the gguf library from models that `transformers` made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from tests.tiny_checkpoints import SPECIAL, byte_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
INTERLEAVED = ("llama", "smollm3")


def gguf_name(name: str, architecture: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    names = {**_NAMES, **(_GEMMA3_NAMES if architecture == "gemma3" else {})}
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{names[inner]}.{kind}"
    return f"{names[stem]}.{kind}"


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """The order llama files hold the rows of query and key in: (0, dim / 2, 1, dim / 2 + 1, ...) of each head."""
    dim = values.shape[0] // heads
    order = [head * dim + half * dim // 2 + i for head in range(heads) for i in range(dim // 2) for half in range(2)]
    return values[order]


def write(
    model: Any,
    path: Path,
    *,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    kinds: dict[str, Kind] | None = None,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write `model` with its matrices in `kind` and put the rounded values back into it, so that it stays the reference.

    kinds: others for tensors of these names. metadata: further keys, or other values; None leaves one out.
    without, extra: tensors by the file's names.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"],
    }
    values = {f"{architecture}.{key}": value for key, value in keys.items()}
    if tokenizer:
        values.update(tokenizer_metadata())
    values.update(metadata or {})
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            own = gguf_name(name, architecture)
            if own in without or (name == "lm_head.weight" and config.tie_word_embeddings):
                continue
            as_kind = (kinds or {}).get(own.split(".")[-2], kind) if parameter.dim() == 2 else Kind.F32
            shift = float(architecture == "gemma3" and name.endswith("norm.weight"))
            exact = parameter.float().numpy() + np.float32(shift)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(own.split(".")[-2])
            if architecture in INTERLEAVED and heads:
                exact = interleave(exact, heads)
            stored = gguf.quantize(exact, as_kind)
            writer.add_tensor(own, stored, raw_dtype=as_kind)
            rounded = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(stored, as_kind)))
            if architecture in INTERLEAVED and heads:
                back = np.argsort(interleave(np.arange(exact.shape[0]), heads))
                rounded = rounded[torch.from_numpy(back)]
            parameter.copy_(rounded - shift)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_metadata() -> dict[str, Any]:
    """The byte tokenizer in a GGUF file's words."""
    vocabulary = byte_tokenizer().get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda text: vocabulary[text])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text in SPECIAL else 1 for text in tokens],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
