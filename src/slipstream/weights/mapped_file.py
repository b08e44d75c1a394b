"""A file's bytes, mapped: read where they lie, and given back to the system once they have been made into something else.

    file    ██████████████████████     pages become resident as a tensor is read ...
    tensor      ▲────▲                 ... and stop being so when `forget` says that it has been copied or packed
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE


class MappedFile:
    """The whole of a file. Raises `OSError` where it cannot be read and `ValueError` where it is empty."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Private and writable: nobody writes, but what torch is lent must not be read-only.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __len__(self) -> int:
        return len(self._map)

    def __getitem__(self, span: slice) -> bytes:
        """A copy of the bytes of `span`."""
        return self._map[span]

    @property
    def buffer(self) -> mmap.mmap:
        """For `struct.unpack_from`."""
        return self._map

    def view(self, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes [start, start + num_bytes), uint8, without copying. They must not be written."""
        return np.frombuffer(self._map, np.uint8, num_bytes, start)

    def forget(self, start: int, num_bytes: int) -> None:
        """Stop counting these bytes as ours: whole pages within them leave the process, and come back if they are read again."""
        first, last = -(-start // _PAGE) * _PAGE, (start + num_bytes) // _PAGE * _PAGE
        if sys.platform != "win32" and last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
