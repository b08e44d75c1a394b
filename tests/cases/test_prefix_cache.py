"""Reported failures of the prefix cache, as tests: cancelled owners, prefixes of exactly a page, counts, half-computed prompts.

A test with the cache must have found something in it. `drain` checks that the ledger is balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from slipstream.engine.loop import Engine
from slipstream.models.base import CausalLM
from slipstream.testing.hash_lm import HashLM
from slipstream.types import FinishReason
from tests.cases.stage import EVERY_MODE, Counter, Watch, greedy
from tests.engine.harness import Answer, Job, assert_equal, collect, drain, make_engine, reference

each_mode = pytest.mark.parametrize("mode", EVERY_MODE)
each_lag = pytest.mark.parametrize("lag", [0, 1])
HASH = HashLM(vocab_size=64, context_len=512)


def ids(salt: int, length: int) -> tuple[int, ...]:
    """`length` ids of the vocabulary, others for another salt."""
    return tuple((salt * 29 + i * i * (salt % 5 + 1) + i) % 64 for i in range(length))


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def remembered(engine: Engine, prompt: Sequence[int], said: Sequence[int]) -> tuple[int, ...]:
    """What `found_by_rule` must know of a request: what stays of it, and the token behind where draft KV depends on that.

    Its prompt stays, and its answer but for the last token, and for what the drafter's KV may lag behind.
    """
    return (*prompt, *said) if engine.scheduler.ledger.shifted_kv else kept(engine, prompt, said)


def kept(engine: Engine, prompt: Sequence[int], said: Sequence[int]) -> tuple[int, ...]:
    behind = 1 + max(shape.kv_behind for shape in engine.scheduler._shapes.values())
    return (*prompt, *said[: max(len(said) - behind, 0)])


def found_by_rule(engine: Engine, prompt: Sequence[int], computed: Sequence[Sequence[int]]) -> int:
    """The rule: the whole pages the prompt has in common with what was computed, but its last token must be computed.

    Where draft KV depends on the token behind, the prompt must have that token of each page in common too.
    """
    ledger = engine.scheduler.ledger
    most = max((in_common(prompt, each) for each in computed), default=0)
    if ledger.shifted_kv:
        most = max(most - 1, 0)
    return min(most // ledger.page_size * ledger.page_size, len(prompt) - 1)


# S22


@pytest.mark.parametrize("num_pages, num_rounds", [(160, 8), (17, 12)], ids=["room", "pressure"])
@each_mode
def test_s22_cancelled_while_others_read_its_prefix(mode: str, num_pages: int, num_rounds: int) -> None:
    """Rounds: of three with one prefix the first is cancelled, and at once two more come. All others answer as if alone."""
    cell = {"chunk": 64, "num_pages": num_pages, "drafters": {mode: EVERY_MODE[mode](3)}, "admission_headroom_tokens": 0}
    engine = make_engine(HASH, lag=1, eos=(), **cell)
    rounds_of_s22(engine, num_rounds, mode)
    stats = engine.stats()
    assert stats.num_cached_tokens > num_rounds * 3 * 150, "most of the prefix must have been shared"
    assert (stats.num_retractions > 0) == (num_pages < 160)


@each_mode
def test_s22_the_control_has_no_cache(mode: str) -> None:
    engine = make_engine(HASH, lag=1, chunk=64, eos=(), drafters={mode: EVERY_MODE[mode](3)}, enable_prefix_caching=False)
    rounds_of_s22(engine, 3, mode)
    assert engine.stats().num_cached_tokens == 0


def rounds_of_s22(engine: Engine, num_rounds: int, mode: str) -> None:
    """Each round under a salt of its own, so that its prefix is not there yet."""
    try:
        for turn in range(num_rounds):
            jobs, wanted = five_with_one_prefix(turn % 5)
            answers: dict[str, Answer] = {}
            for number in range(3):
                engine.add(jobs[number].request(f"r{number}", cache_salt=str(turn)))
            # Cancelled in the middle of its prompt, at the first token of its answer, or some tokens later.
            while (turn % 3 and len(answers.get("r0", Answer()).token_ids) < turn % 3 * 3 - 2) or not engine.num_running:
                collect(engine, answers)
            engine.abort("r0")
            for number in (3, 4):
                engine.add(jobs[number].request(f"r{number}", cache_salt=str(turn)))
            drain(engine, answers)
            assert answers["r0"].finish_reason is FinishReason.ABORT and answers["r0"].terminal_events == 1
            assert_equal([answers[f"r{number}"] for number in range(1, 5)], wanted[1:], (mode, turn))
    finally:
        engine.close()


@cache
def five_with_one_prefix(turn: int) -> tuple[list[Job], list[Answer]]:
    jobs = [
        Job((*ids(turn, 200), *ids(turn + number + 7, (1, 8, 9, 24, 1)[number])), greedy(10 + 3 * number)) for number in range(5)
    ]
    return jobs, reference(HASH, jobs, eos=(), enable_prefix_caching=False)


# S25


@pytest.mark.parametrize("end", ["length", "eos", "stop id", "abort"])
@pytest.mark.parametrize("page_size", [1, 4])
@each_mode
def test_s25_the_steps_behind_the_end_leave_nothing(mode: str, page_size: int, end: str) -> None:
    """A prompt made of an answered one, its answer and four ids more finds one rule's number of tokens, at both lags."""
    model = Counter(HashLM(vocab_size=512, context_len=256))
    prompt = (7, 8, 9, 100)
    for num_tokens in (1, 2, 5, 14):
        last = 100 + num_tokens
        for lag in (0, 1):
            watch = Watch()
            engine = make_engine(
                model,
                lag=lag,
                page_size=page_size,
                eos=(last,) if end == "eos" else (),
                drafters={mode: EVERY_MODE[mode](7)},
                executor=watch.over(),
            )
            answers: dict[str, Answer] = {}
            more = {"length": {"max_tokens": num_tokens}, "stop id": {"max_tokens": 60, "stop_token_ids": (last,)}}
            try:
                engine.add(Job(prompt, greedy(**more.get(end, {"max_tokens": 60}))).request("first"))
                if end == "abort":
                    while len(answers.get("first", Answer()).token_ids) < num_tokens:
                        collect(engine, answers)
                    engine.abort("first")
                drain(engine, answers)
                said = answers["first"].token_ids
                assert said == list(range(101, 101 + len(said))) and (end == "abort" or len(said) == num_tokens)
                follow = Job((*prompt, *said, 300, 200, 300, 200), greedy(6, ignore_eos=True))
                engine.add(follow.request("second"))
                drain(engine, answers)
            finally:
                engine.close()
            assert answers["second"].token_ids == list(range(201, 207))
            # Of the last token there is no KV by the rule, whether or not a step behind the end has computed it.
            known = len(kept(engine, prompt, said)) // page_size * page_size
            assert answers["second"].num_cached_tokens == known, (lag, num_tokens)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("k", [1, 3, 7])
