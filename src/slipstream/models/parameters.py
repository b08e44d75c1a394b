"""Hands a checkpoint's tensors to the model being built: each exactly once, in the right shape, none left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import ModelError

# Tensors some exporters write although they follow from the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


class TensorSource(Protocol):
    """The tensors of a checkpoint, by their usual names (`model.layers.0.mlp.up_proj.weight`)."""

    @property
    def name(self) -> str:
        """What to call the checkpoint in errors."""
        ...

    def names(self) -> Collection[str]:
        """All tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of them, without reading it."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor on the CPU, in `dtype`."""
        ...


class Parameters:
    """Takes tensors out of a source, each once.

    Args:
        source: the checkpoint.
        dtype, device: what the model computes in, and where.
        on_progress: called with the share of bytes taken so far, 0 to 1.
    """

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, on_progress: Callable[[float], None] | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.num_parameters = 0
        self._source = source
        self._left = {name for name in source.names() if not name.endswith(_DERIVED_SUFFIXES)}
        self._total = sum(torch.Size(source.shape(name)).numel() for name in self._left) or 1
        self._on_progress = on_progress

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def name(self) -> str:
        """What to call the checkpoint in errors."""
        return self._source.name

    @property
    def left(self) -> frozenset[str]:
        """Names of the tensors that nobody took yet."""
        return frozenset(self._left)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which must have `shape`, in the model's dtype or the one given.

        Raises `ModelError` if it is missing, taken before or of another shape.
        """
        if name not in self._left:
            raise ModelError(f"{self._source.name}: the checkpoint must hold {name}, but it does not")
        given = self._source.shape(name)
        if given != shape:
            raise ModelError(f"{self._source.name}: {name} must have shape {list(shape)}, but got {list(given)}")
        self._left.remove(name)
        tensor = self._source.read(name, dtype or self.dtype).to(self.device)
        self.num_parameters += tensor.numel()
        if self._on_progress is not None:
            self._on_progress(min(1.0, self.num_parameters / self._total))
        return tensor

    def skip(self, pattern: re.Pattern[str]) -> None:
        """Leave out tensors whose names `pattern` finds: what a type is known to store and not to need."""
        self._left = {name for name in self._left if not pattern.search(name)}

    def finish(self) -> None:
        """Raises `ModelError` naming tensors that no part of the model took: the checkpoint is of another kind."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"{self._source.name}: every tensor must belong to the model, but got {', '.join(names[:3])}{more}",
                hint="the checkpoint is of another architecture than its configuration says",
            )
