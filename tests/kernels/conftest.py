"""Tests of the compiled kernels need a CPU that has what they use, and a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.kernels.cpu.build import NEEDED_CPU_FLAGS, cpu_flags, find_compiler
from slipstream.kernels.cpu.library import Kernels, kernels


@pytest.fixture
def library() -> Iterator[Kernels]:
    """The loaded kernels; the number of threads is put back."""
    if missing := NEEDED_CPU_FLAGS - cpu_flags():
        pytest.skip(f"the CPU has no {', '.join(sorted(missing))}")
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    loaded = kernels()
    assert loaded is not None, "compiler and CPU are there, but the kernels are not"
    threads = loaded.threads
    yield loaded
    loaded.set_threads(threads)
