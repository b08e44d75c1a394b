"""Memory for packed weights: huge pages, aligned, many matrices to a block."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_BLOCK_BYTES = 64 << 20
_ALIGNMENT = 4096


class Arena:
    """Gives out pieces of large blocks, one after the other. A block goes back to the system with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Zeros, uint8 [num_bytes], aligned to a page. Small matrices would waste most of a huge page each: they share them."""
        with self._lock:
            if self._used + num_bytes > self._block.numel():
                self._block = huge_pages(max(num_bytes, _BLOCK_BYTES))
                self._used = 0
            piece = self._block[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return piece


def huge_pages(num_bytes: int) -> Tensor:
    """Fresh zeros, uint8 [num_bytes], aligned to a huge page; pages that are never touched take no memory."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES
    # Kernels without huge pages refuse: the pages are small ones then.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return whole[skipped : skipped + num_bytes]


ARENA = Arena()