@each_mode
def test_s25_both_lags_find_the_same(mode: str, k: int, page_size: int) -> None:
    """What is cached of an answer does not depend on which step its end fell into."""
    for num_tokens in (2, 3, 5, 8, 13, 14, 21):
        found = []
        for lag in (0, 1):
            engine = make_engine(HASH, lag=lag, page_size=page_size, eos=(), drafters={mode: EVERY_MODE[mode](k)})
            answers: dict[str, Answer] = {}
            try:
                engine.add(Job((7, 8, 9, 10), greedy(num_tokens)).request("first"))
                drain(engine, answers)
                engine.add(Job((7, 8, 9, 10, *answers["first"].token_ids, 1, 2, 3, 4), greedy(2)).request("second"))
                drain(engine, answers)
            finally:
                engine.close()
            found.append(answers["second"].num_cached_tokens)
        assert found[0] == found[1], (mode, k, page_size, num_tokens)


@pytest.mark.parametrize("page_size", [1, 4])
@each_lag
@each_mode
def test_s25_the_continuation_is_that_of_a_cold_engine(mode: str, lag: int, page_size: int) -> None:
    """Turns of a talk, on answers that depend on all KV: each prompt is all there was before and four ids more."""
    engine = make_engine(HASH, lag=lag, page_size=page_size, eos=(), drafters={mode: EVERY_MODE[mode](7)})
    asked, wanted = talk()
    computed: list[tuple[int, ...]] = []
    try:
        for job, answer in zip(asked, wanted, strict=True):
            answers: dict[str, Answer] = {}
            engine.add(job.request("turn"))
            drain(engine, answers)
            assert_equal([answers["turn"]], [answer], (mode, lag, page_size))
            assert answers["turn"].num_cached_tokens == found_by_rule(engine, job.prompt, computed)
            computed.append(remembered(engine, job.prompt, answer.token_ids))
    finally:
        engine.close()


@cache
def talk() -> tuple[list[Job], list[Answer]]:
    jobs: list[Job] = []
    answers: list[Answer] = []
    told = ids(3, 4)
    for turn in range(8):
        jobs.append(Job(told, greedy(2 + turn)))
        answers += reference(HASH, jobs[-1:], eos=(), enable_prefix_caching=False)
        told = (*told, *answers[-1].token_ids, *ids(turn, 4))
    return jobs, answers


# K02


