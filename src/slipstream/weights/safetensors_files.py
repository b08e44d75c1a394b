"""The tensors of a folder of safetensors files, checked whole before anything is loaded.

An index (model.safetensors.index.json) decides which file's copy of a tensor counts; without one all files are read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import ModelError, shown
from slipstream.kernels.formats import QuantizedTensor
from slipstream.weights.mapped_file import MappedFile
from slipstream.weights.tokenizer_files import read_json

INDEX = "model.safetensors.index.json"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int  # its bytes in the file: [start, start + num_bytes)
    num_bytes: int


class SafetensorsFolder:
    """Satisfies `models.parameters.TensorSource`. Raises `ModelError` on construction naming a missing, cut or damaged file."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._entries = _indexed(folder) if (folder / INDEX).is_file() else _all_files(folder)
        self._open: dict[Path, MappedFile] = {}

    def names(self) -> Collection[str]:
        """All tensors that count."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of them, without reading it."""
        return self._entries[name].shape

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor on the CPU, in `dtype`. Raises `ModelError` for stored types that are not plain floats, or integers where
        `dtype` is one.
        """
        entry = self._entries[name]
        kinds = _FLOATS if dtype.is_floating_point else _INTEGERS
        if entry.dtype not in kinds:
            raise ModelError(
                f"{entry.file.name}: {name} must be one of {', '.join(kinds)}, but got {entry.dtype}",
                hint="quantised safetensors checkpoints are not supported yet",
            )
        if entry.file not in self._open:
            self._open[entry.file] = MappedFile(entry.file)
        mapped = self._open[entry.file]
        raw = torch.from_numpy(mapped.view(entry.start, entry.num_bytes))
        stored = kinds[entry.dtype]
        if entry.start % stored.itemsize:  # data behind a header of odd length
            raw = raw.clone()
        # Always a copy, even in the same dtype: what is read does not depend on the file any more, and its pages can go.
        tensor = raw.view(stored).view(entry.shape).to(dtype, copy=True)
        mapped.forget(entry.start, entry.num_bytes)
        return tensor

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """None: no tensor of safetensors is a quantised matrix."""
        return None


def _indexed(folder: Path) -> dict[str, _Entry]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX} must map tensors to files in weight_map, but got {shown(weight_map)}")
    headers: dict[str, Mapping[str, _Entry]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{INDEX}: {tensor} must be in a file of the same folder, but got {shown(file)}")
        if file not in headers:
            if not (folder / file).is_file():
                raise ModelError(f"{file} must be in the model's folder ({INDEX} names it), but it is missing")
            headers[file] = _header(folder / file)
        if tensor not in headers[file]:
            raise ModelError(f"{INDEX}: {tensor} must be in {file}, but that file does not hold it")
    return {tensor: headers[file][tensor] for tensor, file in weight_map.items()}


def _all_files(folder: Path) -> dict[str, _Entry]:
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
        hint = f"{other[0].name} is a pickle, which can run code when read; convert it to safetensors" if other else None
        raise ModelError("the model's folder must hold *.safetensors, but there are none", hint=hint)
    found: dict[str, _Entry] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name in found:
                raise ModelError(
                    f"every tensor must be there once, but {name} is in {found[name].file.name} and {file.name}",
                    hint=f"an index ({INDEX}) would say which copy counts",
                )
            found[name] = entry
    return found


def _header(file: Path) -> dict[str, _Entry]:
    """What a file says it holds, checked against its size. u64 length | JSON of that length | data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise _damaged(file, f"its header needs {length} bytes and the file has {size}")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise _damaged(file, f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no object")
    entries: dict[str, _Entry] = {}
    for name, given in header.items():
        if name == "__metadata__":
            continue
        try:
            shape, dtype = tuple(map(int, given["shape"])), str(given["dtype"])
            begin, end = map(int, given["data_offsets"])
        except (KeyError, TypeError, IndexError, ValueError):
            raise _damaged(file, f"the header's entry {name} is {shown(given)}") from None
        if 8 + length + end > size:
            raise _damaged(file, f"{name} ends at byte {8 + length + end} and the file has {size}")
        known = (_FLOATS | _INTEGERS).get(dtype)
        if not 0 <= begin <= end or (known is not None and end - begin != math.prod(shape) * known.itemsize):
            raise _damaged(file, f"{name}, {dtype} of shape {list(shape)}, lies in bytes {begin} to {end}")
        entries[name] = _Entry(file, shape, dtype, 8 + length + begin, end - begin)
    return entries


def _damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{file.name} must be a whole safetensors file, but {why}", hint="it is cut or damaged; fetch it again")
