"""Runs one configuration: every job's answer against the one wanted, and whether what the configuration is for did happen."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from unittest import mock

from slipstream.cache.pages import pages_for
from slipstream.engine.build import default_chooser
from slipstream.engine.executor import Device, Executor, StepHandle, ThreadExecutor
from slipstream.engine.loop import Engine
from slipstream.engine.plan import StepPlan
from slipstream.engine.stats import EngineStats
from slipstream.types import TokenLogprobs
from tests.engine.harness import Answer, collect, drain, make_engine
from tests.equality.axes import Configuration
from tests.equality.drafting import Turns, can_be_right, factories, must_be_wrong
from tests.equality.jobs import CASES, CONTEXT_LEN, model_of, wanted

# Tokens the pool holds under pressure, by concurrency: the largest request fits, and those that run at once outgrow it. Prompts
# that share cached pages need less.
TIGHT = {2: 104, 4: 136, 8: 188}
TIGHT_WITH_CACHE = {2: 104, 4: 128, 8: 164}
NUM_WAVES = 4  # in which requests come where there is pressure, each more urgent than those before
MAX_STEPS_BETWEEN_WAVES = 24


@dataclass
class Outcome:
    """What a configuration showed.

    Attributes:
        differences: case -> what is not as wanted.
        not_exercised: what should have happened and did not.
        error: the traceback of what broke; "" nothing.
        counts: what happened, by name.
        seconds: CPU time.
    """

    differences: dict[str, str] = field(default_factory=dict)
    not_exercised: list[str] = field(default_factory=list)
    error: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    at: str = ""

    @property
    def passed(self) -> bool:
        """All equal, and all of it exercised."""
        return not (self.differences or self.not_exercised or self.error)


class Watch:
    """Counts what the plans of an engine have in them."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._watched: dict[tuple[int, int], set[str]] = {}
        self._proposed: dict[tuple[int, int], set[str]] = {}

    def executor(self, device: Device) -> Executor:
        """What the engine gets its executor from."""
        return _Watched(ThreadExecutor(device), self)

    def see(self, plan: StepPlan) -> None:
        """Count one plan."""
        counts = self._counts
        drafted = any(row.num_nodes for row in plan.rows)
        cut = any(not chunk.is_last for chunk in plan.chunks)
        counts["steps"] += 1
        counts["cut prompts"] += cut
        counts["mixed steps"] += bool(plan.chunks and plan.rows)
        counts["cut prompts beside rows"] += cut and bool(plan.rows)
        counts["cut prompts beside drafts"] += cut and drafted
        counts["prompts beside drafts"] += bool(plan.chunks) and drafted
        counts["most at once"] = max(counts["most at once"], len({part.slot for part in plan.parts}))
        counts["fills"] += len(plan.fills)
        for row in plan.rows:
            key = row.slot, row.epoch
            seen = self._watched.setdefault(key, set())
            counts["sleeps"] += row.observer != row.relayed_by and row.relayed_by != "off"
            counts["wakes"] += row.observer != row.relayed_by and row.observer in seen
            seen |= {row.relayed_by, row.observer}
            if row.num_nodes:
                self._proposed.setdefault(key, set()).add(row.drafter)
        counts["requests of two drafters"] = sum(len(names) > 1 for names in self._proposed.values())


class _Watched:
    def __init__(self, inner: ThreadExecutor, watch: Watch) -> None:
        self._inner, self._watch = inner, watch
        self.close: Callable[[], None] = inner.close

    def submit(self, plan: StepPlan) -> StepHandle:
        self._watch.see(plan)
        return self._inner.submit(plan)


def check(configuration: Configuration) -> Outcome:
    """Run it. Nothing is raised: what breaks is an outcome too."""
    started, outcome, counts = time.process_time(), Outcome(), Counter[str]()
    expected = wanted(configuration.model)
    try:
        # The guard looks for reads that make the host wait, which no answer shows, and takes half of the time.
        with mock.patch("slipstream.engine.runner.SyncGuard", nullcontext):
            engine = engine_of(configuration, Watch(counts))
            got = run(engine, configuration, counts)
        _compare(configuration, got, expected, outcome)
        _count(engine.stats(), got, counts)
        outcome.not_exercised = missing(configuration, counts)
    except Exception:  # noqa: BLE001 - told as the outcome, and the next configuration has its turn
        outcome.error = traceback.format_exc(limit=-6)
    outcome.counts = dict(counts)
    outcome.seconds = round(time.process_time() - started, 3)
    outcome.at = datetime.now(UTC).isoformat(timespec="seconds")
    return outcome


def checked(configuration: Configuration) -> tuple[Configuration, Outcome]:
    """`check`, with what was checked: for processes that answer in any order."""
    return configuration, check(configuration)


def engine_of(configuration: Configuration, watch: Watch) -> Engine:
    """The engine of a configuration."""
    c = configuration
    drafters = factories(c.drafter, c.k)
    how: dict[str, Any] = {}
    if c.pressure:
        how = {"admission_headroom_tokens": 0}
        if c.concurrency > 1:
            half_filled = c.concurrency * (c.page_size - 1) // 2  # what last pages waste
            tokens = (TIGHT_WITH_CACHE if c.cache else TIGHT)[c.concurrency] + half_filled
            how["num_pages"] = pages_for(tokens, c.page_size)
    return make_engine(
        model_of(c.model),
        lag=c.lag,
        page_size=c.page_size,
        chunk=budget(c) if c.chunked else 2048,
        batch=c.concurrency,
        drafters=drafters,
        executor=watch.executor,
        context_len=CONTEXT_LEN,
        chooser=Turns if len(drafters) > 1 else default_chooser,
        enable_prefix_caching=c.cache,
        **how,
    )