@pytest.mark.parametrize("page_size", [4, 16])
@each_mode
def test_k02_a_cached_prefix_of_exactly_a_page(mode: str, page_size: int) -> None:
    """Cached prompts around one page and two; then, at once, continuations of them and two strangers. Twenty rounds."""
    engine = make_engine(HASH, lag=1, page_size=page_size, chunk=48, eos=(), drafters={mode: EVERY_MODE[mode](3)})
    stems, rounds = around_a_page(page_size)
    computed: list[tuple[int, ...]] = []
    exact = 0
    try:
        for number, (job, answer) in enumerate(stems):
            answers: dict[str, Answer] = {}
            engine.add(job.request(f"stem{number}"))
            drain(engine, answers)
            assert_equal([answers[f"stem{number}"]], [answer], (mode, page_size))
            computed.append(remembered(engine, job.prompt, answer.token_ids))
        for turn, (jobs, wanted) in enumerate(rounds * (20 // len(rounds))):
            answers = {}
            for number, job in enumerate(jobs):
                engine.add(job.request(f"r{number}"))
            drain(engine, answers)
            got = [answers[f"r{number}"] for number in range(len(jobs))]
            assert_equal(got, wanted, (mode, page_size, turn))
            expected = [found_by_rule(engine, job.prompt, computed) for job in jobs]
            assert [each.num_cached_tokens for each in got] == expected, (mode, page_size, turn)
            exact += sum(each.num_cached_tokens == page_size for each in got)
            computed += [remembered(engine, job.prompt, answer.token_ids) for job, answer in zip(jobs, wanted, strict=True)]
    finally:
        engine.close()
    assert exact >= 2 * len(rounds), "a cached prefix must have been one page exactly, again and again"


@cache
def around_a_page(page_size: int) -> tuple[list[tuple[Job, Answer]], list[tuple[list[Job], list[Answer]]]]:
    """The cached prompts; then rounds: some go on with other ids, some with the answer, one is it again; two strangers."""
    lengths = (page_size - 1, page_size, page_size + 1, 2 * page_size)
    stems = [Job((n, *ids(n + 1, length - 1)), greedy(3)) for n, length in enumerate(lengths)]
    answers = reference(HASH, stems, eos=(), enable_prefix_caching=False)
    rounds = []
    for turn in range(10):
        jobs = []
        for n, (stem, answer) in enumerate(zip(stems, answers, strict=True)):
            tail = ((), tuple(answer.token_ids), (answer.token_ids[0] + 1 + turn,))[min((turn + n) % 4, 2)]
            more = () if not tail else ids(turn * 4 + n, page_size + turn)
            jobs.append(Job((*stem.prompt, *(token % 64 for token in tail), *more), greedy(5 + turn % 3)))
        jobs += [Job((40 + turn, *ids(turn + number, 2 * page_size)), greedy(7)) for number in (50, 60)]
        rounds.append((jobs, reference(HASH, jobs, eos=(), enable_prefix_caching=False)))
    return list(zip(stems, answers, strict=True)), rounds


# K06


@pytest.mark.parametrize("lag, caching", [(1, True), (1, False), (0, True)])
@each_mode
def test_k06_aborted_in_the_middle_of_a_prompt(mode: str, lag: int, caching: bool) -> None:
    """A prompt of 2,000 in chunks of 64, aborted at twenty places, beside a long answer; in the end it is asked in earnest."""
    model, prompt, beside, wanted = long_prompt()
    engine = make_engine(model, lag=lag, chunk=64, eos=(), drafters={mode: EVERY_MODE[mode](3)}, enable_prefix_caching=caching)
    answers: dict[str, Answer] = {}
    aborted = 0
    try:
        engine.add(beside.request("beside"))
        for turn in range(20):
            name = f"r{turn}"
            engine.add(prompt.request(name, cache_salt=str(turn % 3)))
            for _ in range(1 + turn % 4):
                collect(engine, answers)
            half = next((each for each in engine.scheduler.running if each.request_id == name), None)
            aborted += half is not None and half.is_prefilling and half.prefilled > 0
            engine.abort(name)
            if turn % 2:  # else the next prompt meets the step in flight
                collect(engine, answers)
        assert answers["beside"].finish_reason is None
        engine.add(prompt.request("in earnest", cache_salt="0"))
        drain(engine, answers)
    finally:
        engine.close()
    assert aborted >= 15, "the aborts must fall into prompts"
    assert all(answers[f"r{turn}"].finish_reason is FinishReason.ABORT for turn in range(20))
    assert all(not answers[f"r{turn}"].token_ids and answers[f"r{turn}"].terminal_events == 1 for turn in range(20))
    assert_equal([answers["in earnest"], answers["beside"]], wanted, (mode, lag, caching))
    found = answers["in earnest"].num_cached_tokens
    assert (64 <= found < 1999 and found % 16 == 0) if caching else found == 0


@cache
def long_prompt() -> tuple[CausalLM, Job, Job, list[Answer]]:
    model = HashLM(vocab_size=64, context_len=2100)
    prompt, beside = Job(ids(4, 2000), greedy(8)), Job(ids(9, 5), greedy(300))
    return model, prompt, beside, reference(model, [prompt, beside], eos=(), enable_prefix_caching=False)
