"""Loops are cut, and the file of answers survives being cut itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.train.answers import Answer, AnswerFile, cut_loop


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([*range(50)], None),
        ([*range(20), *[7] * 31], None),  # too short to be one
        ([*range(20), *[70] * 32], 22),
        ([*range(20), *[70, 71, 72] * 12, 70], 26),
        ([*range(20), *range(100, 120), *range(100, 120)], None),  # said twice: no loop yet
        ([*range(20), *range(100, 120), *range(100, 120), *range(100, 120)], 60),
        ([*range(20), *[*range(100, 165)] * 4], None),  # longer than any loop that is looked for
        ([*[70] * 40, 1, 2, 3], None),  # it got out of it
    ],
)
def test_an_answer_is_cut_behind_the_second_time(tokens: list[int], kept: int | None) -> None:
    assert cut_loop(tokens) == kept


def test_the_file_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    path, prompts = tmp_path / "answers.jsonl", {"a": (1, 2), "b": (3,), "c": (4,)}
    file = AnswerFile(path, prompts)
    for key in ("c", "a"):
        file.add(Answer(key, prompts[key], (5, 6), "stop"), "prompt", "text")
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    file = AnswerFile(path, prompts)
    assert file.missing == ["b"]
    file.add(Answer("b", (3,), (7,), "length"), "", "")
    file.close()
    again = AnswerFile(path, prompts)
    assert [answer.key for answer in again.in_order()] == ["a", "b", "c"]
    assert again.in_order()[1] == Answer("b", (3,), (7,), "length")
    again.close()


def test_answers_of_other_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path, {"a": (1, 2)})
    file.add(Answer("a", (1, 2), (5,), "stop"), "", "")
    file.close()
    with pytest.raises(ConfigError, match="line 1 must answer one of the prompts as the model reads it"):
        AnswerFile(path, {"a": (1, 3)})
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1 must be an answer, but is none"):
        AnswerFile(path, {"a": (1, 2)})
