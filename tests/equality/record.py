"""The record of a table: a line for each configuration that has run, of whatever source; and the report made of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.equality.axes import AXIS_NAMES, Configuration
from tests.equality.check import Outcome
from tests.equality.jobs import CASES

ROOT = Path(__file__).parents[2]
# What an answer depends on: the engine, and what the table asks of it.
SOURCES = ("src/slipstream/**/*.py", "tests/equality/*.py", "tests/engine/harness.py", "tests/speculate/eagle_heads.py")
COMMAND = "python -m tests.equality"


def source_hash() -> str:
    """Of all files the table depends on."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def line(source: str, configuration: Configuration, outcome: Outcome) -> str:
    """One configuration's line of JSON."""
    told = {"source": source, "passed": outcome.passed, **asdict(configuration), "cells": len(CASES), **asdict(outcome)}
    return json.dumps(told) + "\n"


def read(path: Path, source: str) -> dict[Configuration, dict[str, Any]]:
    """What there is of this source. A line that was being written when its process was killed is left out."""
    found: dict[Configuration, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            told = json.loads(text)
        except json.JSONDecodeError:
            continue
        if told["source"] == source:
            found[Configuration(**{name: told[name] for name in AXIS_NAMES})] = told
    return found


def repeat(configuration: Configuration) -> str:
    """The command that runs this one alone."""
    return f"{COMMAND} --only {configuration.name}"


def what_failed(told: Mapping[str, Any]) -> str:
    """In a line."""
    if told["error"]:
        return f"broke: {told['error'].strip().splitlines()[-1]}"
    if told["differences"]:
        name, how = next(iter(told["differences"].items()))
        return f"{len(told['differences'])} answers differ, first {name}: {how}"
    return f"not exercised: {', '.join(told['not_exercised'])}"


def report(found: Mapping[Configuration, Mapping[str, Any]], num_wanted: int, source: str) -> str:
    """The Markdown of docs/equality.md."""
    failed = {one: told for one, told in found.items() if not told["passed"]}
    cells = sum(told["cells"] for told in found.values())
    wrong = sum(told["cells"] if told["error"] else len(told["differences"]) for told in found.values())
    totals = Counter[str]()
    for told in found.values():
        totals.update({name: told["counts"].get(name, 0) for name in _TOTALS})
    day = max((told["at"][:10] for told in found.values()), default="never")
    hours = sum(told["seconds"] for told in found.values()) / 3600
    left = num_wanted - len(found)
    verdict = "All answers are equal, and each configuration did what it is for." if found and not failed and not left else ""
    rows = [f"| {name} | {_values(found, name)} |" for name in AXIS_NAMES]
    lines = [
        "# The equality table",
        "",
        "Whatever drafts, and however steps, pages and prompts are cut: the answers are those of plain decoding, one by one.",
        "Every configuration below answered the same requests, greedy and seeded, with each sampling parameter. Tokens, finish",
        "reasons, stop reasons and logprobs were compared with those of the engine at lag 0, without a drafter, a cache or a",
        "neighbour: bit by bit on HashLM, a model of integer hashes in which one wrong page, position or mask changes every",
        "later token. The tiny Llama in float64 ran in an array that covers pairs of values, and triples with drafter and lag.",
        "",
        "A configuration fails as well if what it is for did not happen: no draft accepted where the drafter can be right, no",
        "prompt chunk beside verify rows, nobody retracted under pressure, nothing found in the cache, no drafter asleep and",
        "awake again.",
        "",
        "```sh",
        f"{COMMAND} --out equality.jsonl --processes 2 --report docs/equality.md",
        "```",
        "",
        f"Run on {day}, source {source}, {hours:.1f} hours of one core: **{len(found)} configurations"
        f"{f' of {num_wanted}' if left else ''}, {cells} cells, {wrong} of them different, "
        f"{len(failed)} configurations failed.**",
        verdict,
        "",
        "| axis | configurations with each value |",
        "| --- | --- |",
        *rows,
        "",
        "| what happened in them | times |",
        "| --- | --- |",
        *(f"| {name} | {totals[name]} |" for name in _TOTALS),
        "",
        f"The {len(CASES)} requests: {'; '.join(case.name for case in CASES)}.",
        "",
    ]
    if failed:
        lines += ["## What failed", ""]
        lines += [f"- `{repeat(one)}`: {what_failed(told)[:300]}" for one, told in failed.items()]
        lines += [""]
    return "\n".join(lines)


_TOTALS = (
    "tokens", "drafted", "accepted", "steps", "prompts beside drafts", "cut prompts beside drafts", "cached tokens", "pauses",
    "retractions", "sleeps", "wakes", "requests of two drafters", "fills",
)  # fmt: skip


def _values(found: Sequence[Configuration] | Mapping[Configuration, object], axis: str) -> str:
    counted = Counter(getattr(one, axis) for one in found)
    ordered = sorted(counted.items(), key=lambda pair: (str(type(pair[0])), pair[0]))
    return ", ".join(f"{str(value).lower()}: {count}" for value, count in ordered)
