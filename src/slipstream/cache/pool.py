"""Free lists of pages and slots. They know numbers, not requests."""

from __future__ import annotations

from collections import deque
from typing import Literal

from slipstream.errors import InvariantBroken

ReuseOrder = Literal["oldest", "newest"]


class FreeList:
    """Numbers first, first + 1, ... handed out and taken back.

    `order` says which free number is handed out next: the most recently freed (its memory is warm, and pages that were never
    needed stay untouched), or the one free for longest.
    """

    def __init__(self, first: int, count: int, order: ReuseOrder = "newest") -> None:
        self.total = count
        numbers = range(first, first + count)
        self._free: deque[int] = deque(reversed(numbers) if order == "newest" else numbers)
        self._is_free = set(self._free)
        self._newest = order == "newest"

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Hand out one number; `InvariantBroken` when none is free (callers reserve before they take)."""
        if not self._free:
            raise InvariantBroken(f"a free list must not be asked for more than it has, but all {self.total} are taken")
        number = self._free.pop() if self._newest else self._free.popleft()
        self._is_free.remove(number)
        return number

    def give(self, number: int) -> None:
        """Take a number back; giving it twice is an error."""
        if number in self._is_free:
            raise InvariantBroken(f"a page or slot must be freed once, but {number} is already free")
        self._free.append(number)
        self._is_free.add(number)
