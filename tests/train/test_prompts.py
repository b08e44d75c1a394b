"""Prompt files: which kinds are read, what is said of the others, and what is held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.train.prompts import digest, read_prompts, split


def written(path: Path, records: list[Any], as_array: bool = False) -> Path:
    path.write_text(json.dumps(records, indent=1) if as_array else "".join(json.dumps(one) + "\n" for one in records))
    return path


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "completion": "x"}, "a"),
    ({"question": "b", "answer": "x"}, "b"),
    ({"text": "c", "code": "x"}, "c"),
    ({"instruction": "d", "input": "", "output": "x"}, "d"),
    ({"instruction": "d", "input": "e", "response": "x"}, "d\n\ne"),
    ({"instruction": "f", "instances": [{"input": "g", "output": "x"}]}, "f\n\ng"),
    ({"turns": ["h", "i"]}, "h"),
    ({"messages": [{"role": "user", "content": "j"}, {"role": "assistant", "content": "x"}]}, "j"),
]


@pytest.mark.parametrize("as_array", [False, True])
def test_every_kind_of_record(tmp_path: Path, as_array: bool) -> None:
    for number, (record, text) in enumerate(KINDS):
        (prompt,) = read_prompts([written(tmp_path / f"{number}.json", [record], as_array)])
        assert prompt.messages == ({"role": "user", "content": text},)
        assert prompt.is_plain


def test_a_conversation_ends_with_its_last_user_message(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    (prompt,) = read_prompts([written(tmp_path / "a.jsonl", [{"messages": messages}])])
    assert list(prompt.messages) == messages[:4]
    assert not prompt.is_plain


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"id": 3, "story": "x"}, "line 2 must have one of messages, turns, prompt, question, instruction, text, but has 'id'"),
        ({"prompt": "  "}, "line 2: prompt must be text that is not blank, but got '  '"),
        ({"prompt": 7}, "line 2: prompt must be text that is not blank, but got 7"),
        ({"instruction": "a", "input": 7}, "line 2: input must be text, but got 7"),
        ({"messages": []}, "line 2: messages must be a list of at least one message"),
        ({"messages": [{"role": "system", "content": "a"}]}, "line 2: messages must have one of the user, but have none"),
        ([1], "line 2 must be a JSON object, but got"),
    ],
)
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: Any, error: str) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": "good"}, line])
    with pytest.raises(ConfigError) as raised:
        read_prompts([path])
    assert raised.value.message.startswith(f"{path} {error}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, error in (
        ("no.jsonl", "must name readable files"),
        ("cut.jsonl", "line 2 must be a JSON object"),
        ("latin.jsonl", "must name files of UTF-8"),
        ("empty.jsonl", "must hold prompts, but got none"),
    ):
        with pytest.raises(ConfigError, match=error):
            read_prompts([tmp_path / name])


def test_what_is_held_out_depends_on_each_prompt_alone(tmp_path: Path) -> None:
    records = [{"prompt": str(number)} for number in range(200)]
    all_ = read_prompts([written(tmp_path / "a.jsonl", records)])
    half = read_prompts([written(tmp_path / "b.jsonl", [*records[:100][::-1], records[0]])])
    assert len(half) == 100  # each once
    left, held_out = split(all_, 0.25)
    assert sorted(prompt.key for prompt in left + held_out) == [prompt.key for prompt in all_]
    assert 30 <= len(held_out) <= 70
    held_out_of_half = {prompt.key for prompt in split(half, 0.25)[1]}
    assert held_out_of_half == {prompt.key for prompt in held_out} & {prompt.key for prompt in half}
    assert digest(all_) != digest(half)
    assert split(all_, 0) == (all_, [])


def test_one_prompt_is_held_out_at_least_and_one_is_left(tmp_path: Path) -> None:
    two = read_prompts([written(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])])
    left, held_out = split(two, 1e-9)
    assert len(left) == len(held_out) == 1
    with pytest.raises(ConfigError, match="must hold more than the prompts that are held out"):
        split(two[:1], 0.1)
