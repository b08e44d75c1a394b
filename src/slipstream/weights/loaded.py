"""What loading a checkpoint gives: the text side alone, or with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from slipstream.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class LoadedText:
    """What the front process needs of a checkpoint; loading it touches no weights and imports no torch.

    Attributes:
        name: what the user called the model.
        architecture: its model type.
        tokenizer: text to ids and back.
        chat_template: Jinja source, or None.
        bos_token_id: None where there is none.
        eos_token_ids: every id that ends an answer: of the tokenizer, the configuration and the generation configuration.
        generation_defaults: sampling parameters the checkpoint recommends, by `SamplingParams` names.
        vocab_size: rows of the model's head; at least the tokenizer's.
        context_len: most positions, `max_context` applied.
    """

    name: str
    architecture: str
    tokenizer: Tokenizer
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float | int]
    vocab_size: int
    context_len: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its text side.

    Attributes:
        model: the decoder, on its device.
        text: the rest of the checkpoint.
        num_parameters: a shared embedding and head counted once.
        dtype: what the model computes in.
    """

    model: CausalLM
    text: LoadedText
    num_parameters: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """What the user called the model."""
        return self.text.name

    @property
    def architecture(self) -> str:
        """Its model type."""
        return self.text.architecture

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self.text.tokenizer

    @property
    def chat_template(self) -> str | None:
        """Jinja source, or None."""
        return self.text.chat_template

    @property
    def bos_token_id(self) -> int | None:
        """None where there is none."""
        return self.text.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer."""
        return self.text.eos_token_ids

    @property
    def generation_defaults(self) -> Mapping[str, float | int]:
        """Sampling parameters the checkpoint recommends."""
        return self.text.generation_defaults

    @property
    def context_len(self) -> int:
        """Most positions."""
        return self.text.context_len
