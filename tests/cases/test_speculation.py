"""Reported failures of speculation and overlap, as tests: stops, limits, counts, slots and budgets."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from slipstream.engine.executor import ThreadExecutor
from slipstream.errors import ContextLengthExceeded
from slipstream.models.base import CausalLM
from slipstream.testing.adversarial import AdversarialExecutor
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.types import FinishReason, SamplingParams
from tests.cases.stage import (
    EAGLE_MODES,
    EVERY_MODE,
    MODES,
    PRINTABLE,
    WITH_EAGLE,
    Parrot,
    Watch,
    assert_drafts_count,
    generated,
    greedy,
    oracle,
    streamed,
    text_ids,
)
from tests.engine.harness import EOS, Answer, Job, assert_equal, collect, drain, make_engine, reference, run

LINE = "alpha beta gamma delta epsilon"
TWENTY_LINES = "\n".join([LINE] * 20)
QUESTION = "Hello, how are you?"
each_mode = pytest.mark.parametrize("mode", MODES)
each_mode_with_eagle = pytest.mark.parametrize("mode", WITH_EAGLE)
each_mode_and_off = pytest.mark.parametrize("mode", EVERY_MODE)
each_lag = pytest.mark.parametrize("lag", [0, 1])
each_end = pytest.mark.parametrize("end", ["eos", "stop"])


@cache
def long_answer(family: str = "llama") -> tuple[int, ...]:
    """The 48 printable characters the tiny model answers QUESTION with."""
    params = greedy(48, allowed_token_ids=PRINTABLE)
    return tuple(oracle(tiny_model(family), Job(text_ids(QUESTION), params)).token_ids)


@cache
def fresh_token(low: int) -> tuple[int, int]:
    """(token, its number counting from 1): the first from number `low` on that the long answer has not had before."""
    answer = long_answer()
    number = next(n for n in range(low, 40) if answer[n - 1] not in answer[: n - 1])
    return answer[number - 1], number


@cache
def word(low: int) -> tuple[str, int]:
    """(a word of four characters, the number of the token that completes it), new in the long answer."""
    text = bytes(long_answer()).decode()
    number = next(n for n in range(low, 40) if text.find(text[n - 4 : n]) == n - 4)
    return text[number - 4 : number], number


# S01


@each_end
@each_lag
@each_mode
def test_s01_a_stop_inside_a_run_against_the_cap(mode: str, lag: int, end: str) -> None:
    """One run holds both the end of the answer (a stop string, or EOS) and the cap: whichever comes first counts."""
    stop, at = word(20) if end == "stop" else (None, fresh_token(20)[1])
    caps, ends, jobs = jobs_of_s01(end)
    watch = Watch()
    got = run(tiny_model("llama"), jobs, lag=lag, eos=ends, drafters={mode: MODES[mode](7)}, executor=watch.over())
    assert_equal(got, wanted_of_s01(end), (mode, lag, end))
    for cap, answer in zip(caps, got, strict=True):
        assert answer.token_ids == list(long_answer()[: min(cap, at)])
        assert answer.finish_reason is (FinishReason.STOP if cap >= at else FinishReason.LENGTH)
        assert answer.stop_reason == (stop if cap >= at else None)
    assert_drafts_count(mode, got)
    inside = [watch.was_cut_inside(f"r{number}", answer) for number, answer in enumerate(got)]
    assert not any(inside[:3]), "no run may go beyond the cap"
    if mode != "rand":
        assert sum(inside[3:]) >= 4, "where the cap lies behind it, the end must lie inside a run"


def jobs_of_s01(end: str) -> tuple[range, tuple[int, ...], list[Job]]:
    """Caps, EOS ids and requests: one request for each cap around the end."""
    if end == "stop":
        stop, at = word(20)
        ends, more = (), {"stop": (stop,)}
    else:
        eos, at = fresh_token(20)
        ends, more = (eos,), {}
    caps = range(at - 2, at + 9)
    return caps, ends, [Job(text_ids(QUESTION), greedy(cap, allowed_token_ids=PRINTABLE, **more)) for cap in caps]


@cache
def wanted_of_s01(end: str) -> list[Answer]:
    _, ends, jobs = jobs_of_s01(end)
    return reference(tiny_model("llama"), jobs, eos=ends)


# S02


@pytest.mark.parametrize("kept", [False, True], ids=["left out", "kept"])
@each_lag
@each_mode_with_eagle
def test_s02_a_stop_string_early_in_a_run(mode: str, lag: int, kept: bool) -> None:
    """The first "beta" ends the answer, streamed and not, with and without the string itself, however long the run it is in."""
    model = Parrot(HashLM(vocab_size=259, context_len=1024), text_ids((LINE + "\n") * 33)[:1024])
    params = greedy(64, stop=("beta",), include_stop_str_in_output=kept)
    watch = Watch()
    cell = {"lag": lag, "drafters": {mode: WITH_EAGLE[mode](7)}}
    stream = streamed(model, TWENTY_LINES, params, executor=watch.over(), **cell)
    (plain,) = generated(model, [TWENTY_LINES], params, **cell)
    answer = plain.outputs[0]
    assert answer.text == stream.text == ("\nalpha beta" if kept else "\nalpha ")
    assert answer == stream.output.outputs[0] and answer.token_ids == list(text_ids("\nalpha beta"))
    assert (answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == ("stop", "beta", 11)
    if mode != "rand":
        assert watch.was_cut_inside("one#0", Answer(answer.token_ids)), "the run must go on behind the stop"


# S06


@each_end
@each_lag
@each_mode
def test_s06_counts_follow_the_cut(mode: str, lag: int, end: str) -> None:
    """Counts of tokens, of drafts and of accepted drafts: the same in all forms, and no part is greater than the whole."""
    model = tiny_model("llama")
    ends, more = ((fresh_token(20)[0],), {}) if end == "eos" else ((), {"stop": (word(20)[0],)})
    num_tokens = fresh_token(20)[1] if end == "eos" else word(20)[1]
    params = greedy(48, allowed_token_ids=PRINTABLE, **more)
    cell = {"lag": lag, "eos": ends, "drafters": {mode: MODES[mode](7)}}
    watch = Watch()
    stream = streamed(model, QUESTION, params, executor=watch.over(), **cell)
    (plain,) = generated(model, [QUESTION], params, **cell)
    answer = plain.outputs[0]
    assert answer == stream.output.outputs[0] and answer.finish_reason == "stop"
    assert answer.token_ids == list(long_answer()[:num_tokens])
    assert stream.num_output_tokens == sum(len(delta.token_ids) for delta in stream.deltas) == num_tokens
    assert stream.num_prompt_tokens == len(plain.prompt_token_ids) == len(QUESTION)
    assert [delta.finish_reason for delta in stream.deltas] == [None] * (len(stream.deltas) - 1) + ["stop"]
    assert stream.num_accepted <= stream.num_drafted and stream.num_accepted < num_tokens
    # Each step's last token is the target's own, unless the cut fell among the drafts.
    left, accepted = num_tokens, 0
    for committed in watch.runs["one#0"]:
        accepted += min(committed - 1, left)
        left = max(0, left - committed)
    assert stream.num_accepted == accepted
    if mode != "rand":
        assert watch.was_cut_inside("one#0", Answer(answer.token_ids)) and accepted > num_tokens // 2


# S12


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 5))])
@each_mode_and_off
def test_s12_slots_that_change_owner_all_the_time(mode: str, turn: int) -> None:
    """Two slots, 200 requests of 1, 2, 3 or 30 tokens: a slot gets its next owner while the step before is hardly over."""
    model, jobs, wanted = short_requests()
    executors = (ThreadExecutor, *(AdversarialExecutor.factory(5, mood) for mood in ("lazy", "eager", "mixed")), ThreadExecutor)
    watch = Watch()
    got = run(
        model,
        jobs,
        lag=1,
        batch=2,
        page_size=(1, 16)[turn % 2],
        drafters={mode: EVERY_MODE[mode]((7, 3, 1)[turn % 3])},
        executor=watch.over(executors[turn]),
        order=("newest", "oldest")[turn % 2],
    )
    assert_equal(got, wanted, (mode, turn))
    admitted = [admit.slot for plan in watch.plans for admit in plan.admits]
    assert len(admitted) == 200 and len(set(admitted)) == 2
    last_named: dict[int, int] = {}
    quick = 0
    for plan in watch.plans:
        quick += sum(plan.step - last_named.get(admit.slot, -9) <= 2 for admit in plan.admits)
        last_named.update({part.slot: plan.step for part in plan.parts})
    assert quick > 150, "nearly all slots must change owner within two steps of their last use"


@cache
def short_requests() -> tuple[CausalLM, list[Job], list[Answer]]:
    model = HashLM(vocab_size=64, context_len=64, eos_token_ids=(EOS,))
    jobs = [Job(tuple((n * 7 + i * i) % 60 for i in range(1 + n % 5)), greedy((1, 2, 3, 30)[n % 4])) for n in range(40)]
    return model, jobs * 5, reference(model, jobs) * 5


@each_mode_and_off
def test_s12_the_same_on_a_real_model(mode: str) -> None:
    """Two slots, many short requests, on a model with floating-point KV."""
    model = tiny_model("qwen2")
    jobs = [Job(tuple((n * 7 + i * i) % 250 for i in range(1 + n % 5)), greedy((1, 2, 3, 10)[n % 4])) for n in range(20)]
    got = run(model, jobs, lag=1, batch=2, eos=(), drafters={mode: EVERY_MODE[mode](7)})
    assert_equal(got, reference(model, jobs, eos=()), mode)


# S14


@each_lag
@each_mode_with_eagle
def test_s14_drafts_count_in_the_budget_of_a_step(mode: str, lag: int) -> None:
    """Eight rows with wide drafts, 64 tokens a step, then a prompt of 1,000: no step is overfull, and the prompt goes on."""
    model, jobs, wanted = eight_and_a_long_one()
    watch = Watch()
    engine = make_engine(model, lag=lag, chunk=64, batch=9, eos=(), drafters={mode: WITH_EAGLE[mode](7)}, executor=watch.over())
    answers: dict[str, Answer] = {}
    try:
        for number, job in enumerate(jobs[:8]):
            engine.add(job.request(f"r{number}"))
        while len(answers) < 8:
            collect(engine, answers)
        assert all(answer.finish_reason is None for answer in answers.values())
        before = len(watch.plans)
        engine.add(jobs[8].request("r8"))
        drain(engine, answers)
    finally:
        engine.close()
    assert_equal([answers[f"r{n}"] for n in range(9)], wanted, (mode, lag))
    assert_drafts_count(mode, list(answers.values()), at_least=0.4)
    assert max(plan.num_tokens for plan in watch.plans) <= 64
    chunks = [plan.chunks for plan in watch.plans[before:]]
    prefilling = list(itertools.takewhile(bool, chunks[next(n for n, some in enumerate(chunks) if some) :]))
    assert sum(chunk.num_tokens for some in prefilling for chunk in some) == 1000, "each step must take the prompt further"
    assert all(chunk.num_tokens >= 16 for some in prefilling[:-1] for chunk in some)
    mixed = [plan for plan in watch.plans[before:] if plan.chunks and plan.verify_width]
    assert mixed and max(plan.num_tokens for plan in mixed) == 64, "drafts and prompt must have filled a step together"


@cache
def eight_and_a_long_one() -> tuple[CausalLM, list[Job], list[Answer]]:
    model = HashLM(vocab_size=64, context_len=1100)
    jobs = [Job(tuple((n * 11 + i) % 64 for i in range(6)), greedy(70)) for n in range(8)]
    jobs.append(Job(tuple(i * i % 61 for i in range(1000)), greedy(4)))
    return model, jobs, reference(model, jobs, eos=())


@each_lag
@each_mode_with_eagle
def test_s14_more_rows_than_a_step_has_tokens(mode: str, lag: int) -> None:
    """Twelve rows, eight tokens a step: all get their turn."""
    model, jobs, wanted = twelve_rows()
    watch = Watch()
    got = run(model, jobs, lag=lag, chunk=8, batch=12, eos=(), drafters={mode: WITH_EAGLE[mode](7)}, executor=watch.over())
    assert_equal(got, wanted, (mode, lag))
    assert max(plan.num_tokens for plan in watch.plans) <= 8
    assert len(watch.owners) == 12 and any(len(plan.rows) == 8 for plan in watch.plans), "a step must have been too small for all"


@cache
def twelve_rows() -> tuple[CausalLM, list[Job], list[Answer]]:
    model = HashLM(vocab_size=64, context_len=128)
    jobs = [Job(tuple((n * 11 + i) % 64 for i in range(1 + n % 2)), greedy(30 + n)) for n in range(12)]
    return model, jobs, reference(model, jobs, eos=())


# S16


@pytest.mark.parametrize("k", [1, 3, 7])
@each_lag
@each_mode_with_eagle
def test_s16_drafts_stop_at_the_end_of_the_context(mode: str, lag: int, k: int) -> None:
    """An answer that wants 1,000 tokens fills the context to its last position, of a context of 256 and of the model's own."""
    model = tiny_model("qwen2")
    for context_len, prompt_len in ((256, 200), (model.context_len, model.context_len - 56))[: 1 + (k == 7)]:
        job = Job(tuple(i * i % 251 for i in range(prompt_len)), greedy(1000, ignore_eos=True))
        watch = Watch()
        cell = {"context_len": context_len, "drafters": {mode: WITH_EAGLE[mode](k)}, "executor": watch.over()}
        (got,) = run(model, [job], lag=lag, **cell)
        assert_equal([got], context_filled(prompt_len, context_len), (mode, lag, k))
        assert prompt_len + len(got.token_ids) == context_len and got.finish_reason is FinishReason.LENGTH
        if mode in EAGLE_MODES:  # its head is a random one
            assert got.num_drafted > 0
        else:
            assert_drafts_count(mode, [got], at_least=0.75 * k / (k + 1))
        # At lag 0 max_len is exact; at lag 1 it is a bound, and the step in flight may have left more room than it says.
        assert all(row.max_len + (lag == 0) * row.num_nodes < context_len for plan in watch.plans for row in plan.rows)
        pages = [page for plan in watch.plans for delta in plan.page_deltas for page in delta.pages]
        assert len(pages) * 16 == context_len, "drafts need no page behind the last position"


@cache
def context_filled(prompt_len: int, context_len: int) -> list[Answer]:
    job = Job(tuple(i * i % 251 for i in range(prompt_len)), greedy(1000, ignore_eos=True))
    return reference(tiny_model("qwen2"), [job], context_len=context_len)


def test_s16_the_front_refuses_more_than_the_context_holds() -> None:
    """A client is told; who gives no number gets what there is."""
    cell = {"context_len": 256, "drafters": {"self_chain": MODES["self_chain"](7)}, "lag": 1}
    model = tiny_model("qwen2")
    with pytest.raises(ContextLengthExceeded, match="256 tokens, but got 200 prompt tokens and max_tokens 1000"):
        generated(model, ["x" * 200], greedy(1000), **cell)
    (filled,) = generated(model, ["x" * 200], SamplingParams(temperature=0.0, max_tokens=None), **cell)
    assert len(filled.outputs[0].token_ids) == 56 and filled.outputs[0].finish_reason == "length"
