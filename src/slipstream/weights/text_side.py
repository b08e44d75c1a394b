"""Loads what the front process needs of a checkpoint: configuration, tokenizer, template, defaults. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import InvalidParameter, ModelError
from slipstream.models.config import CheckpointConfig, parse_config, parse_foreign, token_ids
from slipstream.models.known import known_types
from slipstream.types import SamplingParams
from slipstream.weights.gguf_config import gguf_config, gguf_sampling
from slipstream.weights.gguf_file import GgufFile
from slipstream.weights.gguf_tokenizer import gguf_tokenizer
from slipstream.weights.loaded import LoadedText
from slipstream.weights.source import ModelSource, resolve
from slipstream.weights.tokenizer_files import FastTokenizer, folder_tokenizer, read_json

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint opened but not loaded: its typed configuration, its text side, and the GGUF file where it is one."""

    source: ModelSource
    config: CheckpointConfig
    text: LoadedText
    gguf: GgufFile | None


def load_text(
    source: str, *, max_context: int | None = None, on_progress: Callable[[str, float], None] | None = None
) -> LoadedText:
    """The text side of `source` (see `source.resolve` for what that may be).

    Raises `ModelError` naming what is missing, damaged or not supported.
    """
    return open_checkpoint(resolve(source, on_progress), max_context).text


def open_checkpoint(source: ModelSource, max_context: int | None = None) -> Checkpoint:
    """Read everything but the weights. Raises `ModelError` naming what is missing, damaged or not supported."""
    if source.is_gguf:
        file = GgufFile(source.path)
        config = _limited(parse_config(gguf_config(file), file.name), max_context)
        tokenizer = gguf_tokenizer(file.metadata, file.name)
        template = file.metadata.get("tokenizer.chat_template")
        generation = gguf_sampling(file.metadata)
        text = _text(source, config, tokenizer, template if isinstance(template, str) else None, generation, file.name)
        return Checkpoint(source, config, text, file)
    raw = read_json(source.path / "config.json")
    parse = parse_config if raw.get("model_type") in (*known_types(), None) else parse_foreign
    config = _limited(parse(raw, "config.json"), max_context)
    tokenizer, template = folder_tokenizer(source.path, config.bos_token_id)
    path = source.path / "generation_config.json"
    generation = dict(read_json(path)) if path.is_file() else {}
    return Checkpoint(source, config, _text(source, config, tokenizer, template, generation, path.name), None)


def _limited(config: CheckpointConfig, max_context: int | None) -> CheckpointConfig:
    if max_context is None:
        return config
    if max_context > config.context_len:
        raise ModelError(
            f"max_model_len must be at most the model's context ({config.context_len}), but got {max_context}",
            hint="the model was not made for more positions",
        )
    return replace(config, context_len=max_context)


def _text(
    source: ModelSource,
    config: CheckpointConfig,
    tokenizer: FastTokenizer,
    template: str | None,
    generation: Mapping[str, Any],
    generation_name: str,
) -> LoadedText:
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer must have at most the model's {config.vocab_size} ids, but got {tokenizer.vocab_size}",
            hint="tokenizer and weights are of different models",
        )
    # A chat model often ends its turn with an id that only one of the three places lists.
    listed = token_ids(generation.get("eos_token_id"), generation_name, "eos_token_id")
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return LoadedText(
        name=source.name,
        architecture=config.model_type,
        tokenizer=tokenizer,
        chat_template=template,
        bos_token_id=tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id,
        eos_token_ids=tuple(dict.fromkeys(own + config.eos_token_ids + listed)),
        generation_defaults=_defaults(generation, generation_name),
        vocab_size=config.vocab_size,
        context_len=config.context_len,
    )


def _defaults(generation: Mapping[str, Any], source: str) -> dict[str, float | int]:
    out: dict[str, float | int] = {name: generation[name] for name in _DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:  # greedy; what else is there was never used
        out = {name: value for name, value in out.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    try:
        SamplingParams(**out)  # type: ignore[arg-type] # the values are what is being checked
    except InvalidParameter as error:
        raise ModelError(f"{source}: {error.message}", hint="--generation-config none leaves the file's sampling out") from None
    return out
