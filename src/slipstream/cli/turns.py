"""Systems that take turns, so that what slows a machine down slows all of them alike, and what is said of their turns.

round 1   A B C      round 2   C B A      round 3   A B C ...      a ratio is of the same round
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from slipstream.cli.intervals import median_ratio
from slipstream.cli.timed_engine import Ids, Sample, System, TimedEngine
from slipstream.config import EngineConfig
from slipstream.weights.loaded import LoadedModel

WARM_UP_LEN = 8
STEP_TURNS, STEP_OUTPUT_LEN = 3, 64
COLUMNS = ("wall_s", "cpu_s", "num_tokens", "num_steps", "num_drafted", "num_accepted")


def turns(
    systems: Mapping[str, System], prompts: Sequence[Ids], output_len: int, rounds: int
) -> Iterator[dict[str, tuple[Sample, list[Ids]]]]:
    """Each round's samples and answers by system, in the order in which they were taken; one short turn each comes before."""
    for system in systems.values():
        system.run(prompts, min(output_len, WARM_UP_LEN))
    for number in range(rounds):
        order = list(systems)[:: 1 if number % 2 == 0 else -1]
        yield {name: systems[name].run(prompts, output_len) for name in order}


def compare(taken: Sequence[Mapping[str, tuple[Sample, list[Ids]]]], base: str) -> dict[str, Any]:
    """Medians of each system, its tokens a second and CPU time a token over those of `base`, and its answers that differ.

    Answers may differ where torch's products round differently for different numbers of rows and two tokens nearly tie, and
    under `--accept rejection` they have the same distribution and nothing more.
    """
    samples = {name: [one[name][0] for one in taken] for name in sorted(taken[0], key=lambda name: name != base)}
    rates = {name: [one.num_tokens / one.wall_s for one in mine] for name, mine in samples.items()}
    costs = {name: [one.cpu_s / one.num_tokens for one in mine] for name, mine in samples.items()}
    others = [name for name in samples if name != base]
    return {
        "systems": {name: _medians(mine) for name, mine in samples.items()},
        "speed": {name: asdict(median_ratio(rates[name], rates[base])) for name in others},
        "cpu": {name: asdict(median_ratio(costs[name], costs[base])) for name in others},
        "num_differing": {
            name: sum(mine != theirs for one in taken for mine, theirs in zip(one[name][1], one[base][1], strict=True))
            for name in others
        },
        "num_answers": sum(len(one[base][1]) for one in taken),
        "samples": {
            name: {column: [getattr(one, column) for one in mine] for column in COLUMNS} for name, mine in samples.items()
        },
    }


def step_cost(loaded: LoadedModel, config: EngineConfig, prompt: Ids, num_rows: Sequence[int]) -> dict[str, dict[str, float]]:
    """What a step takes that verifies R rows of one request: its last token and R - 1 drafted ones, accepted or not.

    n-gram drafts of a fixed width fill the rows, because they cost nothing themselves; time in the drafter is not counted.
    By rows: the median `step_ms`, its `ratio` to that of the fewest rows, and of how many steps (`num_steps`) it is.
    """
    fixed = {**config.model_dump(), "adaptive_speculation": False, "max_num_seqs": 1}
    systems: dict[str, System] = {}
    engines: dict[int, TimedEngine] = {}
    for rows in sorted(num_rows):
        drafter = "off" if rows == 1 else f"ngram:width={rows - 1}"
        engines[rows] = TimedEngine(drafter, loaded, EngineConfig(**{**fixed, "speculate": (drafter,)}))
        systems[drafter] = engines[rows]
    for _ in turns(systems, [prompt], STEP_OUTPUT_LEN, STEP_TURNS):
        pass
    times = {rows: engine.step_s[rows] for rows, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    medians = {rows: statistics.median(mine) for rows, mine in times.items()}
    fewest = medians[min(medians)]
    return {
        str(rows): {"step_ms": 1000 * median, "ratio": median / fewest, "num_steps": len(times[rows])}
        for rows, median in medians.items()
    }


def _medians(taken: Sequence[Sample]) -> dict[str, float]:
    tokens, accepted = sum(one.num_tokens for one in taken), sum(one.num_accepted for one in taken)
    return {
        "tokens_per_s": statistics.median(one.num_tokens / one.wall_s for one in taken),
        "cpu_ms_per_token": statistics.median(1000 * one.cpu_s / one.num_tokens for one in taken),
        "step_ms": statistics.median(1000 * one.wall_s / one.num_steps for one in taken),
        # Each step of a row commits what was accepted and one token more.
        "accept_length": tokens / (tokens - accepted),
        "drafted_per_token": sum(one.num_drafted for one in taken) / tokens,
    }