def budget(configuration: Configuration) -> int:
    """Tokens a step: enough for most rows as wide as may be, and what is left for no prompt of some length."""
    nodes = configuration.k * {"self_tree": 3}.get(configuration.drafter, 2 if "tree" in configuration.drafter else 1)
    return min(96, max(8 + 3 * configuration.concurrency, configuration.concurrency * (1 + nodes) * 2 // 3))


def run(engine: Engine, configuration: Configuration, counts: Counter[str]) -> list[Answer]:
    """All cases at once, or in waves where there is pressure."""
    answers: dict[str, Answer] = {}
    wave = -(-len(CASES) // NUM_WAVES) if configuration.pressure else len(CASES)
    try:
        for place, case in enumerate(CASES):
            if place and place % wave == 0:
                for number in range(MAX_STEPS_BETWEEN_WAVES):
                    if number > 2 and _in_the_middle(engine, configuration.k):
                        break
                    _step(engine, answers, counts)
            engine.add(case.job.request(case.name, parent_id=case.parent, priority=-(place // wave)))
        while engine.has_work:
            _step(engine, answers, counts)
        drain(engine, answers)
    finally:
        engine.close()
    return [answers[case.name] for case in CASES]


def _in_the_middle(engine: Engine, k: int) -> bool:
    """Whether all that run have begun to answer, and none can be done within two steps: nobody is about to make room."""
    running = list(engine.scheduler.running)
    return bool(running) and all(each.num_output and each.limit - len(each.tokens) > 2 * (k + 1) for each in running)


def _step(engine: Engine, answers: dict[str, Answer], counts: Counter[str]) -> None:
    collect(engine, answers)
    counts["pauses"] += engine.scheduler.num_paused
    counts["turns"] += 1
    if counts["turns"] > 20_000:
        raise AssertionError("the engine must come to an end")


def _compare(configuration: Configuration, got: Sequence[Answer], expected: Sequence[Answer], outcome: Outcome) -> None:
    exact = configuration.model == "hash"
    for case, mine, theirs in zip(CASES, got, expected, strict=True):
        if mine.key() != theirs.key():
            outcome.differences[case.name] = f"{mine.key()}, wanted {theirs.key()}"
        elif mine.terminal_events != 1:
            outcome.differences[case.name] = f"{mine.terminal_events} ends"
        elif not same(mine.logprobs, theirs.logprobs, exact):
            outcome.differences[case.name] = f"logprobs {mine.logprobs}, wanted {theirs.logprobs}"
        elif not same(mine.prompt_logprobs or [], theirs.prompt_logprobs or [], exact):
            outcome.differences[case.name] = f"prompt_logprobs {mine.prompt_logprobs}, wanted {theirs.prompt_logprobs}"


def same(mine: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs], exact: bool) -> bool:
    """Bit by bit; of a real model, whose sums depend on their neighbours in float64's last bits, within float32's rounding."""
    if exact:
        return list(mine) == list(theirs)

    def near(a: TokenLogprobs, b: TokenLogprobs) -> bool:
        pairs = zip((a.logprob, *a.top_logprobs), (b.logprob, *b.top_logprobs), strict=True)
        return (a.token_id, a.top_ids, a.rank) == (b.token_id, b.top_ids, b.rank) and all(abs(x - y) < 1e-5 for x, y in pairs)

    return len(mine) == len(theirs) and all(map(near, mine, theirs))


def _count(stats: EngineStats, got: Sequence[Answer], counts: Counter[str]) -> None:
    counts["tokens"] = stats.num_output_tokens
    counts["drafted"] = stats.num_drafted
    counts["accepted"] = stats.num_accepted
    counts["cached tokens"] = stats.num_cached_tokens
    counts["retractions"] = stats.num_retractions
    for name, drafting in stats.drafting.items():
        counts[f"drafted by {name}"] = drafting.num_drafted
        counts[f"accepted of {name}"] = drafting.num_accepted


def missing(configuration: Configuration, counts: Counter[str]) -> list[str]:
    """What should have happened and did not; what should not have and did."""
    c, several = configuration, "+" in configuration.drafter
    must = {
        f"{c.concurrency} requests in one step": counts["most at once"] == c.concurrency,
        "prompts cut" if c.chunked else "no prompt cut": bool(counts["cut prompts"]) == c.chunked,
        "cache hits" if c.cache else "no cache hits": bool(counts["cached tokens"]) == c.cache,
        "retractions" if c.pressure else "no retractions": bool(counts["retractions"]) == c.pressure,
        "drafts" if c.k else "no drafts": bool(counts["drafted"]) == bool(c.k),
    }
    if c.concurrency > 1:
        must["prompts beside verify rows"] = counts["mixed steps"] > 0
        if c.k:
            must["prompts beside drafts"] = counts["cut prompts beside drafts" if c.chunked else "prompts beside drafts"] > 0
    for name in c.drafter.split("+") if c.k else ():
        drafted, accepted = counts[f"drafted by {name}"], counts[f"accepted of {name}"]
        must[f"drafts of {name}"] = drafted > 0
        if can_be_right(c.model, name):
            must[f"drafts of {name} accepted"] = accepted > 0
        if must_be_wrong(c.model, name):
            must[f"drafts of {name} refused"] = accepted < drafted
    if several:
        must["drafters asleep"] = counts["sleeps"] > 0
        must["drafters awake again"] = counts["wakes"] > 0
        must["requests of two drafters"] = counts["requests of two drafters"] > 0
        if "draft_model" in c.drafter:
            must["tokens caught up with"] = counts["fills"] > 0
    return [what for what, happened in must.items() if not happened]
