"""Progress on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.terminal import loading_bar

REPORT_EVERY_S = 5.0


class StatusLine:
    """What is going on, in one line on stderr that is written over; where stderr is no terminal, a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._said_s = -math.inf

    def show(self, text: str) -> None:
        """Say what is going on now."""
        now = time.monotonic()
        if self._is_terminal:
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - self._said_s >= REPORT_EVERY_S:
            self._said_s = now
            print(text, file=sys.stderr, flush=True)

    def keep(self, text: str) -> None:
        """Say something that stays, on a line of its own."""
        print(f"\r{text}\x1b[K" if self._is_terminal else text, file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A callback (phase, fraction): a bar where stderr is a terminal, else a line for each phase and now and then."""
    if sys.stderr.isatty():
        with loading_bar() as draw:
            yield draw
        return
    said: tuple[str, float] = ("", 0.0)

    def say(phase: str, fraction: float) -> None:
        nonlocal said
        now = time.monotonic()
        if phase != said[0] or now - said[1] >= REPORT_EVERY_S:
            said = (phase, now)
            print(f"{phase}: {fraction:.0%}", file=sys.stderr, flush=True)

    yield say
