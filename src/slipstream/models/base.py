"""What the engine asks of a model. A model type is one file in this folder that registers a builder; see registry.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.attention.kv import LayerKV
from slipstream.types import nothing


class CausalLM(Protocol):
    """A decoder over paged KV. It knows tokens and attention; not slots, requests or drafts."""

    vocab_size: int  # rows of the head; ids at or above the tokenizer's size may exist (padding)
    context_len: int  # most positions, rope scaling included
    hidden_size: int
    num_layers: int
    dtype: torch.dtype
    kv_layers: tuple[LayerKV, ...]

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers on tokens [T] int64 at `attention.layout.positions`.

        Returns hidden [T, hidden], after the final norm, and, where `taps` names layers, the residual entering those
        layers, concatenated [T, len(taps) * hidden] (layer num_layers means: after the last layer, before the norm).
        `computes` is called once, where the long part begins; whoever waits for it takes the interpreter.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab_size]."""
        ...
