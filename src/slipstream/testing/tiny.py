"""Tiny random models of real types, in float64, written by `transformers` (a development dependency) and read by our loader.

Their vocabulary is that of the byte tokenizer, and a tokenizer.json that does the same lies beside the weights.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from slipstream.models.base import CausalLM
from slipstream.testing.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, ByteTokenizer
from slipstream.text.pieces import byte_level_alphabet
from slipstream.weights import load

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3", "phi3")
CONTEXT_LEN = 512
# The library's name, and what makes the family itself: windows shorter than any prompt, layers that do not turn.
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "gemma3_text": (
        "Gemma3Text",
        {
            "hidden_size": 64,  # its embeddings are scaled by the root, which is exact here
            "head_dim": 8,
            "query_pre_attn_scalar": 12,
            "sliding_window": 3,
            "sliding_window_pattern": 2,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3", {"sliding_window": 6}),
}
WEIGHT_STD = 0.25  # large enough for logits that differ by whole units: greedy answers vary, and no two logits nearly tie


@lru_cache(maxsize=8)
def tiny_checkpoint(family: str, seed: int = 0) -> Path:
    """A folder with a random model: 2 layers, 4 heads over 2 KV heads, float64. Made once a process, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix=f"slipstream-tiny-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = _random_model(family, seed)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@lru_cache(maxsize=8)
def tiny_model(family: str, seed: int = 0) -> CausalLM:
    """The model of `tiny_checkpoint`, loaded in float64."""
    return load(str(tiny_checkpoint(family, seed)), dtype="float64").model


def _random_model(family: str, seed: int) -> Any:
    import transformers

    if family not in FAMILIES:
        raise ValueError(f"a tiny model's family must be one of {', '.join(FAMILIES)}, but got {family!r}")
    name, own = _SETTINGS[family]
    config_type = getattr(transformers, f"{name}Config")
    model_type = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    settings: dict[str, Any] = {
        "vocab_size": ByteTokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    config = config_type(**{**settings, **own})
    generator = torch.Generator().manual_seed(seed)
    model = model_type(config).to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, WEIGHT_STD, generator=generator)
    return model


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={**byte_level_alphabet(), **SPECIALS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
