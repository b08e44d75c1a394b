"""Reported failures under memory pressure, as tests: retraction with a step in flight, and pools that one request fills.

Every test here asserts that somebody was retracted, or that nobody could be. `drain` checks that the ledger is balanced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from slipstream.cache.pages import pages_for
from slipstream.engine.loop import Engine
from slipstream.engine.stats import EngineStats
from slipstream.models.base import CausalLM
from slipstream.testing.adversarial import AdversarialExecutor
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.types import FinishReason
from tests.cases.stage import EAGLE_MODES, EVERY_MODE, Counter, Watch, assert_drafts_count, greedy
from tests.engine.harness import Answer, Job, assert_equal, collect, drain, make_engine, reference, run_on

each_mode = pytest.mark.parametrize("mode", EVERY_MODE)
each_lag = pytest.mark.parametrize("lag", [0, 1])
each_page_size = pytest.mark.parametrize("page_size", [1, 16])
HASH = HashLM(vocab_size=64, context_len=512)


@dataclass
class Outcome:
    """What came of some requests, in their order, and the engine's counters at the end."""

    answers: list[Answer]
    stats: EngineStats


def run_all(engine: Engine, jobs: list[Job]) -> Outcome:
    """All at once. Also checks that the pool and the counters come out even."""
    answers = run_on(engine, jobs)
    stats = engine.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
    assert stats.num_running == stats.num_waiting == 0
    return Outcome(answers, stats)


# S11


def counting_jobs(count: int) -> list[Job]:
    """Eight requests to count from N to N + `count`, different N and different lengths of prompt."""
    return [Job((*range(2, 2 + 3 * n), 40 * n + 10), greedy(count)) for n in range(8)]


def assert_counted(job: Job, answer: Answer, count: int) -> None:
    assert answer.token_ids == list(range(job.prompt[-1] + 1, job.prompt[-1] + 1 + count))
    assert answer.terminal_events == 1


@pytest.mark.parametrize(
    "lag, page_size, caching, count", [(1, 1, True, 50), (1, 16, True, 150), (1, 16, False, 50), (0, 16, True, 50)]
)
@each_mode
def test_s11_nothing_twice_and_nothing_lost(mode: str, lag: int, page_size: int, caching: bool, count: int) -> None:
    """Eight count; the pool holds three of them. No number is said twice or left out, and no placeholder is read as an id."""
    model, jobs = Counter(HashLM(vocab_size=512, context_len=256)), counting_jobs(count)
    engine = make_engine(
        model,
        lag=lag,
        page_size=page_size,
        eos=(),
        num_pages=pages_for(3 * count + 30, page_size),
        drafters={mode: EVERY_MODE[mode](7)},
        admission_headroom_tokens=0,
        enable_prefix_caching=caching,
    )
    outcome = run_all(engine, jobs)
    assert outcome.stats.num_retractions > 1
    for job, answer in zip(jobs, outcome.answers, strict=True):
        assert_counted(job, answer, count)
        assert answer.finish_reason is FinishReason.LENGTH
    model.assert_known_ids()
    if mode not in ("off", "ngram"):  # what is counted up never comes again
        assert_drafts_count(mode, outcome.answers, at_least=0.4)  # where pages are short there are fewer draft nodes


@pytest.mark.parametrize("mood", ["lazy", "eager", "mixed"])
@each_mode
def test_s11_whenever_the_results_come(mode: str, mood: str) -> None:
    """Answers that depend on all KV, whatever the moment a step runs and its result shows."""
    jobs, wanted = different_jobs()
    engine = make_engine(
        HASH,
        lag=1,
        page_size=4,
        eos=(),
        num_pages=pages_for(3 * 50, 4),
        drafters={mode: EVERY_MODE[mode](3)},
        executor=AdversarialExecutor.factory(11, mood),
        admission_headroom_tokens=0,
    )
    outcome = run_all(engine, jobs)
    assert_equal(outcome.answers, wanted, (mode, mood))
    assert outcome.stats.num_retractions > 1


@cache
def different_jobs() -> tuple[list[Job], list[Answer]]:
    jobs = [Job(tuple((n * 11 + i) % 64 for i in range(6 + n)), greedy(40)) for n in range(6)]
    jobs += [Job(tuple((n * 5 + i * i) % 64 for i in range(20)), greedy(30, temperature=1.0), seed=n) for n in range(2)]
    return jobs, reference(HASH, jobs, eos=(), enable_prefix_caching=False)


@pytest.mark.parametrize("how", ["stop id", "length", "abort"])
@each_mode
def test_s11_it_ends_in_the_step_it_is_retracted(mode: str, how: str) -> None:
    """A victim whose last step ends its answer, or who is cancelled before that step is back, ends once and never comes back."""
    jobs = counting_jobs(60)
    # The first that still had a step in flight when it was told to go, and what that step made of it.
    victim = next(one for one in leavers(mode, jobs).leavers if one.num_after > one.num_before)
    job = jobs[victim.number]
    changed = list(jobs)
    if how == "stop id":
        changed[victim.number] = replace(job, params=greedy(60, stop_token_ids=(job.prompt[-1] + victim.num_after,)))
    elif how == "length":
        changed[victim.number] = replace(job, params=greedy(victim.num_after))
    second = leavers(mode, changed, victim if how == "abort" else None)
    reason = {"stop id": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}[how]
    for number, answer in enumerate(second.answers):
        is_victim = number == victim.number
        assert_counted(jobs[number], answer, 60 if not is_victim else victim.num_before if how == "abort" else victim.num_after)
        assert answer.finish_reason is (reason if is_victim else FinishReason.LENGTH)
    ended = [one.number for one in second.leavers if one.ended]
    if how != "length":  # whose limit is near is waited for instead; nobody knows of a stop before it has come
        assert ended == [victim.number]
    assert second.num_retractions > 0


