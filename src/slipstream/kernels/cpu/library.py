"""Loads the compiled kernels: `kernels()` is None where they cannot run, and torch does the work then."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, InvariantBroken, shown
from slipstream.kernels.cpu.build import NEEDED_CPU_FLAGS, BuildError, cpu_flags, library_path
from slipstream.observe import log

logger = logging.getLogger("slipstream.kernels")

# As slip_abi() of csrc/error.cpp.
ABI = 6

ISA_VARIABLE = "SLIPSTREAM_CPU_ISA"

Function = Callable[..., None]


class Kernels:
    """The library. Its functions are called without the GIL."""

    def __init__(self, path: Path) -> None:
        """Load it. Raises `OSError` or `AttributeError` for what is not our library, `BuildError` for another version of it."""
        self._library = ctypes.CDLL(str(path))
        self.path = path
        self._library.slip_error.restype = ctypes.c_char_p
        if (abi := self._library.slip_abi()) != ABI:
            raise BuildError(f"the library must have ABI {ABI}, but has {abi}")

    def bind(self, name: str, *arguments: Any) -> Function:
        """The exported function of that name, with those ctypes types as arguments. What it returns is an error code: the
        result raises `InvariantBroken` for any but 0. Pointers may be passed as integers.
        """
        function = self._library[name]  # a function of its own each time: types bound here do not change another's
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int

        text = self._library.slip_error

        def call(*given: Any) -> None:
            if code := function(*given):
                raise InvariantBroken(f"arguments of {name} must be right, but are not: {text(code).decode()}")

        return call

    @property
    def threads(self) -> int:
        """Threads that share each kernel's work, the caller's included."""
        return int(self._library.slip_threads())

    def set_threads(self, count: int) -> None:
        """Use that many from the next kernel on. Raises `ConfigError` outside 1..64."""
        if self._library.slip_set_threads(count):
            raise ConfigError(f"threads must be from 1 to 64, but got {shown(count)}")


_loaded: Kernels | None = None


def loaded() -> Kernels | None:
    """The library where somebody has called `kernels` already; this builds and loads nothing."""
    return _loaded


@cache
def kernels() -> Kernels | None:
    """The kernels, built and loaded once a process; None, and one line in the log that says why, where they cannot run:
    no compiler, a CPU without AVX-512 VNNI and BF16, or SLIPSTREAM_CPU_ISA=none.
    """
    global _loaded
    reason = _missing()
    if reason is None:
        try:
            _loaded = Kernels(library_path())
            return _loaded
        except (BuildError, OSError, AttributeError) as error:
            reason = str(error)
    log.event(logger, logging.WARNING, "CPU kernels are off, torch does the work", reason=reason)
    return None


def _missing() -> str | None:
    """What the machine lacks; None: nothing."""
    if os.environ.get(ISA_VARIABLE) == "none":
        return f"{ISA_VARIABLE} is none"
    missing = NEEDED_CPU_FLAGS - cpu_flags()
    return f"the CPU has no {', '.join(sorted(missing))}" if missing else None
