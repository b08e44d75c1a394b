"""The loop at lag 0 and 1: overlap, aborts at every stage, refusals, non-finite logits, slot reuse, balance."""

from __future__ import annotations

import pytest

from slipstream.engine.loop import Engine
from slipstream.errors import InvalidParameter
from slipstream.testing.hash_lm import HashLM
from slipstream.types import EngineRequest, FinishReason, SamplingParams
from tests.engine.harness import Answer, Job, assert_equal, collect, drain, make_engine, reference, run

LAGS = pytest.mark.parametrize("lag", [0, 1])


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


@pytest.fixture
def model() -> HashLM:
    return HashLM(vocab_size=64, context_len=256)


def test_lag_1_leaves_one_step_unsettled(model: HashLM) -> None:
    engine = make_engine(model, lag=1)
    engine.add(Job((1, 2, 3), greedy(20, ignore_eos=True)).request("a"))
    assert engine.step() == [], "the first step is launched and not waited for"
    first = engine.step()
    assert len(first) == 1 and len(first[0].token_ids) == 1
    drain(engine, {"a": Answer(token_ids=list(first[0].token_ids))})
    engine.close()


@LAGS
def test_a_request_found_finished_one_step_late_gives_nothing_more(model: HashLM, lag: int) -> None:
    """EOS is only known when its step is settled; at lag 1 another step has been launched by then."""
    (free,) = reference(model, [Job((5, 6), greedy(30, ignore_eos=True))], eos=())
    eos = free.token_ids[10]
    first = free.token_ids.index(eos)
    (answer,) = run(model, [Job((5, 6), greedy(30))], lag=lag, eos=(eos,))
    assert answer.token_ids == free.token_ids[: first + 1]
    assert answer.finish_reason is FinishReason.STOP and answer.terminal_events == 1


@LAGS
@pytest.mark.parametrize("wait", range(8))
def test_an_abort_at_any_stage_ends_once_and_leaves_the_others_alone(model: HashLM, lag: int, wait: int) -> None:
    jobs = {"r1": Job(tuple(range(1, 40)), greedy(30)), "r10": Job((9, 8, 7), greedy(30)), "r2": Job((4,), greedy(5))}
    engine = make_engine(model, lag=lag, chunk=16, batch=2)
    answers: dict[str, Answer] = {}
    for name, job in jobs.items():
        engine.add(job.request(name))
    for _ in range(wait):
        collect(engine, answers)
    seen = list(answers["r1"].token_ids) if "r1" in answers else []
    engine.abort("")
    engine.abort("r1")
    engine.abort("r1")
    drain(engine, answers)
    engine.close()
    assert answers["r1"].finish_reason is FinishReason.ABORT and answers["r1"].terminal_events == 1
    assert answers["r1"].token_ids == seen, "nothing is visible after the abort"
    for name in ("r10", "r2"):
        assert_equal([answers[name]], reference(model, [jobs[name]]), (lag, wait, name))


@LAGS
def test_slots_change_owner_nearly_every_step(model: HashLM, lag: int) -> None:
    jobs = [Job((n % 60 + 1, n % 7), greedy((1, 2, 3, 30)[n % 4])) for n in range(60)]
    assert_equal(run(model, jobs, lag=lag, batch=2, page_size=1, num_pages=80), reference(model, jobs), lag)


@LAGS
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(model: HashLM, lag: int) -> None:
    engine = make_engine(model, lag=lag, page_size=4, num_pages=5)
    answers: dict[str, Answer] = {}
    engine.add(Job((1, 2, 3), greedy(18)).request("big"))
    engine.add(Job((1, 2, 3), greedy(17)).request("fits"))
    drain(engine, answers)
    engine.close()
    error = answers["big"].error
    assert error is not None and error[0] == "NeverFits" and "20 tokens" in error[1] and "21" in error[1]
    assert len(answers["fits"].token_ids) <= 17 and answers["fits"].error is None


@LAGS
def test_a_small_pool_serves_everybody_in_turn(model: HashLM, lag: int) -> None:
    jobs = [Job(tuple(range(1, 2 + n)), greedy(12)) for n in range(12)]
    assert_equal(run(model, jobs, lag=lag, page_size=4, num_pages=7), reference(model, jobs), lag)


@LAGS
def test_non_finite_logits_fail_that_request_alone(lag: int) -> None:
    sick = HashLM(vocab_size=64, context_len=256, nan_token_id=13)
    jobs = [Job((1, 2, 3), greedy(10)), Job((1, 13), greedy(10)), Job((7, 7), SamplingParams(max_tokens=10), seed=5)]
    wanted = reference(sick, [jobs[0], jobs[2]])
    got = run(sick, jobs, lag=lag)
    assert got[1].finish_reason is FinishReason.ERROR and got[1].token_ids == []
    assert got[1].error is not None and got[1].error[0] == "NonFiniteLogits"
    assert_equal([got[0], got[2]], wanted, lag)


@pytest.mark.parametrize(
    "broken, field",
    [
        (EngineRequest("x", (), SamplingParams(), 0), "prompt"),
        (EngineRequest("x", (64,), SamplingParams(), 0), "prompt"),
        (EngineRequest("x", (-1,), SamplingParams(), 0), "prompt"),
        (EngineRequest("x", tuple([1] * 256), SamplingParams(), 0), "prompt"),
        (EngineRequest("x", (1,), SamplingParams(logit_bias={64: 1.0}), 0), "logit_bias"),
        (EngineRequest("x", (1,), SamplingParams(stop_token_ids=(64,)), 0), "stop_token_ids"),
        (EngineRequest("x", (1,), SamplingParams(allowed_token_ids=(64,)), 0), "allowed_token_ids"),
        (EngineRequest("x", (1,), SamplingParams(), 0, bad_word_ids=((1, 64),)), "bad_words"),
        (EngineRequest("x", (1,), SamplingParams(), 0, grammar=("nope", "")), "grammar"),
    ],
)
def test_bad_requests_are_refused_at_the_engine_too(model: HashLM, broken: EngineRequest, field: str) -> None:
    engine = make_engine(model)
    answers: dict[str, Answer] = {}
    engine.add(broken)
    engine.add(Job((1,), greedy(3)).request("good"))
    drain(engine, answers)
    engine.close()
    error = answers["x"].error
    assert error is not None and field in error[1]
    assert answers["good"].error is None


def test_an_id_in_use_is_refused_without_touching_its_owner(model: HashLM) -> None:
    engine = make_engine(model)
    engine.add(Job((1,), greedy(3)).request("same"))
    with pytest.raises(InvalidParameter, match="unique"):
        engine.add(Job((2,), greedy(3)).request("same"))
    answers: dict[str, Answer] = {}
    drain(engine, answers)
    engine.close()
    assert_equal([answers["same"]], reference(model, [Job((1,), greedy(3))]), "duplicate")


@LAGS
def test_the_context_is_filled_exactly(model: HashLM, lag: int) -> None:
    prompt = tuple(n % 64 for n in range(200))
    (answer,) = run(model, [Job(prompt, greedy(1000, ignore_eos=True))], lag=lag, page_size=1)
    assert len(answer.token_ids) == 56 and answer.finish_reason is FinishReason.LENGTH


def test_a_step_that_fails_says_so(model: HashLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = make_engine(model, lag=1)

    def broken(*_: object) -> None:
        raise RuntimeError("device fell off")

    monkeypatch.setattr(model, "logits", broken)
    engine.add(Job((1,), greedy(3)).request("a"))
    engine.step()
    with pytest.raises(RuntimeError, match="device fell off"):
        engine.step()
    engine.close()
