"""Finding stop strings in a text that grows. Which stop wins depends on the text alone, not on how tokens cut it.

    stops  "nine ten"
    text   one two nine te|n eleven
                   ^^^^^^^ held: what a stop string may still be made of

The stop string that is complete first wins; of several complete at the same character the longest. Each stop string is followed
by a Knuth-Morris-Pratt automaton: a constant number of steps a character, amortised, however long the strings are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found: text[start:end], in characters from the start of the text."""

    stop: str
    start: int
    end: int


class _Pattern:
    """One stop string and the length of its longest prefix that the text ends with."""

    __slots__ = ("_fail", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._fail = [0]  # of the prefix of length i + 1: its longest proper border. Grown only as far as the text matched.

    def advance(self, piece: str) -> int:
        """Take `piece`; returns the number of its characters up to the first completion, or 0."""
        text, fail, state = self.text, self._fail, self.state
        first_end = index = 0
        while index < len(piece):
            if state == 0:
                index = piece.find(text[0], index)
                if index < 0:
                    break
            char = piece[index]
            while state and text[state] != char:
                state = fail[state - 1]
            if text[state] == char:
                state += 1
                if state > len(fail):
                    self._grow(state)
            index += 1
            if state == len(text):
                first_end = first_end or index
                state = fail[state - 1]
        self.state = state
        return first_end

    def _grow(self, length: int) -> None:
        border = self._fail[length - 2]
        char = self.text[length - 1]
        while border and self.text[border] != char:
            border = self._fail[border - 1]
        self._fail.append(border + (self.text[border] == char))


class StopMatcher:
    """Follows several stop strings through a growing text.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._length = 0

    def feed(self, piece: str, counts: bool = True) -> StopMatch | None:
        """Append `piece`; returns the first stop string it completes. With `counts` false completions are passed over."""
        before, best_end, best = self._length, 0, ""
        self._length += len(piece)
        for pattern in self._patterns:
            end = pattern.advance(piece)
            if end and (not best_end or end < best_end or (end == best_end and len(pattern.text) > len(best))):
                best_end, best = end, pattern.text
        if not best_end or not counts:
            return None
        return StopMatch(best, before + best_end - len(best), before + best_end)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still turn out to belong to a stop string."""
        return max((pattern.state for pattern in self._patterns), default=0)
