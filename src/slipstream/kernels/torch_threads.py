"""How many threads torch's operators use, for a while.

They and our kernels' want the same cores. OpenMP's spin for some time after each operator, and where another process is busy they
wait for each other at the end of every one. So where our kernels do the work, torch gets one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch's operators use `count` threads, in the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
