"""Checkpoints: where they come from, what they hold, and the model and tokenizer made of them. Imports nothing heavy itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.weights.loaded import LoadedModel, LoadedText

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedModel", "LoadedText", "load", "load_text"]


def load(
    source: str,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    cpu_kernels: str = "off",
    kv_cache_dtype: str = "auto",
    device: str | torch.device = "cpu",
    max_context: int | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> LoadedModel:
    """See `slipstream.weights.loading.load`."""
    from slipstream.weights.loading import load as implementation

    return implementation(
        source,
        dtype=dtype,
        quantization=quantization,
        cpu_kernels=cpu_kernels,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        max_context=max_context,
        on_progress=on_progress,
    )


def load_text(
    source: str, *, max_context: int | None = None, on_progress: Callable[[str, float], None] | None = None
) -> LoadedText:
    """See `slipstream.weights.text_side.load_text`; imports no torch."""
    from slipstream.weights.text_side import load_text as implementation

    return implementation(source, max_context=max_context, on_progress=on_progress)
