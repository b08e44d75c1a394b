"""What a terminal needs: a bar that shows loading, and signals that wait for a safe moment."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def loading_bar() -> Iterator[Callable[[str, float], None]]:
    """A callback (phase, fraction) that draws a bar on stderr; it is gone when loading is over."""
    from tqdm import tqdm

    with tqdm(total=1.0, file=sys.stderr, bar_format="{desc}{percentage:3.0f}% |{bar}| {elapsed}", leave=False) as bar:

        def draw(phase: str, fraction: float) -> None:
            bar.set_description(phase, refresh=False)  # tqdm puts the colon
            bar.n = fraction
            bar.refresh()

        yield draw


@contextmanager
def deferred_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of stopping the engine in the middle of a step; a second one does not wait."""
    interrupted = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupted  # not ours to change
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def deferred_stops() -> Iterator[threading.Event]:
    """As `deferred_interrupts`, for Ctrl-C and SIGTERM alike: what runs for hours is stopped by both."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # signals are not ours
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
