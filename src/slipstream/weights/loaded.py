"""What loading a checkpoint is told about numbers, and what it gives: the text side alone, or with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from slipstream.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the user says of numbers, in the words of `EngineConfig`; the defaults are what a model alone is loaded with.

    Attributes:
        dtype: auto, or float32, bfloat16, float16 or float64.
        quantization: auto, none, q8 or q4.
        cpu_kernels: auto, exact or off.
        kv_cache_dtype: auto, bfloat16, float32 or int8.
    """

    dtype: str = "auto"
    quantization: str = "auto"
    cpu_kernels: str = "off"
    kv_cache_dtype: str = "auto"


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
        dtype: what --dtype came to: of weights that are not quantised, and, but for our kernels, of hidden states.
        weight_bytes: of the weights as they are held.
        formats: how many parameters are held in what (`q8`, `float32`), the most common first.
        arithmetic: what multiplies: `torch`, or our `kernels`, or those in float32 (`exact`).
    """

    model: CausalLM
    text: LoadedText
    num_parameters: int
    dtype: torch.dtype
    weight_bytes: int
    formats: Mapping[str, int]
    arithmetic: str

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
