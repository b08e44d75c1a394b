"""Reads prompts out of the usual kinds of data files, and decides which are used and which are held out. Imports no torch.

    {"messages": [...]}                     a conversation, up to its last message of the user
    {"turns": ["...", ...]}                 the first one
    {"prompt": "..."}  {"question": "..."}  {"text": "..."}
    {"instruction": "...", "input": "..."}  both, a blank line between them; `input` may be missing, empty, or stand in the first
                                            of `instances`

A file has one such object a line, or is one JSON array of them. Which prompts are used, and which of these are held out, follows
from each prompt's own hash: not from its place in a file, nor from what other prompts there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError, shown
from slipstream.text.messages import normalised_messages

TEXT_FIELDS = ("prompt", "question", "instruction", "text")
FIELDS = ("messages", "turns", *TEXT_FIELDS)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        messages: the conversation to be answered; most often one message of the user.
        where: file and line, for errors.
        key: 16 hex digits of the hash of `messages`.
    """

    messages: tuple[Mapping[str, Any], ...]
    where: str
    key: str

    @property
    def is_plain(self) -> bool:
        """It is one text; a model without a chat template can go on with it."""
        return len(self.messages) == 1 and self.messages[0]["role"] == "user"


def read_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """The prompts of all files, each once, in the order of their keys. Raises `ConfigError` naming file and line."""
    found: dict[str, Prompt] = {}
    for path in paths:
        for where, record in _records(path):
            messages = _messages(record, where)
            text = json.dumps(messages, sort_keys=True)
            key = _hash(text).hex()
            found.setdefault(key, Prompt(tuple(messages), where, key))
    if not found:
        raise ConfigError(f"--prompts must hold prompts, but got none in {', '.join(map(str, paths))}")
    return [found[key] for key in sorted(found)]


def split(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on, and the share that is held out: at least one where `share` is above 0.

    Raises `ConfigError` where nothing would be left to train on.
    """
    if not share:
        return list(prompts), []
    place = {prompt.key: int.from_bytes(_hash(f"held out {prompt.key}"), "big") / 2**64 for prompt in prompts}
    held_out = [prompt for prompt in prompts if place[prompt.key] < share] or [min(prompts, key=lambda one: place[one.key])]
    keys = {prompt.key for prompt in held_out}
    left = [prompt for prompt in prompts if prompt.key not in keys]
    if not left:
        raise ConfigError(f"--prompts must hold more than the prompts that are held out, but got {len(prompts)} in all")
    return left, held_out


def digest(prompts: Sequence[Prompt]) -> str:
    """What tells one set of prompts from another."""
    return _hash(" ".join(prompt.key for prompt in prompts)).hex()


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, object) of a file of JSON lines, or of one that is a JSON array."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--prompts must name readable files, but got {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts must name files of UTF-8 text, but got {str(path)!r}") from None
    if text.lstrip().startswith("["):
        for number, record in enumerate(_decoded(text, str(path), "a JSON array"), 1):
            yield f"{path} item {number}", record
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: a text may hold U+2028
        if line.strip():
            where = f"{path} line {number}"
            yield where, _decoded(line, where, "a JSON object")


def _decoded(text: str, where: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} must be {what}, but got: {error}") from None


def _messages(record: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(record, dict):
        raise ConfigError(f"{where} must be a JSON object, but got {shown(record)}")
    name = next((name for name in FIELDS if record.get(name) is not None), None)
    if name is None:
        raise ConfigError(
            f"{where} must have one of {', '.join(FIELDS)}, but has {', '.join(map(shown, list(record)[:8])) or 'nothing'}",
            hint="a prompt is read from the first of them that is there",
        )
    value = record[name]
    if name == "messages":
        return _conversation(value, where)
    if name == "turns":
        value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {name} must be text that is not blank, but got {shown(value)}")
    if name == "instruction" and (given := _input(record, where)):
        value = f"{value}\n\n{given}"
    return [{"role": "user", "content": value}]


def _input(record: Mapping[str, Any], where: str) -> str:
    value, instances = record.get("input"), record.get("instances")
    if value is None and isinstance(instances, list) and instances and isinstance(instances[0], dict):
        value = instances[0].get("input")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: input must be text, but got {shown(value)}")
    return (value or "").strip()


def _conversation(value: Any, where: str) -> list[dict[str, Any]]:
    try:
        messages = normalised_messages(value)
    except SlipstreamError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ConfigError(f"{where}: messages must have one of the user, but have none")
    return messages[: last + 1]
