"""A toy grammar for tests, of the kind "digits": at least one digit, then the end token.

Its source is "FIRST-LAST:END", e.g. "10-19:3": ids 10 to 19 are digits, id 3 ends the answer.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidParameter
from slipstream.sampling.grammar import register_grammar


class DigitsMatcher:
    """Follows one answer.

    Args:
        first, last: ids of the first and last digit. end: id that closes the answer.
    """

    def __init__(self, first: int, last: int, end: int) -> None:
        self._digits = range(first, last + 1)
        self._end = end
        self._taken: list[int] = []

    @classmethod
    def compile(cls, source: str, vocab_size: int) -> DigitsMatcher:
        """Read "FIRST-LAST:END"; raises `InvalidParameter` for anything else."""
        found = re.fullmatch(r"(\d+)-(\d+):(\d+)", source)
        first, last, end = (int(part) for part in found.groups()) if found else (0, 0, 0)
        if not first <= last < vocab_size or end >= vocab_size or first <= end <= last:
            raise InvalidParameter("grammar", f"read FIRST-LAST:END, of ids below {vocab_size}", source)
        return cls(first, last, end)

    @property
    def is_closed(self) -> bool:
        """Whether the end token was accepted."""
        return bool(self._taken) and self._taken[-1] == self._end

    def accept(self, token: int) -> bool:
        """Take a digit, or behind digits the end."""
        if self.is_closed or not (token in self._digits or (token == self._end and self._taken)):
            return False
        self._taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        del self._taken[len(self._taken) - count :]

    def fill(self, bits: NDArray[np.int32]) -> None:
        """Digits, and the end where there is a digit already."""
        if self.is_closed:
            return
        words = bits.view(np.uint32)
        for token in (*self._digits, *([self._end] if self._taken else [])):
            words[token // 32] |= np.uint32(1 << (token % 32))


register_grammar("digits", DigitsMatcher.compile)


def digits(source: str) -> tuple[str, str]:
    """The grammar of a request, of a kind that is known as soon as this can be called."""
    return "digits", source
