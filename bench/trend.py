"""A straight line through measurements over time, with what is known of its slope."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NUM_BLOCKS = 20


@dataclass(frozen=True, slots=True)
class Trend:
    """Least squares: `slope` a second, with its 95% interval; `mean` of the values; `seconds` from the first to the last."""

    slope: float
    low: float
    high: float
    mean: float
    seconds: float

    @property
    def surely_grown(self) -> float:
        """What the values have grown by at least, with 97.5% confidence; 0 where they may not have grown at all."""
        return max(0.0, self.low * self.seconds)


def trend(times_s: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Fit a line. None for fewer than four measurements.

    Neighbouring measurements of a process are alike, which a plain fit takes for certainty; so they are averaged into at most
    NUM_BLOCKS blocks first, and the line goes through those.
    """
    count = min(NUM_BLOCKS, len(values))
    if count < 4:
        return None
    edges = [len(values) * block // count for block in range(count + 1)]
    blocks = [slice(low, high) for low, high in pairwise(edges)]
    x = [statistics.fmean(times_s[block]) for block in blocks]
    y = [statistics.fmean(values[block]) for block in blocks]
    slope, intercept = statistics.linear_regression(x, y)
    rest = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    mean_x = statistics.fmean(x)
    error = math.sqrt(rest / (count - 2) / sum((a - mean_x) ** 2 for a in x))
    half = _t975(count - 2) * error
    return Trend(slope, slope - half, slope + half, statistics.fmean(y), times_s[-1] - times_s[0])


def _t975(freedom: int) -> float:
    """97.5% quantile of Student's t, by its expansion around the normal one (Abramowitz and Stegun 26.7.5); 2% short at 2."""
    z = statistics.NormalDist().inv_cdf(0.975)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3
