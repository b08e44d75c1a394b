"""Hands a checkpoint's tensors to the model being built: each exactly once, in the right shape, none left over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kernels.formats import Format, Matrix, QuantizedTensor, format_name
from slipstream.layers.linear import Arithmetic

_M = TypeVar("_M", Tensor, QuantizedTensor)

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
        """One tensor on the CPU, in `dtype`; the values of a quantised one."""
        ...

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """One matrix as the checkpoint holds it; None where that is no quantised format we keep."""
        ...


@dataclass(frozen=True, slots=True)
class Holding:
    """In what a model's matrices are held, and what multiplies them. `weights.holding` decides it.

    Attributes:
        dtype: of hidden states, and of all that is no matrix.
        matrix_dtype: of matrices that are not quantised.
        kv_dtype: of keys and values.
        arithmetic: what multiplies.
        keeps_stored: matrices that the checkpoint holds quantised stay so.
        quantized: the format that matrices are brought to; None: none is.
        quantize: makes a matrix [out, in] of that format. One whose rows are no whole groups stays plain.
    """

    dtype: torch.dtype
    matrix_dtype: torch.dtype
    kv_dtype: torch.dtype
    arithmetic: Arithmetic = Arithmetic.TORCH
    keeps_stored: bool = False
    quantized: Format | None = None
    quantize: Callable[[Tensor, Format], QuantizedTensor] | None = None

    @classmethod
    def plain(cls, dtype: torch.dtype) -> Holding:
        """Everything in one dtype, multiplied by torch."""
        return cls(dtype, dtype, dtype)


class Parameters:
    """Takes tensors out of a source, each once.

    Args:
        source: the checkpoint.
        holding: in what matrices are held, and the dtype of the rest.
        device: where the model is.
        on_progress: called with the share of bytes taken so far, 0 to 1.

    Attributes:
        num_parameters, num_bytes: of what was taken so far, and its memory as it is held.
        formats: how many parameters are held in what (`float32`, `q8`).
    """

    def __init__(
        self,
        source: TensorSource,
        holding: Holding,
        device: torch.device,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.holding = holding
        self.dtype = holding.dtype
        self.device = device
        self.num_parameters = 0
        self.num_bytes = 0
        self.formats: Counter[str] = Counter()
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
        self._claim(name, shape)
        return self._taken(self._source.read(name, dtype or self.dtype).to(self.device))

    def take_matrix(self, name: str, shape: tuple[int, int], *, sensitive: bool = False) -> Matrix:
        """The matrix `name` [out, in] as the holding wants it.

        Args:
            name, shape: as in `take`, with its errors.
            sensitive: a table of the vocabulary, where errors cost most: made q8 at the least, as the authors of files do.
        """
        self._claim(name, shape)
        holding = self.holding
        wanted = Format.Q8 if sensitive and holding.quantized is Format.Q4 else holding.quantized
        if holding.keeps_stored or wanted is not None:
            stored = self._source.read_quantized(name)
            if stored is not None and _serves(stored.format, wanted):
                return self._taken(stored)
        if wanted is None or holding.quantize is None or shape[1] % wanted.group:
            return self._taken(self._source.read(name, holding.matrix_dtype).to(self.device))
        return self._taken(holding.quantize(self._source.read(name, torch.float32), wanted))

    def untake(self, matrix: Matrix) -> None:
        """A matrix turned out to be another one's copy, and is dropped: it does not count."""
        self._count(matrix, -1)

    def _claim(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._left:
            raise ModelError(f"{self._source.name}: the checkpoint must hold {name}, but it does not")
        given = self._source.shape(name)
        if given != shape:
            raise ModelError(f"{self._source.name}: {name} must have shape {list(shape)}, but got {list(given)}")
        self._left.remove(name)

    def _taken(self, tensor: _M) -> _M:
        self._count(tensor, 1)
        if self._on_progress is not None:
            self._on_progress(min(1.0, self.num_parameters / self._total))
        return tensor

    def _count(self, tensor: Matrix, sign: int) -> None:
        elements = tensor.num_elements if isinstance(tensor, QuantizedTensor) else tensor.numel()
        size = tensor.num_bytes if isinstance(tensor, QuantizedTensor) else elements * tensor.itemsize
        self.num_parameters += sign * elements
        self.num_bytes += sign * size
        self.formats[format_name(tensor)] += sign * elements

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


def _serves(stored: Format, wanted: Format | None) -> bool:
    """Whether a stored matrix is what is wanted; None: any is. Both kinds of 4 bits are."""
    return wanted is None or stored is wanted or (wanted is Format.Q4 and stored is Format.Q4K)
