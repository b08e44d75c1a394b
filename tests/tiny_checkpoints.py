"""Tiny random checkpoints made by `transformers`, the reference for ours, and a byte-level tokenizer to lie beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

FAMILIES: dict[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3Text",
    "smollm3": "SmolLM3",
    "phi3": "Phi3",
}
# What a family needs said beyond `tiny`'s sizes.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "smollm3": {"no_rope_layer_interval": 2},
}
VOCAB = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random `transformers` model; weights large enough that every part of it matters to the logits."""
    config_class = getattr(transformers, f"{FAMILIES[family]}Config")
    model_class = getattr(transformers, f"{FAMILIES[family].removesuffix('Text')}ForCausalLM")
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = config_class(**{**settings, **OWN_SETTINGS.get(family, {}), **overrides})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.15)
    if config.tie_word_embeddings:
        model.tie_weights()
    return model.to(dtype)


def save(model: Any, folder: Path, **saving: Any) -> Path:
    """Write the model with a tokenizer beside it."""
    model.save_pretrained(folder, **saving)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[1], "eos_token": {"content": SPECIAL[2], "special": True}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))


def byte_tokenizer() -> Tokenizer:
    """Special tokens 0 to 2, then one token a byte, then two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *alphabet, "he", "ll"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def reference_logits(model: Any, tokens: Tensor, **forward: Any) -> Tensor:
    """[T] int64 -> [T, vocab], by transformers.

    In float64 its norms are replaced: they compute in float32 whatever the model's dtype, which hides errors below 1e-7. So is
    Gemma's scale of embeddings, which has been through float32.
    """
    with torch.no_grad():
        if model.dtype == torch.float64:
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.forward = exact_norm(module)
                elif type(module).__name__.endswith("ScaledWordEmbedding"):
                    module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        logits: Tensor = model(tokens[None], **forward).logits[0]
    return logits


def exact_norm(module: Any) -> Any:
    """The forward of a `transformers` RMS norm in the dtype of its input."""
    one_more = type(module).__name__.startswith("Gemma")
    eps = module.eps if one_more else module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        out: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (module.weight + one_more)
        return out

    return forward
