"""The one place that asks whether tests of the compiled kernels can run: the CPU lacks what they use, or there is no compiler.

Where neither is so, kernels that are not there are a failure and never a skipped test.
"""

from __future__ import annotations

import pytest

from slipstream.kernels.choice import why_not_kernels
from slipstream.kernels.cpu.library import Kernels, kernels

WHY_NOT = why_not_kernels("auto", "float32", "cpu", build=False)
NEEDS_KERNELS = pytest.mark.skipif(WHY_NOT is not None, reason=f"the CPU kernels cannot run here: {WHY_NOT}")


def needed() -> Kernels:
    """The kernels; skips the test where they cannot run."""
    if WHY_NOT is not None:
        pytest.skip(f"the CPU kernels cannot run here: {WHY_NOT}")
    found = kernels()
    assert found is not None, "compiler and CPU are there, but the kernels are not"
    return found
