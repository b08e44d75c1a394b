"""The compiled kernels, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.kernels.cpu.library import Kernels
from tests.cpu_kernels import needed


@pytest.fixture
def library() -> Iterator[Kernels]:
    """The loaded kernels; the number of threads is put back."""
    loaded = needed()
    threads = loaded.threads
    yield loaded
    loaded.set_threads(threads)
