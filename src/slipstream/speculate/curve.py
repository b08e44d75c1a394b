"""What something takes, by how much of it there is: learnt from noisy measurements that are never all fresh."""

from __future__ import annotations

import bisect

SHARE, LOWER = 0.05, 0.2  # of a measurement in what is known, and of one that took less: others make a step slower, none faster
HASTY, FEW = 0.5, 4  # of the first few, where they took less: a first step of its kind may wait for much that is not its own
OUTLIER = 1.5  # a measurement counts as at most this many times what is known: machines have hiccups
FORGET = 400  # measurements after which one that was not made again says nothing any more


class Curve:
    """Seconds as a function of a count: what was measured, straight lines between and beyond, never falling.

    Most of it was measured some time ago, perhaps while another process kept the machine busy. So the newest measurement tells
    of its neighbours, too: fewer take no longer, and more take no longer than in proportion. What has not been measured again
    for long is forgotten, so that a wrong value does not keep itself from being corrected.

    Args:
        lower: share that a measurement which took less has in what is known.
    """

    def __init__(self, lower: float) -> None:
        self._lower = lower
        self._times: dict[int, int] = {}  # how often each count was measured
        self._seconds: dict[int, float] = {}
        self._measured: dict[int, int] = {}
        self._counts: list[int] = []
        self._highest: list[float] = []  # of the seconds up to each count: what makes it never fall
        self._now = 0

    def add(self, count: int, seconds: float) -> None:
        """One measurement."""
        self._now += 1
        count = _rounded(count)
        known = self._seconds.get(count)
        if known is None:
            bisect.insort(self._counts, count)
        else:
            share = (HASTY if self._times[count] < FEW else self._lower) if seconds < known else SHARE
            seconds = known + share * (min(seconds, OUTLIER * known) - known)
        self._seconds[count] = seconds
        self._times[count] = self._times.get(count, 0) + 1
        self._measured[count] = self._now
        oldest = min(self._measured, key=self._measured.__getitem__)
        if len(self._counts) > 2 and self._measured[oldest] < self._now - FORGET:
            del self._measured[oldest], self._seconds[oldest], self._times[oldest]
            self._counts.remove(oldest)
        self.bound(count, seconds)

    def bound(self, count: int, seconds: float) -> None:
        """`count` take at most so long: fewer take no longer, and more no longer than in proportion."""
        for other, value in self._seconds.items():
            self._seconds[other] = min(value, seconds * max(1.0, other / count))
        highest = 0.0
        self._highest = [highest := max(highest, self._seconds[each]) for each in self._counts]

    def known(self, count: int) -> float | None:
        """What a count that was measured takes; None where it was not."""
        return self._seconds.get(_rounded(count))

    def __call__(self, count: float) -> float | None:
        """Seconds at a count; None where nothing was measured yet."""
        counts, seconds = self._counts, self._highest
        if not counts:
            return None
        if len(counts) == 1:  # flat: what a step bound by memory is, and an invitation to the measurement that tells
            return seconds[0] if count >= counts[0] else seconds[0] * count / counts[0]
        right = min(max(1, bisect.bisect_left(counts, count)), len(counts) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (counts[right] - counts[left])
        return max(0.0, seconds[left] + slope * (count - counts[left]))


def _rounded(count: int) -> int:
    """Counts that differ by less than an eighth share a mean."""
    if count <= 16:
        return count
    step = 1 << (count.bit_length() - 4)
    return count // step * step
