"""Reported failures around cancelled requests, as tests: at every stage, beside others, with and without drafts."""

from __future__ import annotations

from functools import cache, partial

import pytest

from slipstream.models.base import CausalLM
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.toy_grammar import digits
from slipstream.types import FinishReason
from tests.cases.stage import EVERY_MODE, MODES, Watch, greedy
from tests.engine.harness import Answer, Job, assert_equal, collect, drain, make_engine, reference

each_mode_and_off = pytest.mark.parametrize("mode", EVERY_MODE)
STAGES = ("queued", "prefilling", "first", "running")


@pytest.mark.parametrize("victim", ["plain", "grammar"])
@pytest.mark.parametrize("stage", STAGES)
@each_mode_and_off
def test_s27_cancelled_at_every_stage(mode: str, stage: str, victim: str) -> None:
    """A cancelled request says nothing more and ends once; its neighbours, and its successor, are not touched."""
    model, requests, answered = to_cancel()
    dying, other = ("plain", "grammar") if victim == "plain" else ("grammar", "plain")
    jobs = {"r10": requests["bystander"], "other": requests[other], "r1": requests[dying]}
    batch = 2 if stage == "queued" else 3
    engine = make_engine(model, lag=1, batch=batch, chunk=24, eos=(), drafters={mode: EVERY_MODE[mode](3)})
    answers: dict[str, Answer] = {}
    try:
        for name, job in jobs.items():
            engine.add(job.request(name))
        step_until(stage, partial(collect, engine, answers), lambda: len(answers.get("r1", Answer()).token_ids), engine)
        said = list(answers.get("r1", Answer()).token_ids)
        assert "r10" not in answers or answers["r10"].finish_reason is None
        before = engine.num_running + engine.num_waiting
        engine.abort("r1")
        engine.abort("r1")
        engine.abort("")
        assert engine.num_running + engine.num_waiting == before - 1, "r1 must be gone at once, and nobody else"
        engine.add(requests[dying].request("again"))
        drain(engine, answers)
        assert engine.num_running == engine.num_waiting == 0
        engine.abort("r1")
        assert not engine.has_work
    finally:
        engine.close()
    ended = answers.pop("r1")
    assert ended.finish_reason is FinishReason.ABORT and ended.terminal_events == 1 and ended.error is None
    assert ended.token_ids == said, "nothing may be said after the cancel"
    wanted = {"r10": answered["bystander"], "other": answered[other], "again": answered[dying]}
    assert said == wanted["again"].token_ids[: len(said)] and len(said) < len(wanted["again"].token_ids)
    assert_equal([answers[name] for name in wanted], list(wanted.values()), (mode, stage, victim))


@cache
def to_cancel() -> tuple[CausalLM, dict[str, Job], dict[str, Answer]]:
    model = HashLM(vocab_size=64, context_len=256)
    jobs = {
        "plain": Job(tuple(range(3, 43)), greedy(60)),
        "grammar": Job(tuple(range(40)), greedy(60, temperature=1.0), seed=4, grammar=digits("10-59:3")),
        "bystander": Job(tuple(range(9)), greedy(120)),
    }
    return model, jobs, dict(zip(jobs, reference(model, list(jobs.values()), eos=()), strict=True))


def step_until(stage: str, step, said, engine) -> None:
    """Step to where a request is queued, half prefilled, has just said its first words, or is in the middle of its answer."""
    if stage == "queued":
        step()
        assert engine.num_waiting == 1
        return
    for _ in range(200):
        prefilling = [r for r in engine.scheduler.running if r.request_id == "r1" and r.prefilled]
        if stage == "prefilling" and prefilling and prefilling[0].is_prefilling:
            return
        if (stage == "first" and said()) or (stage == "running" and said() > 6):
            return
        step()
    raise AssertionError(f"r1 must come to the stage {stage!r}")


@each_mode_and_off
def test_s27_nothing_runs_on_behind_a_cancel(mode: str) -> None:
    """A lone request, cancelled in the middle of its answer, leaves nothing behind after the step in flight."""
    engine = make_engine(HashLM(vocab_size=64, context_len=512), lag=1, eos=(), drafters={mode: EVERY_MODE[mode](7)})
    answers: dict[str, Answer] = {}
    try:
        engine.add(Job((1, 2, 3), greedy(400)).request("lone"))
        while len(answers.get("lone", Answer()).token_ids) < 20:
            collect(engine, answers)
        engine.abort("lone")
        assert engine.num_running == 0
        steps = engine.stats().num_steps
        drain(engine, answers, max_steps=3)
        assert engine.stats().num_steps <= steps + 1
    finally:
        engine.close()
    assert answers["lone"].finish_reason is FinishReason.ABORT and answers["lone"].terminal_events == 1


def test_s27_a_cancel_before_the_first_step() -> None:
    """Cancelled before anything ran: one end, and the device never hears of it."""
    watch = Watch()
    engine = make_engine(HashLM(), lag=1, drafters={"self_chain": MODES["self_chain"](7)}, executor=watch.over())
    answers: dict[str, Answer] = {}
    try:
        engine.add(Job((1, 2, 3), greedy(40)).request("r1"))
        engine.abort("r1")
        drain(engine, answers)
    finally:
        engine.close()
    assert answers["r1"].finish_reason is FinishReason.ABORT and answers["r1"].terminal_events == 1
    assert not watch.plans
