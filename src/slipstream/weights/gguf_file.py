"""Reads the GGUF container: metadata and where each tensor lies. Does not know what the metadata means.

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pairs: key, type, value | tensors: name, shape, type, offset | data

Our own reader and not the gguf library's: that one makes an object of every string of the vocabulary, which takes seconds.
Quantisation formats are the library's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from slipstream.errors import ModelError
from slipstream.weights.mapped_file import MappedFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file: shape outermost first, its type, and its bytes [start, start + num_bytes)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


class GgufFile:
    """An opened file. Raises `ModelError` on construction for a wrong magic, an unknown version, or a damaged or cut file.

    Attributes:
        path: of the file; name: its last part, for errors.
        metadata: key -> number, bool, str or list of them.
        tensors: by the file's own names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        try:
            self._bytes = MappedFile(path)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path.name} must be a readable GGUF file, but got: {error}") from None
        if self._bytes[:4] != _MAGIC:
            raise ModelError(f"{self.name} must begin with GGUF, but got {self._bytes[:4]!r}", hint="it is not a GGUF file")
        self._at = 4
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError, IndexError) as error:
            raise ModelError(f"{self.name} must be a whole GGUF file, but its header is damaged or cut: {error}") from None

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as the file holds them, uint8, not copied: the file's own pages."""
        tensor = self.tensors[name]
        return self._bytes.view(tensor.start, tensor.num_bytes)

    def forget(self, name: str) -> None:
        """Give the tensor's pages back to the system: it has been read, and made into something else."""
        tensor = self.tensors[name]
        self._bytes.forget(tensor.start, tensor.num_bytes)

    def data(self, name: str) -> NDArray[np.float32] | NDArray[np.float64]:
        """The tensor's values, dequantised, in its shape; those of F32 and F64 are the file's own pages.

        Raises `ModelError` for a type that cannot be dequantised.
        """
        tensor, raw = self.tensors[name], self.raw(name)
        if tensor.kind == GGMLQuantizationType.F64:
            return raw.view(np.float64).reshape(tensor.shape)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        if tensor.kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        if tensor.kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
        try:
            values = dequantize(raw.reshape(-1, tensor.shape[-1] // block * block_bytes), tensor.kind)
        except NotImplementedError:
            raise ModelError(f"{self.name}: {name} must be of a type that we can read, but got {tensor.kind.name}") from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)

    def _parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        (version,) = self._take("<I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self.name}: GGUF version must be one of {', '.join(map(str, _VERSIONS))}, but got {version}",
                hint="big-endian and first-version files are not supported",
            )
        num_tensors, num_pairs = self._take("<QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            (kind,) = self._take("<I")
            metadata[key] = self._value(kind)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.name}: general.alignment must be a positive integer, but got {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise ModelError(f"{self.name}: every tensor must be there once, but got {name} twice")
            tensors[name] = self._place(name, shape, kind, data_start + offset)
        return metadata, tensors

    def _place(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(f"{self.name}: {name} must be of a known type, but got type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[known]
        if not shape or shape[-1] % block:
            raise ModelError(f"{self.name}: rows of {name} must be whole blocks of {block}, but got shape {list(shape)}")
        num_bytes = block_bytes
        for size in (*shape[:-1], shape[-1] // block):
            num_bytes *= size
        if start + num_bytes > len(self._bytes):
            raise ModelError(
                f"{self.name}: {name} must end within the file ({len(self._bytes)} bytes), but it needs {start + num_bytes}",
                hint="the file is cut; fetch it again",
            )
        return GgufTensor(shape, known, start, num_bytes)

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._bytes.buffer, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        end = self._at + length
        if end > len(self._bytes):
            raise IndexError(f"a text of {length} bytes at {self._at} runs past the end")
        text = self._bytes[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._take("<IQ")
            if item in _SCALARS:
                return list(self._take(f"<{count}{_SCALARS[item]}"))
            if item != _STRING or count > len(self._bytes) - self._at:
                raise IndexError(f"a list at {self._at} of {count} values of type {item} is nested or runs past the end")
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise IndexError(f"a value at {self._at} has the unknown type {kind}")
        return self._take(f"<{_SCALARS[kind]}")[0]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._take("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise IndexError(f"{name} has {dimensions} dimensions")
        shape = self._take(f"<{dimensions}Q")
        kind, offset = self._take("<IQ")
        return name, tuple(reversed(shape)), kind, offset
