"""What the front knows of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.weights.loaded import LoadedText


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model, as far as text is concerned.

    Attributes:
        name: what clients call it.
        tokenizer: text to ids and back.
        chat_template: Jinja source; None: the model has none, and chat is refused.
        vocab_size: rows of the model's head, at least the tokenizer's size; ids below it are accepted.
        context_len: most tokens, prompt and output, of a request.
        eos_token_ids: ids that end an answer; their text is left out.
        generation_defaults: the model's own defaults, by the names of `SamplingParams`.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: str | None
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)


def model_info(text: LoadedText, config: EngineConfig) -> ModelInfo:
    """The model as clients see it: the text side of its checkpoint, under the configured name and defaults."""
    return ModelInfo(
        name=config.served_model_name or text.name,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        vocab_size=text.vocab_size,
        context_len=text.context_len,
        eos_token_ids=text.eos_token_ids,
        generation_defaults=text.generation_defaults if config.generation_config == "auto" else {},
    )
