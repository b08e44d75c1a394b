"""The cost model on machines and requests that are made up: never slower than plain decoding, and near the best fixed width."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from slipstream.speculate.width import Acceptance, Curve, WidthModel

DEPTH = 8
Seconds = Callable[[int], float]


def memory_bound(tokens: int) -> float:
    """Weights are read once whatever the tokens, up to many of them: a GPU, or a CPU with good kernels."""
    return max(10e-3, tokens * 0.1e-3)


def compute_bound(tokens: int) -> float:
    """Every token costs almost as much as the first: torch's fp32 products on two cores."""
    return 2e-3 + tokens * 8e-3


def between(tokens: int) -> float:
    return 8e-3 + tokens * 0.7e-3


@dataclass
class World:
    """A machine and some requests; `alphas`: chance that a level is accepted."""

    seconds: Seconds
    alphas: list[float]
    draft_s: float = 0.2e-3  # a node
    noise: float = 0.1
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    weather: random.Random = field(default_factory=lambda: random.Random(4))  # of its own: the same for all that are compared

    def step(self, widths: list[int]) -> tuple[list[int], float, float]:
        """Accepted levels of each row, seconds of the step, and of drafting."""
        accepted = []
        for alpha, width in zip(self.alphas, widths, strict=True):
            level = 0
            while level < width and self.rng.random() < alpha:
                level += 1
            accepted.append(level)
        nodes = sum(widths)
        factor = 1 + self.noise * self.weather.random()
        if self.weather.random() < 0.01:
            factor *= 10  # a hiccup
        draft_s = self.draft_s * nodes
        return accepted, self.seconds(len(widths) + nodes) * factor + draft_s, draft_s


def rate_of(world: World, choose: Callable[[], list[int]], told: WidthModel | None, rows: list[Acceptance], steps: int) -> float:
    tokens, seconds = 0, 0.0
    for number in range(steps):
        widths = choose()
        accepted, step_s, draft_s = world.step(widths)
        if told is not None:
            told.step_took(len(widths) + sum(widths), sum(widths), step_s, draft_s)
            for row, level, width in zip(rows, accepted, widths, strict=True):
                if width:
                    told.draft_was(row, level, width)
        if number >= steps // 5:  # behind the first steps, in which it learns
            tokens += len(widths) + sum(accepted)
            seconds += step_s
    return tokens / seconds


def adaptive(seconds: Seconds, alphas: list[float], steps: int = 1500) -> float:
    model, rows = WidthModel(DEPTH, DEPTH), [Acceptance() for _ in alphas]
    return rate_of(World(seconds, alphas), lambda: model.widths(rows, [DEPTH] * len(rows), 0), model, rows, steps)


def fixed(seconds: Seconds, alphas: list[float], width: int, steps: int = 1500) -> float:
    return rate_of(World(seconds, alphas), lambda: [width] * len(alphas), None, [], steps)


@pytest.mark.parametrize("seconds", [memory_bound, compute_bound, between])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 32])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 0.97])
def test_never_slower_than_plain_and_near_the_best_width(seconds: Seconds, num_rows: int, alpha: float) -> None:
    got = adaptive(seconds, [alpha] * num_rows)
    plain = fixed(seconds, [alpha] * num_rows, 0)
    best = max(fixed(seconds, [alpha] * num_rows, width) for width in (0, 1, 2, 4, 8))
    assert got > 0.98 * plain
    assert got > 0.85 * best


@pytest.mark.parametrize("seconds", [compute_bound, between])
def test_rows_that_draft_well_draft_and_the_others_do_not(seconds: Seconds) -> None:
    alphas = [0.95] * 4 + [0.02] * 4
    got = adaptive(seconds, alphas)
    assert got > 0.96 * max(fixed(seconds, alphas, width) for width in (0, 1, 2, 4, 8))


def test_a_request_that_begins_to_copy_is_found_out() -> None:
    world, model, rows = World(memory_bound, [0.0]), WidthModel(DEPTH, DEPTH), [Acceptance()]
    widths: list[int] = []

    def choose() -> list[int]:
        widths.append(model.widths(rows, [DEPTH], 0)[0])
        return widths[-1:]

    rate_of(world, choose, model, rows, 300)
    assert sum(widths[-100:]) < 100, "nothing is accepted: it hardly tries"
    world.alphas[0] = 1.0
    rate_of(world, choose, model, rows, 300)
    assert sum(width == DEPTH for width in widths[-100:]) > 90


def test_no_row_gets_more_than_it_may_have() -> None:
    model, rows = WidthModel(DEPTH, DEPTH), [Acceptance() for _ in range(3)]
    for _ in range(20):
        widths = model.widths(rows, [0, 1, DEPTH], 0)
        assert widths[0] == 0 and widths[1] <= 1 and widths[2] <= DEPTH
        model.step_took(3 + sum(widths), sum(widths), 0.01, 0.001)
        for row, width in zip(rows, widths, strict=True):
            if width:
                model.draft_was(row, width, width)
    assert model.widths(rows, [0, 1, DEPTH], 0) == [0, 1, DEPTH]
    assert model.widths([], [], 0) == []


def test_a_tree_has_fewer_levels_than_nodes() -> None:
    model, row = WidthModel(3, 9), Acceptance()
    model.draft_was(row, 3, 9)
    assert (row.accepted, row.tried) == (3, 3)
    model.draft_was(row, 1, 6)
    assert row.tried == pytest.approx(0.85 * 3 + 2)


def test_a_curve_has_straight_lines_and_never_falls() -> None:
    curve = Curve()
    assert curve(3) is None
    for count, seconds in ((4, 2.0), (8, 1.0), (12, 5.0)):
        curve.add(count, seconds)
    assert [curve(count) for count in (2, 4, 6, 8, 10, 12, 14)] == [2.0, 2.0, 2.0, 2.0, 3.5, 5.0, 6.5]
    curve.add(4, 2000.0)
    assert curve(4) == pytest.approx(2.2), "an outlier counts as one and a half times the mean at most"


def test_a_curve_forgets_what_was_not_measured_again() -> None:
    curve = Curve()
    for count, seconds in ((4, 2.0), (5, 2.0), (8, 100.0)):
        curve.add(count, seconds)
    for _ in range(300):
        curve.add(4, 2.0)
        curve.add(5, 2.0)
    assert curve(8) == 2.0
