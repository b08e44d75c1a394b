"""How the stages say how far they are. What shows it is the caller's: the command line has a line on stderr."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Reporter(Protocol):
    """Gets told."""

    def line(self, text: str) -> None:
        """Something worth a line: counts, sizes, results."""
        ...

    def loading(self) -> AbstractContextManager[Callable[[str, float], None]]:
        """While a model is loaded: a callback (phase, 0 to 1)."""
        ...

    def begin(self, stage: str, done: float, total: float) -> None:
        """A stage begins, with `done` of `total` there already; time counts from now."""
        ...

    def at(self, done: float, note: str = "") -> None:
        """The stage has come so far; `note` is a further word on it. May be called as often as one likes."""
        ...

    def end(self) -> None:
        """The stage is over, or stopped."""
        ...
