"""A chi-square test without tables: the statistic against its own mean and deviation."""

from __future__ import annotations

import math

import numpy as np


def assert_fits(counts: np.ndarray, probabilities: np.ndarray, sigmas: float = 5.0) -> None:
    """Counts of a multinomial draw fit their probabilities; cells that expect fewer than 10 are put together.

    chi^2 with f degrees has mean f and deviation sqrt(2 f); its cube root is nearly normal (Wilson, Hilferty).
    """
    expected = probabilities * counts.sum()
    small = expected < 10
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 1e-3:
        assert counts[-1] == 0, f"{counts[-1]} draws of what has no mass"
        counts, expected = counts[:-1], expected[:-1]
    degrees = len(counts) - 1
    if degrees == 0:
        return
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert z < sigmas, f"chi-square {statistic:.1f} with {degrees} degrees is {z:.1f} deviations too large"
