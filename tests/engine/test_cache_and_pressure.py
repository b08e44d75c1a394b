"""The same tokens with the prefix cache and without, with pages enough and too few: what tests/equality has not.

Every answer against the engine at lag 0, one request at a time, drafter off, nothing cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import pytest

from slipstream.cache.pages import pages_for
from slipstream.engine.loop import Engine
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.testing.toy_grammar import digits
from slipstream.types import FinishReason, SamplingParams
from tests.engine.harness import Answer, Job, assert_equal, collect, drain, make_engine, reference
from tests.engine.test_equality import DRAFTERS, EOS, params, prompt

HASH_LM = HashLM(vocab_size=64, context_len=512, eos_token_ids=(EOS,), eos_bias=0.3)
STEM = prompt(9, 70)
NAMES = ("off", "self_chain", "self_tree", "rand", "ngram", "draft_model", "eagle_chain", "eagle_tree")
JOBS = [
    Job(STEM[:40], params(30, ignore_eos=True)),
    Job((*STEM[:40], 5), params(30, temperature=1.0, ignore_eos=True), seed=3),
    Job(STEM[:64], params(24, frequency_penalty=0.8, logprobs=2, ignore_eos=True)),
    Job((*STEM[:33], *prompt(4, 20)), params(30, temperature=0.8, min_p=0.02, repetition_penalty=1.2), seed=-9),
    Job(STEM, params(20, min_tokens=12, presence_penalty=0.5)),
    Job(STEM[:40], params(30, temperature=1.2, ignore_eos=True), seed=8),
]


@cache
def wanted_of(family: str) -> list[Answer]:
    return reference(tiny_model(family), JOBS, enable_prefix_caching=False)


def tight(jobs: Sequence[Job], page_size: int) -> int:
    """Pages in which the largest request fits, and another one only at first."""
    return max(pages_for(len(job.prompt) + (job.params.max_tokens or 0), page_size) for job in jobs) + pages_for(32, page_size)


def run_in_waves(engine: Engine, jobs: Sequence[Job], **how: Mapping[int, object]) -> list[Answer]:
    """The first half at once, the rest once those have begun. `how`: request fields by the place of the job."""
    answers: dict[str, Answer] = {}
    try:
        for number, job in enumerate(jobs):
            if number == len(jobs) // 2:
                for _ in range(6):
                    collect(engine, answers)
            engine.add(job.request(f"r{number}", **{name: values[number] for name, values in how.items() if number in values}))
        drain(engine, answers)
    finally:
        engine.close()
    return [answers[f"r{number}"] for number in range(len(jobs))]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_real_models_in_float64(family: str, page_size: int, name: str) -> None:
    """It must have retracted somebody and have found something in the cache: else it shows nothing."""
    model = tiny_model(family)
    engine = make_engine(
        model,
        lag=1,
        page_size=page_size,
        chunk=64,
        drafters={name: DRAFTERS[name]},
        num_pages=tight(JOBS, page_size),
        admission_headroom_tokens=0,
    )
    got = run_in_waves(engine, JOBS)
    assert_equal(got, wanted_of(family), (page_size, name))
    stats = engine.stats()
    assert stats.num_retractions > 0 and stats.num_cached_tokens > 0
    assert sum(answer.num_retractions for answer in got) == stats.num_retractions


@pytest.mark.parametrize("name", ["off", "self_tree", "rand"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("pressure", [False, True])
def test_samples_of_one_prompt_share_it(name: str, lag: int, pressure: bool) -> None:
    """n = 4: four answers, one prompt computed; the partly filled page is copied, not shared."""
    sampled = SamplingParams(temperature=1.0, max_tokens=90, ignore_eos=True)
    jobs = [Job(STEM[:37], sampled, seed=seed) for seed in range(4)]
    engine = make_engine(
        HASH_LM,
        lag=lag,
        drafters={name: DRAFTERS[name]},
        num_pages=9 if pressure else None,
        admission_headroom_tokens=0 if pressure else 64,
    )
    got = run_in_waves(engine, jobs, parent_id=dict.fromkeys(range(1, 4), "r0"))
    assert_equal(got, reference(HASH_LM, jobs, enable_prefix_caching=False), (name, lag, pressure))
    assert len({tuple(answer.token_ids) for answer in got}) == 4
    if not pressure:
        assert [answer.num_cached_tokens for answer in got] == [0, 36, 36, 36]
        assert engine.stats().num_prompt_tokens == 37 + 3
    assert (engine.stats().num_retractions > 0) == pressure


@pytest.mark.parametrize("name", ["off", "rand", "self_chain"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_grammar_goes_on_where_it_was_retracted(name: str, lag: int) -> None:
    """The matcher is rebuilt from the tokens there are."""
    how = params(60, temperature=1.0)
    jobs = [Job(prompt(number, 20), how, seed=number, grammar=digits("5-9:3")) for number in range(4)]
    jobs += [Job(prompt(7, 30), params(50, temperature=1.0, ignore_eos=True), seed=5)]
    engine = make_engine(
        HASH_LM, lag=lag, drafters={name: DRAFTERS[name]}, page_size=4, num_pages=21, admission_headroom_tokens=0
    )
    assert_equal(run_in_waves(engine, jobs), reference(HASH_LM, jobs, enable_prefix_caching=False), (name, lag))
    assert engine.stats().num_retractions > 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lag", [0, 1])
def test_an_answer_without_a_bound_ends_where_the_pool_ends(page_size: int, lag: int) -> None:
    jobs = [Job(prompt(1, 20), params(None, ignore_eos=True)), Job(prompt(2, 20), params(None, ignore_eos=True))]
    engine = make_engine(HASH_LM, lag=lag, page_size=page_size, num_pages=64 // page_size, admission_headroom_tokens=0)
    got = run_in_waves(engine, jobs)
    assert [(len(answer.token_ids), answer.finish_reason) for answer in got] == [(44, FinishReason.LENGTH)] * 2
    assert engine.stats().num_retractions > 0


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = make_engine(HASH_LM, page_size=4, num_pages=8)
    got = run_in_waves(engine, [Job(prompt(1, 20), params(20)), Job(prompt(2, 40), params(None)), Job(prompt(3, 20), params(12))])
    assert got[0].error is not None and got[0].error[0] == "NeverFits"
    assert "must fit the KV pool of 32 tokens, but prompt and max_tokens need 40" in got[0].error[1]
    assert got[1].error is not None and "need 41" in got[1].error[1]
    assert got[2].finish_reason is FinishReason.LENGTH and len(got[2].token_ids) == 12


def test_salts_and_resets_keep_work_apart() -> None:
    engine = make_engine(HASH_LM, page_size=4)
    answers: dict[str, Answer] = {}
    job = Job(STEM[:40], params(4))
    cached = []
    for number, salt in enumerate(("", "", "a", "a", "b")):
        engine.add(job.request(f"r{number}", cache_salt=salt))
        drain(engine, answers)
        cached.append(answers[f"r{number}"].num_cached_tokens)
    engine.reset_prefix_cache()
    engine.add(job.request("after", cache_salt="a"))
    drain(engine, answers)
    engine.close()
    assert cached == [0, 39, 0, 39, 0] and answers["after"].num_cached_tokens == 0
    assert engine.stats().num_free_pages + engine.stats().num_evictable_pages == engine.stats().num_pages


@pytest.mark.parametrize("drafter", ["off", "self_chain", "rand"])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_what_is_cached_of_an_answer_does_not_depend_on_the_lag(page_size: int, drafter: str) -> None:
    """All settled tokens but the last, whose KV the next step would have computed, in whole pages; and one must be computed."""
    found = []
    for lag in (0, 1):
        engine = make_engine(HASH_LM, lag=lag, page_size=page_size, drafters={drafter: DRAFTERS[drafter]})
        answers: dict[str, Answer] = {}
        engine.add(Job(STEM[:4], params(2, ignore_eos=True)).request("first"))
        drain(engine, answers)
        six = (*STEM[:4], *answers["first"].token_ids)
        follow = Job((*six, *STEM[10:14]), params(8))
        engine.add(follow.request("second"))
        drain(engine, answers)
        engine.close()
        assert_equal([answers["second"]], reference(HASH_LM, [follow], enable_prefix_caching=False), (lag, page_size))
        found.append(answers["second"].num_cached_tokens)
    assert found == [5 // page_size * page_size] * 2


@pytest.mark.parametrize("name", ["off", "self_tree", "rand"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_the_pool_gives_up_comes_back_from_host_memory(name: str, lag: int, page_size: int) -> None:
    """Three prompts in turn, in a pool that holds one of them: the second time round each is found whole."""
    jobs = [Job(prompt(number, 70), params(10, temperature=1.0, ignore_eos=True), seed=number) for number in (1, 2, 3)]
    token_bytes = sum(layer.bytes_per_token for layer in HASH_LM.kv_layers)
    engine = make_engine(
        HASH_LM,
        lag=lag,
        page_size=page_size,
        num_pages=pages_for(96, page_size),
        drafters={name: DRAFTERS[name]},
        kv_offload_memory_bytes=300 * token_bytes,
    )
    answers: dict[str, Answer] = {}
    for turn in range(2):
        for number, job in enumerate(jobs):
            engine.add(job.request(f"{turn}-{number}"))
            drain(engine, answers)
    engine.close()
    wanted = reference(HASH_LM, jobs, enable_prefix_caching=False)
    assert_equal([answers[f"1-{number}"] for number in range(3)], wanted, (name, lag, page_size))
    assert [answers[f"1-{number}"].num_cached_tokens for number in range(3)] == [min(69, 70 // page_size * page_size)] * 3
