"""The cost model: how many nodes each row drafts in a step, so that drafting never costs more than it brings.

What a step takes, t(T), is learnt from the steps that run, by the tokens T they compute; what drafting takes besides, likewise.
What a row's nodes bring is learnt by request: alpha, how often the next level of its drafts was accepted. Its first level brings
alpha tokens, its second alpha^2, and so on. The levels of all rows, best first, are taken as long as

    tokens a second        (R + what they bring) / (t(R + their nodes) + drafting)                           grows.

A row that drafts nothing would never learn that it should. A two-hundredth of the time is set aside for trying: it is saved up
step by step, and spent on the row that has gone longest without. It imports no torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.2  # share of a new measurement in a mean
OUTLIER = 1.5  # a measurement counts as at most this many times the mean: machines have hiccups
FORGET = 400  # measurements after which one that was not made again says nothing any more
ROW_MEMORY, ALL_MEMORY = 0.85, 0.99  # how much of what was seen still counts one draft later, of a row and of all
PRIOR_WEIGHT = 1.0  # levels that a new request is thought to have seen, with the acceptance of the others
FIRST_ALPHA = 0.6  # acceptance before anything is known: worth a try
PROMISE = 1.05  # drafting must promise this many times the rate of plain decoding: of many noisy estimates the best is too good
TRYING_SHARE = 0.005
TRIED_LEVELS = 2


class Curve:
    """Seconds as a function of a count: means of what was measured, straight lines between and beyond, never falling.

    What has not been measured again for long is forgotten, so that a wrong value does not keep itself from being corrected.
    """

    def __init__(self) -> None:
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
            self._seconds[count] = seconds
        else:
            self._seconds[count] = known + SMOOTHING * (min(seconds, OUTLIER * known) - known)
        self._measured[count] = self._now
        oldest = min(self._measured, key=self._measured.__getitem__)
        if len(self._counts) > 2 and self._measured[oldest] < self._now - FORGET:
            del self._measured[oldest], self._seconds[oldest]
            self._counts.remove(oldest)
        highest = 0.0
        self._highest = [highest := max(highest, self._seconds[each]) for each in self._counts]

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


@dataclass(slots=True)
class Acceptance:
    """How drafts fare: levels accepted and levels tried, the older the less they count.

    Attributes:
        accepted, tried: sums.
        last_tried: number of the last step that drafted for it.
    """

    accepted: float = 0.0
    tried: float = 0.0
    last_tried: int = 0

    def add(self, num_accepted: int, num_levels: int, memory: float = ROW_MEMORY) -> None:
        """A draft of `num_levels` levels had `num_accepted` of them accepted; those behind the first refusal were never tried."""
        self.accepted = memory * self.accepted + num_accepted
        self.tried = memory * self.tried + min(num_accepted + 1, num_levels)

    def alpha(self, prior: float) -> float:
        """Chance that the next level is accepted, when those before it are."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


class WidthModel:
    """Chooses widths. The scheduler asks it and tells it; one thread.

    Args:
        depth: deepest path a drafter proposes.
        num_nodes: most nodes it proposes; more nodes than levels are a tree.
    """

    def __init__(self, depth: int, num_nodes: int) -> None:
        self._depth = depth
        self._nodes_per_level = max(1.0, num_nodes / max(depth, 1))
        self._step_s = Curve()
        self._draft_s = Curve()
        self._all = Acceptance()
        self._saved_s = 0.0
        self._step = 0

    def step_took(self, num_tokens: int, num_nodes: int, step_s: float, draft_s: float) -> None:
        """A step computed `num_tokens` tokens, `num_nodes` of them drafted, in step_s seconds, draft_s of them drafting."""
        self._step_s.add(num_tokens, step_s - draft_s)
        if num_nodes:
            self._draft_s.add(num_nodes, draft_s)

    def draft_was(self, acceptance: Acceptance, num_accepted: int, num_nodes: int) -> None:
        """A row's draft of `num_nodes` nodes had `num_accepted` of its levels accepted."""
        levels = self._levels(num_nodes)
        acceptance.add(num_accepted, levels)
        self._all.add(num_accepted, levels, ALL_MEMORY)

    def widths(self, rows: Sequence[Acceptance], most: Sequence[int], num_other_tokens: int) -> list[int]:
        """Nodes for each row.

        Args:
            rows: what is known of each.
            most: nodes each may have at most.
            num_other_tokens: prompt tokens of the step.
        """
        self._step += 1
        base = len(rows) + num_other_tokens
        plain_s = self._step_s(base)
        if plain_s is None:
            return [0] * len(rows)
        levels = self._best_levels(rows, most, base)
        self._saved_s += TRYING_SHARE * plain_s
        self._try_one(rows, levels, most, base)
        for row, count in zip(rows, levels, strict=True):
            if count:
                row.last_tried = self._step
        return [min(limit, self._nodes(count)) for limit, count in zip(most, levels, strict=True)]

    def _best_levels(self, rows: Sequence[Acceptance], most: Sequence[int], base: int) -> list[int]:
        """How many levels of each row are worth their nodes."""
        prior = self._all.alpha(FIRST_ALPHA)
        gains: list[tuple[float, int]] = []
        for place, (row, limit) in enumerate(zip(rows, most, strict=True)):
            alpha, gain = row.alpha(prior), 1.0
            for _ in range(self._levels(limit)):
                gain *= alpha
                gains.append((gain, place))
        gains.sort(reverse=True)
        best, best_rate, gained, looked_at = 0, PROMISE * self._rate(len(rows), base, 0), 0.0, 1
        for taken, (gain, _) in enumerate(gains, 1):
            gained += gain
            if taken < looked_at and taken < len(gains):
                continue
            looked_at = max(taken + 1, taken * 9 // 8)
            rate = self._rate(len(rows) + gained, base, self._nodes(taken))
            if rate > best_rate:
                best, best_rate = taken, rate
        levels = [0] * len(rows)
        for _, place in gains[:best]:
            levels[place] += 1
        return levels

    def _try_one(self, rows: Sequence[Acceptance], levels: list[int], most: Sequence[int], base: int) -> None:
        idle = [place for place, (count, limit) in enumerate(zip(levels, most, strict=True)) if not count and limit]
        if not idle:
            return
        place = min(idle, key=lambda one: rows[one].last_tried)
        tried = min(TRIED_LEVELS, self._levels(most[place]))
        nodes = self._nodes(sum(levels))
        cost = self._seconds(base, nodes + self._nodes(tried)) - self._seconds(base, nodes)
        if cost <= self._saved_s:
            self._saved_s -= cost
            levels[place] = tried

    def _rate(self, num_tokens: float, base: int, nodes: int) -> float:
        return num_tokens / max(self._seconds(base, nodes), 1e-9)

    def _seconds(self, base: int, nodes: int) -> float:
        drafting = self._draft_s(nodes) if nodes else None
        return (self._step_s(base + nodes) or 0.0) + (drafting or 0.0)

    def _levels(self, nodes: int) -> int:
        return min(self._depth, -int(-nodes // self._nodes_per_level))

    def _nodes(self, levels: int) -> int:
        return int(levels * self._nodes_per_level + 0.5)


def _rounded(count: int) -> int:
    """Counts that differ by less than an eighth share a mean."""
    if count <= 16:
        return count
    step = 1 << (count.bit_length() - 4)
    return count // step * step
