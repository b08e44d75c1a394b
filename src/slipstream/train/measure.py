"""How good a head is: what the engine itself accepts of its drafts, on prompts that it was not trained on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.engine.build import engine_around
from slipstream.engine.stats import DraftStats
from slipstream.train.answers import answer_all
from slipstream.train.progress import Reporter
from slipstream.types import EngineRequest
from slipstream.weights.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out.

    Attributes:
        num_prompts, num_tokens: answers, and tokens in them.
        num_drafts: drafts that were verified: passes of the target, a row each.
        accept_length: tokens a verified draft brought, the target's own included: 1 + accepted / drafts.
        reached: share of drafts of which i + 1 tokens or more were accepted.
        acceptance: the same, of those of which i were.
        seconds: in all.
    """

    num_prompts: int
    num_tokens: int
    num_drafts: int
    accept_length: float
    reached: tuple[float, ...]
    acceptance: tuple[float, ...]
    seconds: float

    @classmethod
    def of(cls, stats: DraftStats, num_steps: int, num_prompts: int, num_tokens: int, seconds: float) -> Measured:
        """Out of the engine's counters."""
        counts = [stats.num_drafts, *stats.accepted_at, *[0] * (num_steps - len(stats.accepted_at))]
        return cls(
            num_prompts,
            num_tokens,
            stats.num_drafts,
            1 + stats.num_accepted / max(1, stats.num_drafts),
            tuple(count / max(1, counts[0]) for count in counts[1:]),
            tuple(after / max(1, before) for before, after in itertools.pairwise(counts)),
            seconds,
        )


def measure(
    loaded: LoadedModel,
    config: EngineConfig,
    head: Path,
    requests: Sequence[EngineRequest],
    num_steps: int,
    reporter: Reporter,
    stop: threading.Event,
) -> Measured:
    """Answer `requests` with drafts of `num_steps` tokens from the head in the folder `head`, always drafting."""
    spec = f"eagle:model={head},topk=1,steps={num_steps}"
    own = {"speculate": (spec,), "adaptive_speculation": False, "accept": "coupled"}
    engine = engine_around(loaded, config.model_copy(update=own))
    reporter.begin("measuring", 0, len(requests))
    started, num_tokens, done = time.perf_counter(), 0, 0
    for _, tokens, _ in answer_all(engine, requests, config.max_num_seqs, stop):
        done, num_tokens = done + 1, num_tokens + len(tokens)
        reporter.at(done)
    reporter.end()
    stats = engine.stats().drafter("eagle")
    return Measured.of(stats, num_steps, len(requests), num_tokens, time.perf_counter() - started)
