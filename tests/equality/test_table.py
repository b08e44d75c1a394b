"""The part of the equality table that runs with all tests, and whether it can fail. All of it: `python -m tests.equality`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from unittest import mock

import pytest

from slipstream.engine.scheduler import Scheduler
from slipstream.speculate.registry import drafter_names
from slipstream.types import SamplingParams
from tests.equality import record
from tests.equality.__main__ import main
from tests.equality.axes import AXES, Configuration, configurations, covering, of
from tests.equality.check import TIGHT, check
from tests.equality.drafting import Turns
from tests.equality.jobs import CASES, wanted
from tests.fuzz.planted import planted

PLAIN = {"k": 3, "lag": 1, "page_size": 16, "cache": False, "chunked": False, "pressure": False, "concurrency": 8}


def configuration(**other: object) -> Configuration:
    return of("hash", **{"drafter": "partial_tree", **PLAIN, **other})


@pytest.mark.parametrize("one", covering("hash"), ids=lambda one: one.name.replace(" ", "-"))
def test_pairs_and_triples_with_drafter_and_lag(one: Configuration) -> None:
    outcome = check(one)
    assert outcome.passed, f"{outcome.differences}\n{outcome.not_exercised}\n{outcome.error}\nrepeat: {record.repeat(one)}"


# -- the array and the requests ----------------------------------------------------------------------------------------


def test_the_array_covers_all_pairs_and_the_triples_with_few_configurations() -> None:
    def has(value: object, one: Configuration, axis: str) -> bool:
        return getattr(one, axis) == value or (axis == "k" and one.drafter == "off")

    found = covering("hash")
    assert len(found) <= 1.15 * len(AXES["drafter"]) * 2 * len(AXES["concurrency"]), "no fewer than these can be"
    for axes in [
        *itertools.combinations(AXES, 2),
        *(("drafter", "lag", axis) for axis in AXES if axis not in ("drafter", "lag")),
    ]:
        for values in itertools.product(*(AXES[axis] for axis in axes)):
            pairs = list(zip(values, axes, strict=True))
            assert any(all(has(value, one, axis) for value, axis in pairs) for one in found), pairs


def test_the_whole_table_has_every_cell_of_hash_lm() -> None:
    table = configurations()
    assert len(table) == len(set(table))
    assert sum(one.model == "hash" for one in table) == (12 * 3 + 1) * 2**5 * 4
    assert {one.drafter for one in table if one.model == "llama"} == set(AXES["drafter"])


def test_every_drafter_there_is_has_its_rows() -> None:
    named = {name for drafter in AXES["drafter"] for name in drafter.split("+")}
    assert all(any(name == one or name.startswith(f"{one}_") for name in named) for one in drafter_names())


def test_the_requests_have_every_parameter_and_end_in_every_way() -> None:
    plain, said = SamplingParams(), {name for name in SamplingParams.field_names() if name not in ("n", "seed", "bad_words")}
    varied = {name for name in said if any(getattr(case.job.params, name) != getattr(plain, name) for case in CASES)}
    # Of the text and the prompt alone, which the front deals with.
    assert said - varied == {"skip_special_tokens", "truncate_prompt_tokens"}
    assert any(case.parent for case in CASES) and any(case.job.bad_word_ids for case in CASES)
    ends = {case.name: (answer.finish_reason, answer.stop_reason) for case, answer in zip(CASES, wanted("hash"), strict=True)}
    assert all(reason in ("stop", "length") for reason, _ in ends.values())
    for parameter, kind in (
        ("stop", str),
        ("stop, kept", str),
        ("stop_token_ids", int),
        ("min_tokens", int),
        ("eos", type(None)),
    ):
        mine = [why for name, (reason, why) in ends.items() if name.startswith(f"{parameter}, ") and reason == "stop"]
        assert any(isinstance(why, kind) for why in mine), f"{parameter} must end an answer"


# -- can it fail? ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", ["wrong_row", "retracted_in_flight", "late_stash"])
def test_a_planted_bug_is_found(bug: str) -> None:
    """Payloads of a neighbour, tokens lost at a retraction, payloads a step late: some configuration of ten fails."""
    wanted("hash")
    with planted(bug):
        outcomes = (check(one) for one in covering("hash")[:10])
        assert any(outcome.differences or outcome.error for outcome in outcomes)


def test_a_wrong_answer_is_told_as_a_difference_with_its_command() -> None:
    wanted("hash")
    with planted("wrong_row"):
        outcome = check(configuration())
    assert outcome.differences and not outcome.error and not outcome.passed
    told = json.loads(record.line("source", configuration(), outcome))
    text = record.report({configuration(): told}, 1, "source")
    assert "1 configurations failed" in text and record.repeat(configuration()) in text and "All answers are equal" not in text


def test_what_did_not_happen_is_no_pass() -> None:
    """Drafters that never take turns, prompts that wait until nobody runs, and pages enough."""
    with mock.patch.object(Turns, "CYCLE", ("light",)):
        outcome = check(configuration(drafter="ngram+eagle"))
    assert not outcome.differences and "drafters awake again" in outcome.not_exercised and not outcome.passed
    admissible = Scheduler._admissible
    with mock.patch.object(Scheduler, "_admissible", lambda self: None if self.running else admissible(self)):
        outcome = check(configuration())
    assert not outcome.differences
    assert {"8 requests in one step", "prompts beside verify rows", "prompts beside drafts"} <= set(outcome.not_exercised)
    with mock.patch.dict(TIGHT, {8: 4096}), mock.patch("tests.equality.check.NUM_WAVES", 1):
        outcome = check(configuration(pressure=True))
    assert not outcome.differences and outcome.not_exercised == ["retractions"]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "table.jsonl", tmp_path / "report.md"
    only = ["--only", "drafter=self_chain", "k=7", "concurrency=8", "page_size=16", "cache=false", "pressure=false", "model=hash"]
    run = [*only, "--out", str(out), "--report", str(page)]
    assert main([*run, "--limit-minutes", "0"]) == 0 and out.read_text() == ""
    assert main([*only, "lag=0", "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 2
    out.write_text(out.read_text() + '{"source": "cut sh')
    assert main([*run, "--processes", "2"]) == 0
    assert "4 configurations, 2 of them done" in capsys.readouterr().err
    assert [json.loads(text)["lag"] for text in out.read_text().splitlines() if text.endswith("}")] == [0, 0, 1, 1]
    assert f"4 configurations of {len(configurations())}, {4 * len(CASES)} cells, 0 of them different" in page.read_text()
    with mock.patch.object(record, "source_hash", return_value="another"):
        assert record.read(out, record.source_hash()) == {}


def test_the_command_fails_and_says_how_to_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.jsonl"
    run = ["--only", *configuration().name.split(), "--out", str(out)]
    wanted("hash")
    with planted("wrong_row"):
        assert main(run) == 1
    assert f"repeat: {record.repeat(configuration())}" in capsys.readouterr().err
    assert main(run) == 1, "what failed has failed for this source"


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(SystemExit, match="--only must name one of"):
        main(["--only", "drafters=off"])
    assert main(["--only", "drafter=nothing"]) == 2