@dataclass
class Leaver:
    """A request that was told to go while steps were in flight: when, its answer's length then and once they were settled."""

    number: int
    step: int
    num_before: int
    num_after: int = 0
    ended: bool = False


@dataclass
class Leavers:
    """What happened to all that were told to go, and the answers of everybody."""

    leavers: list[Leaver]
    answers: list[Answer]
    num_retractions: int


def leavers(mode: str, jobs: list[Job], abort: Leaver | None = None) -> Leavers:
    """Run the jobs at lag 1 in a pool that is too small. `abort`: one to cancel in the step in which it is told to go."""
    model = Counter(HashLM(vocab_size=512, context_len=256))
    engine = make_engine(
        model, lag=1, page_size=4, eos=(), num_pages=53, drafters={mode: EVERY_MODE[mode](3)}, admission_headroom_tokens=0
    )
    found: list[Leaver] = []
    going: dict[str, Leaver] = {}
    answers: dict[str, Answer] = {f"r{number}": Answer() for number in range(len(jobs))}
    try:
        for number, job in enumerate(jobs):
            engine.add(job.request(f"r{number}"))
        for step in range(5000):
            if not engine.has_work:
                break
            collect(engine, answers)
            for name, one in going.items():
                one.num_after, one.ended = len(answers[name].token_ids), answers[name].finish_reason is not None
            leaving = [each for each in engine.scheduler.running if each.is_leaving and each.num_in_flight]
            going = {each.request_id: going.get(each.request_id) or Leaver(0, 0, 0) for each in leaving}
            for each in leaving:
                one = going[each.request_id]
                if one.step == 0:
                    one.number, one.step, one.num_before = int(each.request_id[1:]), step, len(answers[each.request_id].token_ids)
                    found.append(one)
                    if abort is not None and (one.number, step) == (abort.number, abort.step):
                        engine.abort(each.request_id)
    finally:
        engine.close()
    assert not engine.has_work
    engine.scheduler.ledger.check_balanced()
    model.assert_known_ids()
    return Leavers(found, list(answers.values()), engine.stats().num_retractions)


# K01


@each_page_size
@each_lag
@each_mode
def test_k01_one_request_fills_the_pool(mode: str, lag: int, page_size: int) -> None:
    """Pool of N, prompt N/2: more than the pool is refused with the numbers, no bound ends at N, exactly N is N. And it lives."""
    n, prompt = 128, tuple(i * i % 61 for i in range(64))
    drafters = {mode: EVERY_MODE[mode](7)}
    engine = make_engine(HASH, lag=lag, page_size=page_size, eos=(), num_pages=n // page_size, drafters=drafters)
    answers: dict[str, Answer] = {}
    try:
        for name, max_tokens in (("too much", n), ("no bound", None), ("all of it", n // 2), ("alive", 1)):
            engine.add(Job(prompt, greedy(max_tokens)).request(name))
            drain(engine, answers)
    finally:
        engine.close()
    assert answers["too much"].finish_reason is FinishReason.ERROR and answers["too much"].terminal_events == 1
    assert answers["too much"].error is not None
    assert f"must fit the KV pool of {n} tokens, but prompt and max_tokens need 192" in answers["too much"].error[1]
    wanted = half_of_the_pool()
    assert_equal([answers["no bound"], answers["all of it"], answers["alive"]], [wanted[0], *wanted], (mode, lag, page_size))
    assert wanted[0].finish_reason is FinishReason.LENGTH and len(wanted[0].token_ids) == n // 2
    assert engine.stats().num_retractions == 0, "there is nobody to retract"


@cache
def half_of_the_pool() -> list[Answer]:
    jobs = [Job(tuple(i * i % 61 for i in range(64)), greedy(count)) for count in (64, 1)]
    return reference(HASH, jobs, eos=(), enable_prefix_caching=False)


@pytest.mark.parametrize(
    "family, lag, page_size", [("hash", 0, 1), ("hash", 0, 16), ("hash", 1, 1), ("hash", 1, 16), ("llama", 1, 16)]
)
@each_mode
def test_k01_six_requests_of_a_quarter_of_the_pool(mode: str, family: str, lag: int, page_size: int) -> None:
    """They are let in while they are short, and then two have to go. What is freed is enough for the step that follows."""
    jobs, wanted, model = quarters(family)
    watch = Watch()
    engine = make_engine(
        model,
        lag=lag,
        page_size=page_size,
        eos=(),
        num_pages=256 // page_size,
        drafters={mode: EVERY_MODE[mode](7)},
        executor=watch.over(),
        admission_headroom_tokens=0,
    )
    outcome = run_all(engine, jobs)
    assert_equal(outcome.answers, wanted, (mode, lag, page_size, family))
    assert outcome.stats.num_retractions > 0
    assert sum(answer.num_retractions for answer in outcome.answers) == outcome.stats.num_retractions
    assert outcome.answers[0].num_retractions == 0, "who came first is never retracted"
    assert len({part.slot for plan in watch.plans for part in plan.parts}) == 6, "all six must have run"
    if mode not in ("off", "ngram") and not (mode in EAGLE_MODES and family == "llama"):
        assert_drafts_count(mode, outcome.answers, at_least=0.3)


@cache
def quarters(family: str) -> tuple[list[Job], list[Answer], CausalLM]:
    model = HASH if family == "hash" else tiny_model(family)
    jobs = [Job(tuple((n * 11 + i) % 64 for i in range(32)), greedy(32)) for n in range(6)]
    return jobs, reference(model, jobs, eos=(), enable_prefix_caching=False), model
