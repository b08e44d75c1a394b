"""Folders of this user that more than one part of the project keeps things in."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """Where fetched models and compiled kernels are kept: SLIPSTREAM_CACHE, else `slipstream` in the user's cache folder."""
    given = os.environ.get("SLIPSTREAM_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slipstream"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "slipstream"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"
