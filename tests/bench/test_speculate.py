"""bench.speculate from end to end on a tiny model: turns, ratios, accept lengths, and the file it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.speculate import compare, main, measure
from bench.systems import Ids, Sample
from slipstream.testing.tiny import tiny_checkpoint


class Fixed:
    """A system with a constant speed; `answer` is what it says."""

    def __init__(self, name: str, wall_s: float, answer: int, accepted: int, log: list[str]) -> None:
        self.name, self._wall_s, self._answer, self._accepted, self._log = name, wall_s, answer, accepted, log

    def run(self, prompts: list[Ids], output_len: int) -> tuple[Sample, list[Ids]]:
        self._log.append(self.name)
        sample = Sample(self._wall_s, 2 * self._wall_s, 12, num_steps=6, num_drafted=16, num_accepted=self._accepted)
        return sample, [[self._answer]] * len(prompts)


def test_ratios_are_to_off_and_differing_answers_are_counted() -> None:
    log: list[str] = []
    systems = {"off": Fixed("off", 2.0, 5, 0, log), "a": Fixed("a", 1.0, 5, 8, log), "b": Fixed("b", 4.0, 6, 0, log)}
    samples, differing = measure(systems, [[1], [2]], 4, rounds=2)
    assert log == ["off", "a", "b", "off", "a", "b", "b", "a", "off"]
    assert differing == {"off": 0, "a": 0, "b": 4}
    found = compare(samples)
    assert found["speed"]["a"]["median"] == 2.0 and found["speed"]["b"]["median"] == 0.5
    assert found["cpu"]["a"]["median"] == 0.5
    assert found["systems"]["a"]["accept_length"] == 3.0 and found["systems"]["off"]["accept_length"] == 1.0


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A draft model that is the target, and n-grams; float64, so that every answer must be that of plain decoding."""
    checkpoint, path = str(tiny_checkpoint("llama")), tmp_path / "out.json"
    draft = f"draft_model:model={checkpoint},width=3"
    sizes = ["--concurrency", "1", "2", "--rounds", "2", "--input-len", "30", "--output-len", "12", "--context", "512"]
    systems = ["--dtype", "float64", "--fixed-width", "--speculate", "ngram", draft]
    main(["--model", checkpoint, *systems, *sizes, "--json", str(path)])
    result = json.loads(path.read_text())
    assert set(result["results"]) == {"copy", "plain"}
    for cells in result["results"].values():
        for cell in cells.values():
            assert cell["num_differing"] == {"off": 0, "ngram": 0, draft: 0}
            assert cell["systems"][draft]["accept_length"] > 2.0
            assert cell["systems"]["off"]["accept_length"] == 1.0 and cell["systems"]["off"]["drafted_per_token"] == 0
    assert "copy, 2 at once: off " in capsys.readouterr().err


def test_accept_rules_side_by_side(tmp_path: Path) -> None:
    """At temperature 1 a draft model that is the target is accepted whole by both; coupled says what plain decoding says."""
    checkpoint, path = str(tiny_checkpoint("llama")), tmp_path / "out.json"
    draft = f"draft_model:model={checkpoint},width=3"
    sizes = ["--concurrency", "2", "--rounds", "2", "--input-len", "30", "--output-len", "13", "--context", "512"]
    rules = ["--temperature", "1", "--accept", "coupled", "rejection", "--fixed-width", "--dtype", "float64"]
    main(["--model", checkpoint, "--speculate", draft, *rules, *sizes, "--sets", "copy", "--json", str(path)])
    result = json.loads(path.read_text())
    assert (result["temperature"], result["accept"]) == (1.0, ["coupled", "rejection"])
    cell = result["results"]["copy"]["2"]
    assert cell["num_differing"]["off"] == cell["num_differing"][f"{draft} coupled"] == 0
    assert cell["num_differing"][f"{draft} rejection"] == 4
    for rule in ("coupled", "rejection"):
        assert cell["systems"][f"{draft} {rule}"]["accept_length"] > 2.5
