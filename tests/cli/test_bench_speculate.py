"""`slipstream bench speculate` from end to end on a tiny model: turns, ratios, accept lengths, the table, the file it leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.bench_prompts import passage, task
from slipstream.cli.bench_speculate import TimeLeft, system_configs
from slipstream.cli.main import main
from slipstream.cli.timed_engine import Ids, Sample
from slipstream.cli.turns import compare, turns
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.testing.tiny import tiny_checkpoint

SIZES = ["--input-len", "30", "--output-len", "12", "--rounds", "2", "--dtype", "float64", "--fixed-width"]


class Fixed:
    """A system with a constant speed; `answer` is what it says."""

    def __init__(self, name: str, wall_s: float, answer: int, accepted: int, log: list[str]) -> None:
        self.name, self._wall_s, self._answer, self._accepted, self._log = name, wall_s, answer, accepted, log

    def run(self, prompts: Sequence[Ids], output_len: int) -> tuple[Sample, list[Ids]]:
        self._log.append(self.name)
        sample = Sample(self._wall_s, 2 * self._wall_s, 12, num_steps=6, num_drafted=16, num_accepted=self._accepted)
        return sample, [[self._answer]] * len(prompts)


def test_ratios_are_to_off_and_differing_answers_are_counted() -> None:
    log: list[str] = []
    systems = {"off": Fixed("off", 2.0, 5, 0, log), "a": Fixed("a", 1.0, 5, 8, log), "b": Fixed("b", 4.0, 6, 0, log)}
    found = compare(list(turns(systems, [[1], [2]], 4, rounds=2)), "off")
    assert log == ["off", "a", "b", "off", "a", "b", "b", "a", "off"]
    assert found["num_differing"] == {"a": 0, "b": 4} and found["num_answers"] == 4
    assert found["speed"]["a"]["median"] == 2.0 and found["speed"]["b"]["median"] == 0.5
    assert found["cpu"]["a"]["median"] == 0.5
    assert found["systems"]["a"]["accept_length"] == 3.0 and found["systems"]["off"]["accept_length"] == 1.0


def bench(*argv: str) -> int:
    return main(["bench", "speculate", str(tiny_checkpoint("llama")), *SIZES, *argv])


def test_a_whole_run_and_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft model that is the target, and n-grams; float64, so that every answer must be that of plain decoding."""
    draft = f"draft_model:model={tiny_checkpoint('llama')},width=3"
    monkeypatch.setattr("slipstream.cli.progress.REPORT_EVERY_S", 0.0)
    path, questions = tmp_path / "out.json", tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "one two three"}\n')
    flags = ["--system", "ngram", "--system", draft, "--dataset", f"own={questions}", "--json", str(path)]
    assert bench(*flags, "--concurrency", "1") == 0
    first = json.loads(path.read_text())
    assert set(first["results"]) == {"copy", "plain", "own"}
    for cells in first["results"].values():
        assert cells["1"]["num_differing"] == {"ngram": 0, draft: 0} and cells["1"]["num_answers"] == 2
        assert cells["1"]["systems"][draft]["accept_length"] > 2.0
        assert cells["1"]["systems"]["off"]["accept_length"] == 1.0
        assert cells["1"]["systems"]["off"]["drafted_per_token"] == 0
    cost = first["step_cost"]
    assert list(cost) == ["1", "4", "8", "16"] and cost["1"]["ratio"] == 1.0
    assert all(one["num_steps"] >= 3 and one["step_ms"] > 0 for one in cost.values())
    said = capsys.readouterr()
    assert "copy, 1 at once: off " in said.err and "at most" in said.err
    rows = [line for line in said.out.splitlines() if line.startswith(("copy", "plain", "own"))]
    assert len(rows) == 9 and sum("0 of 2" in row for row in rows) == 6 and "verifies R rows" in said.out
    assert "DRAFTED A TOKEN" in said.out and "the intervals of fewer than 10 are rough" in said.out

    del first["results"]["plain"]
    path.write_text(json.dumps(first))
    assert bench(*flags, "--concurrency", "1", "--resume") == 0
    second = json.loads(path.read_text())
    assert second["results"]["copy"] == first["results"]["copy"] and second["step_cost"] == cost
    assert set(second["results"]) == {"copy", "plain", "own"}

    assert bench(*flags, "--concurrency", "1", "--resume", "--temperature", "1") == 2
    assert "the same setup, but temperature is 1.0 and the file has 0.0" in capsys.readouterr().err


