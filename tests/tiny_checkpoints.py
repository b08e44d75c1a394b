"""Tiny random checkpoints made by `transformers`, the reference for ours, and a byte-level tokenizer to lie beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
VOCAB = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random `transformers` model; weights large enough that every part of it matters to the logits."""
    config_class, model_class = FAMILIES[family]
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
    if family == "mistral":
        settings["sliding_window"] = None
    config = config_class(**{**settings, **overrides})
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


def reference_logits(model: Any, tokens: Tensor) -> Tensor:
    """[T] int64 -> [T, vocab], by transformers.

    In float64 its norms are replaced: they compute in float32 whatever the model's dtype, which hides errors below 1e-7.
    """
    with torch.no_grad():
        if model.dtype == torch.float64:
            for module in model.modules():
                if isinstance(module, (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm)):
                    module.forward = _exact_norm(module)
        logits: Tensor = model(tokens[None]).logits[0]
    return logits


def _exact_norm(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = module.weight * (x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt())
        return out

    return forward
