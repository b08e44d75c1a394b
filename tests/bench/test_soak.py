"""The soak's judgement: what it takes for a problem, and what it does not."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.soak import Samples, main, problems, report
from bench.soak_load import Tally
from bench.trend import trend
from slipstream.cli.measure import Timeline

MIB = 2**20
IDLE = {"running": 0.0, "waiting": 0.0, "paused": 0.0, "retractions": 2.0}
IDLE |= {"used": 0.0, "evictable": 3.0, "free": 5.0, "pool": 8.0}


def tally() -> Tally:
    good = Timeline(1.0, 3, 2, [1.5, 1.75])
    return Tally(Counter({"chat": 2, "abort": 1, "abort, given up": 1}), {"chat": [good, good]}, num_output_tokens=4)


def samples(engine: Callable[[float], float]) -> Samples:
    times = [2.0 * step for step in range(300)]
    return Samples(times, [80 * MIB] * 300, [int(engine(at)) for at in times])


def flat(at: float) -> float:
    """Noise whose neighbours are alike, as allocators make it."""
    return 300 * MIB + 3 * MIB * random.Random(int(at) // 20).random()


def test_a_good_run() -> None:
    assert problems(tally(), samples(flat), IDLE, 0, "12:00:01 INFO  request\n12:00:02 WARNING  stopping\n") == []


def test_growth_while_warming_up_is_no_leak() -> None:
    assert problems(tally(), samples(lambda at: 300 * MIB + min(at, 150) * MIB), IDLE, 0, "") == []


def test_a_minute_says_nothing_of_memory() -> None:
    short = Samples([2.0 * step for step in range(30)], [80 * MIB] * 30, [(300 + step) * MIB for step in range(30)])
    assert problems(tally(), short, IDLE, 0, "") == []


def test_a_leak() -> None:
    """10 MiB over the 400 s behind the warm-up, under the same noise."""
    (found,) = problems(tally(), samples(lambda at: flat(at) + at * 10 * MIB / 400), IDLE, 0, "")
    assert found.startswith("the engine process must not grow, but grew by at least ")


@pytest.mark.parametrize(
    "gauges, words",
    [
        ({"running": 1.0}, "nothing must run or wait"),
        ({"waiting": 2.0}, "but 0 run and 2 wait"),
        ({"free": 4.0}, "must be the pool"),
        ({"free": 4.0, "used": 1.0}, "must be the pool"),
        ({"retractions": 0.0}, "no pressure"),
    ],
)
def test_what_is_held_at_the_end(gauges: dict[str, float], words: str) -> None:
    (found,) = problems(tally(), samples(flat), {**IDLE, **gauges}, 0, "")
    assert words in found


def test_errors_exit_codes_and_logs() -> None:
    assert problems(Tally(), samples(flat), IDLE, 0, "") == ["no call was answered"]
    bad = tally()
    bad.errors.append("chat: Unexpected: no")
    log = "12:00:01 ERROR a request failed\nTraceback (most recent call last):\n"
    found = problems(bad, samples(flat), IDLE, -9, log)
    assert found[0] == "error: chat: Unexpected: no" and found[1] == "the server must end with 0, but got -9" and len(found) == 4


def test_the_report() -> None:
    got = report(2.0, tally(), samples(flat), IDLE)
    assert got["calls_per_s"] == 1.5 and got["output_tokens_per_s"] == 2.0  # what was given up is counted once
    assert got["latency_ms"]["chat"]["p50"] == 750 and got["ttft_ms"]["p50"] == 500 and got["itl_ms"]["p99"] == 250
    json.dumps(got)


def test_a_line_and_its_interval() -> None:
    times = [float(at) for at in range(100)]
    exact = trend(times, [5 + 2 * at for at in times])
    assert exact is not None and exact.slope == pytest.approx(2) and exact.high - exact.low < 1e-9
    assert exact.surely_grown == pytest.approx(198) and exact.mean == pytest.approx(104)
    assert trend([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) is None
    inside, steeper = 0, 0
    for seed in range(200):
        rng = random.Random(seed)
        noisy = trend(times, [at + rng.gauss(0, 10) for at in times])
        assert noisy is not None
        inside += noisy.low <= 1 <= noisy.high
        steeper += noisy.low > 1
    assert 180 <= inside <= 199 and steeper <= 12, "a 95% interval holds the slope 95% of the time"


@pytest.mark.slow
def test_a_few_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "soak.json"
    code = main(["--minutes", "0.06", "--seed", "7", "--clients", "6", "--json", str(path), "--", "--max-num-seqs", "4"])
    said = capsys.readouterr().out
    assert code == 0, said
    result = json.loads(path.read_text())
    assert said.startswith("seed 7\n") and said.rstrip().endswith("good") and result["seed"] == 7 and result["problems"] == []
    assert (
        sum(result["calls"].values()) > 10
        and result["at_the_end"]["pool"] == 80 == result["at_the_end"]["free"] + result["at_the_end"]["evictable"]
    )