def test_accept_rules_side_by_side(tmp_path: Path) -> None:
    """At temperature 1 a draft model that is the target is accepted whole by both; coupled says what plain decoding says."""
    draft = f"draft_model:model={tiny_checkpoint('llama')},width=3"
    path = tmp_path / "out.json"
    rules = ["--temperature", "1", "--accept", "coupled", "rejection", "--sets", "copy", "--concurrency", "2"]
    assert bench("--system", draft, *rules, "--output-len", "13", "--json", str(path)) == 0
    result = json.loads(path.read_text())
    assert (result["setup"]["temperature"], result["setup"]["accept"]) == (1.0, ["coupled", "rejection"])
    cell = result["results"]["copy"]["2"]
    assert cell["num_differing"] == {f"{draft} coupled": 0, f"{draft} rejection": 4}
    for rule in ("coupled", "rejection"):
        assert cell["systems"][f"{draft} {rule}"]["accept_length"] > 2.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--system", "ngramm"], "error: --speculate must name one of draft_model,"),
        (["--system", "off"], "error: --system must name one drafter or more, but got 'off'"),
        (["--system", ""], "error: --system must name one drafter or more, but got ''"),
        (["--system", "ngram", "--system", "ngram"], "error: --system must name every system once, but got 'ngram' twice"),
        (["--system", "ngram draft_model:model=m"], "error: --speculate must name one drafter where --no-adaptive"),
        (["--dataset", "copy=x"], "error: --dataset must be NAME=FILE with a name of its own, but got 'copy=x'"),
        (["--dataset", "x=no/such/file"], "error: --dataset must name a readable file, but got 'no/such/file'"),
        (["--sets", "other"], "error: --sets must be of copy, plain, but got 'other'"),
        (["--concurrency", "64"], "error: --concurrency must be at most --max-num-seqs (32), but got 64"),
        (["--concurrency", "x"], "error: --concurrency must be an integer of at least 1, but got 'x'"),
        (["--output-len", "1"], "error: --output-len must be at least 2, but got 1"),
        (["--temperature", "-1"], "error: temperature must be a number from 0 to 100, but got -1.0"),
        (["--resume"], "error: --resume must be given with --json FILE, but got none"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "speculate", "no/such/model", "--fixed-width", *flags]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_file_of_something_else_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    for text, message in (("[1]", "must find a file of bench speculate"), ("{", "must find JSON in")):
        path.write_text(text)
        assert main(["bench", "speculate", "no/such/model", "--resume", "--json", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_systems() -> None:
    config = EngineConfig(speculate=("ngram:width=2",), accept="rejection")
    found = system_configs(None, None, config)
    assert {name: one.speculate for name, one in found.items()} == {"off": ("off",), "ngram:width=2": ("ngram:width=2",)}
    assert all(one.accept == "rejection" and not one.enable_prefix_caching for one in found.values())
    assert list(system_configs(None, None, EngineConfig())) == ["off", "ngram"]
    several = system_configs(["ngram  draft_model:model=m"], ["coupled", "rejection"], config)
    assert list(several)[1:] == [f"ngram draft_model:model=m {rule}" for rule in ("coupled", "rejection")]
    with pytest.raises(ConfigError, match="must have options of"):
        system_configs(["draft_model:model=m,depth=3"], None, config)


def test_time_left_is_an_upper_bound() -> None:
    left = TimeLeft()
    left.took(1, 2.0)
    left.took(4, 4.0)
    assert left.text({1: 2, 4: 1}) == "8 s" and left.text({8: 3}) == "24 s" and left.text({4: 60}) == "4 min"


def test_the_built_in_prompts_differ_and_are_always_the_same() -> None:
    assert len({task(number) for number in range(96)}) == 96
    passages: list[Any] = [passage(number, 20).split("\n", 1)[1] for number in range(64)]
    assert len(set(passages)) == 64
    assert passage(3, 5) == passage(3, 5) and passage(3, 6).startswith(passage(3, 5).splitlines()[0])
