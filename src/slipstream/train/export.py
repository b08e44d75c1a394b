"""Writes a head in the published EAGLE-3 layout, as docs/eagle.md describes it and other engines read it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save

from slipstream.models.config import ModelConfig
from slipstream.train.folder import replacing
from slipstream.train.module import Head
from slipstream.train.vocabulary import DraftVocabulary


def export(head: Head, vocabulary: DraftVocabulary, target: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write `folder`: config.json and model.safetensors. `dtype`: of the weights.

    The layers it looks at are the usual ones and so are not listed: what a list means differs between engines.
    """
    shape = head.shape
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in head.published().items()}
    ids = vocabulary.target_ids
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(vocabulary.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": target.context_len,
        "vocab_size": vocabulary.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) or None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    with replacing(folder) as partial:
        partial.mkdir()
        (partial / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))  # with the modes of other files
        text = json.dumps({name: value for name, value in config.items() if value is not None}, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
