"""Medians of ratios, with an interval that says how far to trust them on a noisy machine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios and its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Ratio:
    """Median of numerators[i] / denominators[i], where pair i was measured back to back.

    The interval is the middle 95% of the medians of `NUM_RESAMPLES` samples of the pairs, drawn with replacement. Pairing takes
    out what slows both sides alike; the median takes out single disturbances.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"pairs must be complete and at least one, but got {len(numerators)} and {len(denominators)}")
    ratios = [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    cut = round(NUM_RESAMPLES * 0.025)
    return Ratio(statistics.median(ratios), medians[cut], medians[-1 - cut])
