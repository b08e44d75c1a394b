"""Says a GGUF file's metadata in the words of a config.json, so that one parser checks both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError, shown
from slipstream.weights.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"

# Tokens that end an answer whatever the file's EOS is, where they are control tokens: a file names one EOS only, and
# instruct models close a turn with one of these.
_TURN_ENDS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>"}
)
_CONTROL = 3

# The file's word for an architecture -> ours, where they differ.
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_GEMMA3_27B_LAYERS = 62

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The configuration in the keys of a config.json. Raises `ModelError` for adapters, split files and files without a model."""
    metadata = file.metadata
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(
            f"{file.name}: general.type must be model, but got {shown(kind)}",
            hint="LoRA adapters and vision projectors are not supported yet",
        )
    if metadata.get("split.count", 1) != 1:
        raise ModelError(
            f"{file.name} must be a whole model, but it is one of {metadata['split.count']} parts",
            hint="merge them into one file",
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{file.name}: general.architecture must be given, but it is missing")

    def at(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    hidden, heads, turning = at("embedding_length"), at("attention.head_count"), at("rope.dimension_count")
    whole = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    head_dim = at("attention.key_length") or whole
    embedding = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": embedding.shape[0] if embedding else at("vocab_size") or len(tokens) or None,
        "hidden_size": hidden,
        "intermediate_size": at("feed_forward_length"),
        "num_hidden_layers": at("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": at("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": at("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": at("context_length"),
        "rope_theta": at("rope.freq_base"),
        "num_local_experts": at("expert_count"),
        "sliding_window": at("attention.sliding_window"),
        "final_logit_softcapping": at("final_logit_softcapping"),
        "kv_lora_rank": at("attention.kv_lora_rank"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "eos_token_id": _eos(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }
    if isinstance(turning, int) and isinstance(head_dim, int) and 0 < turning < head_dim:
        config["partial_rotary_factor"] = turning / head_dim
    if architecture == "gemma3":
        # The files leave these two to the reader. The largest model alone scales its scores by hidden / heads.
        config["rope_local_base_freq"] = at("rope.freq_base_swa") or 10000.0
        config["query_pre_attn_scalar"] = whole if at("block_count") == _GEMMA3_27B_LAYERS else head_dim
    if at("rope.scaling.attn_factor") not in (None, 1.0):
        raise ModelError(
            f"{file.name}: {architecture}.rope.scaling.attn_factor must be 1, but got {shown(at('rope.scaling.attn_factor'))}",
            hint="longrope is supported for safetensors only",
        )
    scaling = at("rope.scaling.type")
    if scaling not in (None, "none"):
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": at("rope.scaling.factor"),
            "original_max_position_embeddings": at("rope.scaling.original_context_length"),
            "beta_fast": at("rope.scaling.yarn_beta_fast"),
            "beta_slow": at("rope.scaling.yarn_beta_slow"),
        }
    if ROPE_FACTORS in file.tensors:  # how these files carry llama3 scaling: a divisor for each frequency
        config["rope_frequency_factors"] = file.data(ROPE_FACTORS).ravel().tolist()
    return {key: value for key, value in config.items() if value is not None}


def gguf_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Default sampling parameters in the keys of a generation_config.json."""
    found = {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}
    # The file's numbers are float32: 0.6 would come out as 0.6000000238418579.
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}


def _eos(metadata: Mapping[str, Any]) -> list[int]:
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        found += [i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL and text in _TURN_ENDS]
    return list(dict.fromkeys(one for one in found if one is not None))
