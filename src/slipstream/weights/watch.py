"""Progress of a download that somebody else's code does: by how much its folder grows."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_EVERY_S = 0.5


@contextmanager
def watched(folder: Path, num_bytes: int, report: Callable[[float], None]) -> Iterator[None]:
    """Inside, `report` is told every half second which share of `num_bytes` has been written into `folder`, from another thread.

    The share never goes back and stays below 1: that is for whoever knows that all is well.
    """
    start, done, shown = folder_bytes(folder), threading.Event(), 0.0

    def look() -> None:
        nonlocal shown
        while not done.wait(LOOK_EVERY_S):
            share = min(0.99, (folder_bytes(folder) - start) / max(1, num_bytes))
            if share > shown:
                shown = share
                report(share)

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; links are not followed, and what goes away meanwhile does not count."""
    total = 0
    for where, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(where, file)).st_size
            except FileNotFoundError:
                continue
    return total
