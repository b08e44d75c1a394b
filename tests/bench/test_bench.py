"""The arithmetic of benchmarks, and that both lags are really compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench import script
from bench.engine import compare, measure
from bench.report import between_marks, figure, main, markdown, prefix_markdown, speculate_markdown
from bench.systems import Transformers
from slipstream.cli.intervals import median_ratio
from slipstream.cli.progress import StatusLine
from slipstream.cli.timed_engine import Ids, Sample, System


class Fixed:
    """A system with a constant speed and a constant answer."""

    def __init__(self, name: str, wall_s: float, token: int, log: list[str]) -> None:
        self.name = name
        self._wall_s = wall_s
        self._token = token
        self._log = log

    def run(self, prompts: Sequence[Ids], output_len: int) -> tuple[Sample, list[Ids]]:
        self._log.append(self.name)
        return Sample(self._wall_s, self._wall_s, 10, num_steps=5, host_s=self._wall_s / 4), [[self._token] * output_len]


def measured(systems: Sequence[System], rounds: int) -> dict[str, list[Sample]]:
    return measure({system.name: system for system in systems}, [[1, 2]], 4, rounds, StatusLine())


def test_median_ratio_is_of_pairs() -> None:
    """A slow round slows both; the ratio does not see it. One disturbed pair does not move the median."""
    slow = [1.0] * 9 + [100.0]
    ratio = median_ratio([2 * value for value in slow[:-1]] + [1.0], slow)
    assert ratio.median == 2.0
    assert (ratio.low, ratio.high) == (2.0, 2.0)


def test_the_interval_holds_the_median_and_grows_with_noise() -> None:
    quiet = median_ratio([1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.02, 0.98], [1.0] * 10)
    noisy = median_ratio([1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.1, 0.9, 1.2, 0.8], [1.0] * 10)
    assert quiet.low <= quiet.median <= quiet.high
    assert noisy.high - noisy.low > 5 * (quiet.high - quiet.low)
    assert median_ratio([1.0, 3.0], [1.0, 1.0]) == median_ratio([1.0, 3.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="pairs must be complete"):
        median_ratio([1.0], [])


def test_systems_take_turns_and_the_order_turns_around() -> None:
    log: list[str] = []
    systems = [Fixed("lag0", 2.0, 7, log), Fixed("lag1", 1.0, 7, log), Fixed("transformers", 4.0, 8, log)]
    samples = measured(systems, 2)
    names = ["lag0", "lag1", "transformers"]
    assert log == [*names, *names, *reversed(names)]
    result = compare(samples)
    assert result["ratios"]["lag1/lag0"]["median"] == 2.0
    assert result["ratios"]["lag1/transformers"]["median"] == 4.0
    assert result["systems"]["lag1"]["tokens_per_s"] == 10.0
    assert result["systems"]["lag1"]["host_share"] == 0.25
    assert result["systems"]["lag0"]["host_ms_per_step"] == 100.0


def test_lags_that_differ_end_the_benchmark() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match="same tokens"):
        measured([Fixed("lag0", 1.0, 1, log), Fixed("lag1", 1.0, 2, log)], 1)


def test_the_report_holds_the_numbers() -> None:
    log: list[str] = []
    systems = [Fixed("lag0", 2.0, 7, log), Fixed("lag1", 1.0, 7, log)]
    result = {
        "model": "m", "dtype": "float32", "num_threads": 2, "torch": "2", "input_len": 4, "output_len": 4, "rounds": 2,
        "machine": {"processor": "p", "num_cores": 2, "memory_bytes": 2**34}, "measured": "today",
        "results": {"8": compare(measured(systems, 2))},
    }  # fmt: skip
    text = markdown(result)
    assert "| 8 | 5.0 | 10.0 | 2.000 [2.000, 2.000] |" in text
    assert "| 8 | 1 | 200.00 |" in text
    assert figure(result).count("<rect") == 3
    page = between_marks("a\n<!-- engine: start -->\nold\n<!-- engine: end -->\nb\n", "engine", text)
    assert "old" not in page
    assert between_marks(page, "engine", text) == page
    with pytest.raises(ValueError, match="once each"):
        between_marks(page, "prefix", text)


def test_the_report_of_the_cache_and_of_drafting(tmp_path: Path) -> None:
    head = {
        "model": "m", "dtype": "float32", "num_threads": 2, "torch": "2", "machine": {"processor": "p", "num_cores": 2},
        "measured": "today", "rounds": 3, "output_len": 4, "temperature": 0.0, "concurrency": 8,
    }  # fmt: skip
    ratio = {"median": 2.0, "low": 1.5, "high": 2.5}
    one = {
        "rounds": 3,
        "medians": {"off": {"wall_s": 8.0}, "on": {"wall_s": 4.0}},
        "off/on": {"wall_s": ratio, "ttft_s": {**ratio, "median": 3.0}, "cpu_s": ratio},
    }
    text = prefix_markdown({**head, "pays": one, "costs": one, "sizes": {"pays": "shared", "costs": "alone"}})
    assert "| shared | 8.0 | 4.0 | 2.000 [1.500, 2.500] | 3.000 [1.500, 2.500] | 2.000 [1.500, 2.500] | 3 |" in text
    off = {"tokens_per_s": 10.0, "step_ms": 5.0, "accept_length": 1.0}
    own = {"tokens_per_s": 20.0, "step_ms": 6.0, "accept_length": 2.4}
    found = {
        "systems": {"off": off, "ngram": own}, "speed": {"ngram": ratio}, "num_differing": {"ngram": 1}, "num_answers": 12
    }  # fmt: skip
    setup = {name: head.pop(name) for name in ("model", "dtype", "num_threads", "torch", "rounds", "output_len", "temperature")}
    cost = {"1": {"step_ms": 5.0, "ratio": 1.0}, "4": {"step_ms": 6.0, "ratio": 1.2}}
    result = {**head, "setup": setup, "step_cost": cost, "results": {"copy": {"4": found}}}
    text = speculate_markdown(result)
    assert "Measured today: m in float32, 3 rounds, answers of 4, temperature 0;" in text
    assert "| copy | 4 | ngram | 10.0 | 20.0 | 2.000 [1.500, 2.500] | 2.40 | 5.0 | 6.0 | 1 of 12 |" in text
    assert "A step that verifies R rows of one request: 1: 5.0 ms (1.00), 4: 6.0 ms (1.20)." in text

    page = tmp_path / "page.md"
    page.write_text("<!-- speculate: start -->\nold\n<!-- speculate: end -->\n")
    for name in ("a", "b"):
        (tmp_path / f"speculate-{name}.json").write_text(json.dumps({**result, "measured": name}))
    main(["--results", str(tmp_path), "--into", str(page)])
    assert "Measured a:" in page.read_text() and "Measured b:" in page.read_text() and "old" not in page.read_text()


def test_an_error_of_a_script_is_said_not_traced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(SystemExit, match="2"):
        script.run(lambda: Transformers("no/such/path", False, torch.float32))
    err = capsys.readouterr().err
    assert err.startswith("error: transformers must be installed") and "hint: pip install" in err


def test_the_help_of_a_script_keeps_its_lines() -> None:
    assert "\n    one  1\n    two  2\n" in script.parser("engine", "What.\n\n    one  1\n    two  2\n").format_help()


def test_progress_and_results_have_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    status = StatusLine()
    status.show("round 1")
    status.show("round 2")  # so soon after it, where nobody watches, not worth a line
    status.keep("8 at once: fast")
    assert capsys.readouterr().err == "round 1\n8 at once: fast\n"
