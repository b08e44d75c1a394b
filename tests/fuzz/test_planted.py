"""Can the fuzzer fail? Every planted bug is found within a few schedules; without a plant the same schedules pass."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.planted import PLANTS, SHOWS_IN_ANSWERS, planted
from tests.fuzz.schedule import Build, build, build_unchecked, draw, failure

FIRST = 500_000
MOST = 300


def schedules_until_found(make: Build) -> int | None:
    """How many schedules it takes until one fails; None: more than MOST."""
    for number in range(MOST):
        if failure(draw(random.Random(FIRST + number)), make) is not None:
            return number + 1
    return None


@pytest.mark.parametrize("name", PLANTS)
def test_each_planted_bug_is_found(name: str) -> None:
    with planted(name):
        found = schedules_until_found(build)
    assert found is not None, f"{name} must be found within {MOST} schedules"


@pytest.mark.parametrize("name", SHOWS_IN_ANSWERS)
def test_most_are_found_by_the_answers_alone(name: str) -> None:
    """With poison, epochs checks and the auditor off: HashLM's output changes, or the engine breaks."""
    with planted(name):
        found = schedules_until_found(build_unchecked)
    assert found is not None, f"{name} must be found within {MOST} schedules"


@pytest.mark.parametrize("make", [build, build_unchecked])
def test_without_a_plant_the_same_schedules_pass(make: Build) -> None:
    assert schedules_until_found(make) is None
