"""The axes of the table, its configurations, and arrays that cover pairs and triples of values with few of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

DRAFTERS = (
    "off", "ngram", "draft_model", "eagle_chain", "eagle_tree", "self_chain", "self_tree", "rand_chain", "rand_tree",
    "partial_chain", "partial_tree", "ngram+draft_model", "ngram+eagle",
)  # fmt: skip
AXES: Mapping[str, tuple[Any, ...]] = {
    "drafter": DRAFTERS,
    "k": (1, 3, 7),
    "lag": (0, 1),
    "page_size": (1, 16),
    "cache": (False, True),
    "chunked": (False, True),
    "pressure": (False, True),
    "concurrency": (1, 2, 4, 8),
}
MODELS = ("hash", "llama")  # every cell on HashLM; on the tiny Llama in float64, a covering array


@dataclass(frozen=True)
class Configuration:
    """One engine.

    Attributes:
        model: "hash" or "llama".
        drafter, k: who drafts, and how deep at most; `off` drafts nothing, and has k = 0.
        lag, page_size, cache: as the engine's flags.
        chunked: prompts come in pieces, beside verify rows; else each comes whole.
        pressure: pages are short, and more urgent requests come later: they take the place of those that run.
        concurrency: most requests that run at once; so many do.
    """

    model: str
    drafter: str
    k: int
    lag: int
    page_size: int
    cache: bool
    chunked: bool
    pressure: bool
    concurrency: int

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return " ".join(f"{name}={_shown(value)}" for name, value in asdict(self).items())

    def has(self, wanted: Mapping[str, frozenset[str]]) -> bool:
        """Whether each axis named has one of the values, as they are written in a name."""
        return all(_shown(getattr(self, name)) in values for name, values in wanted.items())


AXIS_NAMES = tuple(field.name for field in fields(Configuration))


def _shown(value: object) -> str:
    return str(value).lower()


def of(model: str, **values: Any) -> Configuration:
    """A configuration; without drafts k is 0."""
    return Configuration(model, **{**values, "k": 0 if values["drafter"] == "off" else values["k"]})


@cache
def configurations() -> tuple[Configuration, ...]:
    """All of the table: HashLM in every cell, the tiny Llama in an array that covers pairs and triples. In a mixed order."""
    every = dict.fromkeys(of("hash", **dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values()))
    found = [*every, *covering("llama")]
    random.Random(0).shuffle(found)
    return tuple(found)


def covering(model: str, seed: int = 0) -> list[Configuration]:
    """Configurations with every pair of values of two axes, and every triple of drafter, lag and one more."""
    names = list(AXES)
    groups = [{*pair} for pair in itertools.combinations(names, 2)]
    groups += [{"drafter", "lag", name} for name in names if name not in ("drafter", "lag")]
    rows = cover(AXES, [tuple(name for name in names if name in group) for group in groups], seed)
    return list(dict.fromkeys(of(model, **row) for row in rows))


def cover(axes: Mapping[str, Sequence[Any]], groups: Sequence[tuple[str, ...]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of one value an axis in which every combination of values of every group of axes occurs, few of them.

    Greedy, after AETG (Cohen et al. 1997): each row begins with a combination that is still missing, and each further axis takes
    the value that brings the most of the others; ties are broken by `seed`.
    """
    rng = random.Random(seed)
    missing = {(group, values) for group in groups for values in itertools.product(*(axes[name] for name in group))}
    largest_first = sorted(missing, key=lambda one: (-len(one[0]), repr(one)))
    for start in largest_first:
        if start not in missing:
            continue
        row = dict(zip(*start, strict=True))
        rest = [name for name in axes if name not in row]
        rng.shuffle(rest)
        for name in rest:
            scores = {value: _gain(row | {name: value}, name, groups, missing) for value in axes[name]}
            best = max(scores.values())
            row[name] = rng.choice([value for value, score in scores.items() if score == best])
        missing -= {(group, tuple(row[name] for name in group)) for group in groups}
        yield {name: row[name] for name in axes}


def _gain(
    row: Mapping[str, Any], name: str, groups: Sequence[tuple[str, ...]], missing: set[tuple[tuple[str, ...], tuple[Any, ...]]]
) -> int:
    """Missing combinations that a row in the making has with its axis `name`."""
    whole = [group for group in groups if name in group and all(one in row for one in group)]
    return sum((group, tuple(row[one] for one in group)) in missing for group in whole)
