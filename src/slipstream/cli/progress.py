"""Progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.terminal import loading_bar

REPORT_EVERY_S = 5.0


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
