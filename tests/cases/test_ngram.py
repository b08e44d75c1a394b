"""Reported failures of speculation, as tests with n-gram drafts: stops, limits, penalties, logprobs, cancels, reused slots."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest

from slipstream.cache.pages import pages_for
from slipstream.engine import runner
from slipstream.engine.device_state import DeviceState
from slipstream.models.base import CausalLM
from slipstream.speculate.ngram import NGram
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.types import FinishReason, SamplingParams
from tests.cases.stage import WITH_EAGLE, Counter, Parrot, Watch, generated, greedy, streamed, text_ids
from tests.engine.harness import EOS, Answer, DrafterFactory, Job, assert_equal, collect, drain, make_engine, reference, run

LINE = "alpha beta gamma delta epsilon\n"
LINES = text_ids(LINE * 40)
MOO = "Say moo again and again: moo moo"
each_lag = pytest.mark.parametrize("lag", [0, 1])
each_width = pytest.mark.parametrize("k", [1, 3, 7])


def ngram(k: int) -> dict[str, DrafterFactory]:
    return {"ngram": lambda target: NGram(k)}


def copier(context_len: int = 1024, base: CausalLM | None = None) -> CausalLM:
    """A model that goes on with the lines for ever."""
    return Parrot(base or HashLM(vocab_size=259, context_len=context_len), LINES[:context_len])


@pytest.mark.parametrize("page_size", [1, 16])
@each_width
@each_lag
def test_s11_nothing_twice_and_nothing_lost(lag: int, k: int, page_size: int) -> None:
    """Eight count from N to N + 150, which their prompts have done before; the pool holds three of them."""
    model = Counter(HashLM(vocab_size=512, context_len=512))
    jobs = [Job((*range(40 * n + 10, 40 * n + 161), 40 * n + 10), greedy(150)) for n in range(8)]
    cell = {"lag": lag, "page_size": page_size, "num_pages": pages_for(3 * 302 + 30, page_size), "admission_headroom_tokens": 0}
    got = run(model, jobs, eos=(), drafters=ngram(k), **cell)
    for job, answer in zip(jobs, got, strict=True):
        assert answer.token_ids == list(job.prompt[1:151]) and answer.terminal_events == 1
        assert answer.finish_reason is FinishReason.LENGTH
    model.assert_known_ids()
    assert sum(answer.num_retractions for answer in got) > 1
    assert sum(answer.num_accepted for answer in got) > 0.75 * 8 * 150 * k / (k + 1)


@pytest.mark.parametrize("kept", [False, True], ids=["left out", "kept"])
@each_lag
def test_s02_a_stop_string_early_in_a_run(lag: int, kept: bool) -> None:
    params = greedy(64, stop=("beta",), include_stop_str_in_output=kept)
    watch = Watch()
    stream = streamed(copier(), LINE * 20, params, lag=lag, drafters=ngram(7), executor=watch.over())
    (plain,) = generated(copier(), [LINE * 20], params, lag=lag, drafters=ngram(7))
    assert plain.outputs[0].text == stream.text == ("alpha beta" if kept else "alpha ")
    assert plain.outputs[0] == stream.output.outputs[0] and len(plain.outputs[0].token_ids) == 10
    assert watch.was_cut_inside("one#0", Answer(plain.outputs[0].token_ids)), "the run must go on behind the stop"


@each_width
@each_lag
def test_s16_drafts_stop_at_the_end_of_the_context(lag: int, k: int) -> None:
    """A copy that wants 1,000 tokens fills a context of 256 to its last position, and needs no page behind it."""
    watch = Watch()
    job = Job(LINES[:200], greedy(1000, ignore_eos=True))
    (got,) = run(copier(), [job], lag=lag, context_len=256, drafters=ngram(k), executor=watch.over())
    assert got.token_ids == list(LINES[200:256]) and got.finish_reason is FinishReason.LENGTH
    assert got.num_accepted > 0.6 * 56 * k / (k + 1)
    pages = [page for plan in watch.plans for delta in plan.page_deltas for page in delta.pages]
    assert len(pages) * 16 == 256


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
@each_lag
def test_s17_penalties_advance_with_every_token(lag: int, penalty: str) -> None:
    """On a model that would say moo for ever, and on one that copies."""
    jobs = [Job(text_ids(MOO), greedy(48, **{penalty: 1.3})), Job(LINES[:90], greedy(48, **{penalty: 1.3}))]
    for model in (tiny_model("qwen2"), copier(base=tiny_model("qwen2"), context_len=512)):
        got = run(model, jobs, lag=lag, eos=(), drafters=ngram(7))
        assert_equal(got, reference(model, jobs, eos=()), (lag, penalty))
    assert got[1].num_accepted > 20, "there must be runs to count in"


@each_lag
def test_s17_min_tokens_ends_at_its_token(lag: int) -> None:
    """EOS is the favourite from token 3 on and forbidden for 20 tokens: it comes as token 21. The others repeat."""
    model = Parrot(HashLM(vocab_size=64, context_len=128), [5, 6] * 4 + [EOS] * 120)
    jobs = [Job((5, 6, 5, 6, 5), greedy(60, min_tokens=least, allowed_token_ids=(5, 6, EOS))) for least in (20, 0)]
    got = run(model, jobs, lag=lag, drafters=ngram(7))
    assert_equal(got, reference(model, jobs), lag)
    assert [len(answer.token_ids) for answer in got] == [21, 4] and got[0].token_ids.index(EOS) == 20


@pytest.mark.parametrize("heat", [0.0, 1.0])
@each_lag
def test_s21_a_logprob_for_every_token(lag: int, heat: float) -> None:
    """Four requests that end at different times: one entry a token, its own, none of them a stand-in."""
    model = copier(base=tiny_model("llama"), context_len=512)
    params = [SamplingParams(temperature=heat, max_tokens=n, logprobs=5) for n in (30, 3, 17, 9)]
    jobs = [Job(LINES[: 60 + 7 * n], params[n], seed=n) for n in range(4)]
    got, wanted = run(model, jobs, lag=lag, eos=(), drafters=ngram(7)), reference(model, jobs, eos=())
    assert_equal(got, wanted, (lag, heat))
    assert sum(answer.num_accepted for answer in got) > 30
    for answer, other in zip(got, wanted, strict=True):
        assert len(answer.logprobs) == len(answer.token_ids)
        for token, entry, same in zip(answer.token_ids, answer.logprobs, other.logprobs, strict=True):
            assert entry.token_id == token and len(set(entry.top_ids)) == 5
            assert entry.top_logprobs == pytest.approx(same.top_logprobs, abs=1e-5)
            assert heat > 0 or entry.top_ids[0] == token


@each_lag
@pytest.mark.parametrize("caching", [True, False])
def test_s22_a_cancelled_request_leaves_the_shared_prefix_as_it_was(caching: bool, lag: int) -> None:
    """Three requests share 200 tokens; the first is cancelled at any of its first steps, two more come at once."""
    model, jobs, wanted = sharers()
    cached = 0
    for delay in range(1, 13):
        cell = {"lag": lag, "page_size": (1, 16)[delay % 2], "enable_prefix_caching": caching}
        engine = make_engine(model, chunk=48, drafters=ngram(3), **cell)
        answers: dict[str, Answer] = {}
        try:
            for number in range(3):
                engine.add(jobs[number].request(f"r{number}"))
            for _ in range(delay):
                collect(engine, answers)
            engine.abort("r0")
            for number in (3, 4):
                engine.add(jobs[number].request(f"r{number}"))
            drain(engine, answers)
        finally:
            engine.close()
        assert_equal([answers[f"r{number}"] for number in range(1, 5)], wanted[1:], (caching, lag, delay))
        cached += sum(answer.num_cached_tokens for answer in answers.values())
    assert (cached > 0) == caching


@pytest.mark.slow
@pytest.mark.parametrize("caching, page_size, k", [(True, 1, 1), (True, 1, 7), (True, 16, 3), (True, 16, 7), (False, 16, 7)])
def test_s22_fifty_rounds_on_one_engine(caching: bool, page_size: int, k: int) -> None:
    """Of three the first is cancelled at the first words of its answer; what it leaves is there in the rounds that follow."""
    model, jobs, wanted = sharers()
    engine = make_engine(model, lag=1, page_size=page_size, chunk=48, drafters=ngram(k), enable_prefix_caching=caching)
    accepted = 0
    try:
        for turn in range(50):
            answers: dict[str, Answer] = {}
            for number in range(3):
                engine.add(jobs[number].request(f"r{number}", cache_salt=str(turn // 5)))
            while not answers.get("r0", Answer()).token_ids:
                collect(engine, answers)
            engine.abort("r0")
            for number in (3, 4):
                engine.add(jobs[number].request(f"r{number}", cache_salt=str(turn // 5)))
            drain(engine, answers)
            assert answers["r0"].finish_reason is FinishReason.ABORT and answers["r0"].terminal_events == 1
            assert_equal([answers[f"r{number}"] for number in range(1, 5)], wanted[1:], (caching, page_size, k, turn))
            accepted += sum(answer.num_accepted for answer in answers.values())
    finally:
        engine.close()
    assert accepted > 50 * 4, "drafts must have been accepted"
    assert (engine.stats().num_cached_tokens > 0) == caching


@cache
def sharers() -> tuple[CausalLM, list[Job], list[Answer]]:
    model = HashLM(vocab_size=64, context_len=512)
    stem = tuple(n * n % 61 for n in range(200))
    jobs = [Job((*stem, n, n), greedy(24, allowed_token_ids=tuple(range(3)))) for n in range(5)]
    return model, jobs, reference(model, jobs)


@each_lag
@pytest.mark.parametrize("text", [LINES, text_ids("abc" * 400)], ids=["lines", "short period"])
def test_s23_a_slots_next_owner_sees_nothing_of_the_one_before(text: tuple[int, ...], lag: int) -> None:
    """One slot. A long text, then a shorter prompt whose words that text holds: as on a fresh engine, token for token and draft
    for draft; and each step makes progress. Where the period is short, a draft could run on into what the first owner left."""
    model = Parrot(HashLM(vocab_size=259, context_len=1024), text[:1024])
    first, second = Job(text[:300], greedy(60)), Job(text[:20], greedy(40))
    seen: dict[bool, tuple[Answer, list[int]]] = {}
    for fresh in (True, False):
        watch = Watch()
        # Without poison: what the first owner left stays in the history.
        with mock.patch.object(runner, "DeviceState", lambda *sizes: DeviceState(*sizes[:4], debug=False)):
            engine = make_engine(
                model, lag=lag, batch=1, drafters=ngram(7), executor=watch.over(), enable_prefix_caching=False
            )  # fmt: skip
        answers: dict[str, Answer] = {}
        try:
            for name, job in [("second", second)] if fresh else [("first", first), ("second", second)]:
                engine.add(job.request(name))
                drain(engine, answers)
        finally:
            engine.close()
        seen[fresh] = answers["second"], watch.runs["second"]
        for committed in watch.runs.values():
            assert min(committed[:-1]) >= 1, "every step must commit a token until the end is reached"
    alone, after = seen[True], seen[False]
    assert_equal([after[0]], [alone[0]], lag)
    assert (after[0].num_drafted, after[0].num_accepted, after[1]) == (alone[0].num_drafted, alone[0].num_accepted, alone[1])


@pytest.mark.parametrize("k", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("mode", ["ngram", *WITH_EAGLE])
def test_s28_every_depth_at_every_concurrency(mode: str, k: int) -> None:
    """1, 2, 4 and 8 requests of very different lengths, overlapped: each equals the oracle and never stops making progress."""
    model, jobs, wanted = of_all_lengths()
    for concurrency in (1, 2, 4, 8):
        watch = Watch()
        drafter = ngram(k) if mode == "ngram" else {mode: WITH_EAGLE[mode](k)}
        got = run(model, jobs[:concurrency], lag=1, batch=concurrency, drafters=drafter, executor=watch.over())
        assert_equal(got, wanted[:concurrency], (mode, k, concurrency))
        assert all(min(committed[:-1], default=1) >= 1 for committed in watch.runs.values())
        assert max(row.num_nodes for plan in watch.plans for row in plan.rows) >= k
        assert mode == "rand" or concurrency == 1 or sum(answer.num_accepted for answer in got) > 0, "there must be runs"


@cache
def of_all_lengths() -> tuple[CausalLM, list[Job], list[Answer]]:
    model = HashLM(vocab_size=64, context_len=512)
    lengths = (40, 1, 200, 7, 16, 90, 3, 128)
    few = tuple(range(3))  # every other answer repeats itself
    params = [greedy(12 + 5 * n, allowed_token_ids=few if n % 2 else None) for n in range(len(lengths))]
    jobs = [Job(tuple((n + i % (3 + n)) % 60 for i in range(length)), params[n]) for n, length in enumerate(lengths)]
    return model, jobs, reference(model, jobs)
