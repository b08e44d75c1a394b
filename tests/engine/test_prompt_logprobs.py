"""Logprobs of prompt tokens: those of the plain model, whatever the chunks, pages, lag and neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.engine import prompt_logprobs as module
from slipstream.engine.loop import Engine
from slipstream.models.base import CausalLM
from slipstream.speculate.off import Off
from slipstream.testing import drafters as d
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import CONTEXT_LEN, tiny_checkpoint, tiny_model
from slipstream.types import FinishReason, SamplingParams, TokenLogprobs, nothing
from tests.cases.stage import Watch
from tests.engine.harness import Answer, DrafterFactory, Job, assert_equal, collect, drain, make_engine, reference, run
from tests.engine.test_equality import params, prompt
from tests.oracle import transformers_logits

DRAFTERS: dict[str, DrafterFactory] = {
    "off": lambda target: Off(),
    "self": d.self_chain(3),
    "rand": d.rand_tree(7),
}
HASH_LM = HashLM(vocab_size=64, context_len=512)


def scored(length: int, num_top: int | None = 3, max_tokens: int = 6, number: int = 1, **more: object) -> Job:
    return Job(prompt(number, length), params(max_tokens, prompt_logprobs=num_top, **more), seed=number)


@cache
def oracle(family: str, tokens: tuple[int, ...], num_top: int) -> list[TokenLogprobs]:
    """Position by position: the whole prefix through the model once more."""
    logits_of = transformers_logits(str(tiny_checkpoint(family)))
    out = []
    for place in range(1, len(tokens)):
        logits = logits_of(tokens[:place])
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
        best, token = order[:num_top], tokens[place]
        out.append(
            TokenLogprobs(token, logprobs[token], tuple(best), tuple(logprobs[one] for one in best), rank=1 + order.index(token))
        )
    return out


def assert_same(got: Sequence[TokenLogprobs] | None, wanted: Sequence[TokenLogprobs]) -> None:
    assert got is not None
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.token_id, mine.top_ids, mine.rank) == (theirs.token_id, theirs.top_ids, theirs.rank)
        assert (mine.logprob, *mine.top_logprobs) == pytest.approx((theirs.logprob, *theirs.top_logprobs), abs=1e-9)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("lag, page_size", [(0, 16), (1, 1), (1, 16)])
@pytest.mark.parametrize("chunk", [2, 7, 64])
def test_every_cell_has_the_models_own_logprobs(chunk: int, page_size: int, lag: int, name: str) -> None:
    """K05. Beside requests that do not ask, ask for more, less or nothing but the token itself, or only score their prompt."""
    family = "llama" if lag else "qwen2"
    jobs = [
        scored(17, 3, number=1, temperature=0.8),
        scored(40, None, number=2),
        scored(16, 0, number=3),
        scored(33, 20, 0, number=4),
        scored(1, 5, number=5),
        scored(1, 5, 0, number=5),
        scored(2, 1, 0, number=6),
    ]
    got = run(tiny_model(family), jobs, drafters={name: DRAFTERS[name]}, lag=lag, page_size=page_size, chunk=chunk)
    for job, answer in zip(jobs, got, strict=True):
        if (num_top := job.params.prompt_logprobs) is None:
            assert answer.prompt_logprobs is None
        else:
            assert_same(answer.prompt_logprobs, oracle(family, job.prompt, num_top))
        if job.params.max_tokens == 0:
            assert answer.token_ids == [] and answer.finish_reason is FinishReason.LENGTH and answer.error is None
    sampling = [number for number, job in enumerate(jobs) if job.params.max_tokens]
    plain = [replace(jobs[n], params=replace(jobs[n].params, prompt_logprobs=None)) for n in sampling]
    assert_equal([got[n] for n in sampling], reference(tiny_model(family), plain), (chunk, page_size, lag, name))


def test_what_shapes_sampling_does_not_shape_them() -> None:
    """Also with logprobs_mode processed (the harness has raw): they are of the model's own logits."""
    shaped = scored(
        20, 4, temperature=0.3, top_k=2, logit_bias={5: 50.0}, allowed_token_ids=(1, 2), repetition_penalty=2.0, min_tokens=3
    )
    (answer,) = run(tiny_model("llama"), [shaped])
    assert_same(answer.prompt_logprobs, oracle("llama", shaped.prompt, 4))


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    job = Job(prompt(1, CONTEXT_LEN), SamplingParams(max_tokens=0, prompt_logprobs=0))
    (answer,) = run(tiny_model("llama"), [job], chunk=100)
    assert answer.finish_reason is FinishReason.LENGTH and len(answer.prompt_logprobs or ()) == CONTEXT_LEN - 1
    (refused,) = run(tiny_model("llama"), [Job(prompt(1, CONTEXT_LEN), params(1, prompt_logprobs=0))])
    assert refused.error is not None and refused.prompt_logprobs is None


def test_scoring_needs_no_pages_beyond_the_prompt() -> None:
    job = Job(prompt(1, 64), SamplingParams(max_tokens=0, prompt_logprobs=1))
    for lag in (0, 1):
        (answer,) = run(HASH_LM, [job], num_pages=4, lag=lag, chunk=10)
        assert len(answer.prompt_logprobs or ()) == 63


def test_logits_are_computed_in_bounded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(tiny_model("llama"), [scored(50, 3)])[0].prompt_logprobs
    assert wanted is not None
    model = tiny_model("llama")
    monkeypatch.setattr(module, "MAX_BLOCK_LOGITS", 8 * model.vocab_size)
    watched = Counted(model)
    (answer,) = run(watched, [scored(50, 3)])
    assert_same(answer.prompt_logprobs, wanted)
    assert max(watched.counts) == 8 and sum(watched.counts) == 49 + 6, "only positions whose next token is of the prompt"


def test_only_chunks_of_those_that_ask_cost_logits() -> None:
    watched = Counted(tiny_model("llama"))
    run(watched, [scored(50, None), scored(30, 0, 0, number=2)], chunk=16)
    assert sum(watched.counts) == 29 + 1 + 6


def test_a_step_back_overwrites_what_was_there() -> None:
    """A prompt that is computed anew, from any position on, gives the same entries once, and is then not asked for again."""
    watch = Watch()
    engine = make_engine(HASH_LM, chunk=8, executor=watch.over())
    answers: dict[str, Answer] = {}
    try:
        job = scored(40, 2)
        engine.add(job.request("r"))
        collect(engine, answers)
        collect(engine, answers)
        request = engine.scheduler.running[0]
        assert len(request.prompt_logprobs) == 16
        request.prefilled = 8  # as if pressure had taken it back
        drain(engine, answers)
    finally:
        engine.close()
    assert [chunk.start for plan in watch.plans for chunk in plan.chunks] == [0, 8, 8, 16, 24, 32]
    assert request.num_prompt_logprobs is None and request.prompt_logprobs == []
    assert_same(answers["r"].prompt_logprobs, reference(HASH_LM, [job])[0].prompt_logprobs or ())


@pytest.mark.parametrize("lag", [0, 1])
def test_an_abort_in_the_middle_of_a_scored_prompt(lag: int) -> None:
    """K06: nothing is left behind, and the next owner of the slot starts from nothing."""
    engine = make_engine(HASH_LM, lag=lag, batch=1, chunk=8)
    answers: dict[str, Answer] = {}
    try:
        engine.add(scored(60, 2).request("dies"))
        engine.add(scored(20, 1, number=2).request("lives"))
        for _ in range(3):
            collect(engine, answers)
        engine.abort("dies")
        drain(engine, answers)
    finally:
        engine.close()
    assert answers["dies"].finish_reason is FinishReason.ABORT and answers["dies"].prompt_logprobs is None
    assert_same(answers["lives"].prompt_logprobs, reference(HASH_LM, [scored(20, 1, number=2)])[0].prompt_logprobs or ())


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_sick_prompt_fails_and_nobody_else(lag: int, max_tokens: int) -> None:
    """Logits that are not finite inside a prompt: an error at once, in the middle of the prefill; never a number."""
    sick = Job((*prompt(1, 10), 63, *prompt(2, 30)), params(max_tokens, prompt_logprobs=0))
    fine = scored(20, 2, number=3)
    engine = make_engine(SickAt(HASH_LM, 63), lag=lag, chunk=16)
    answers: dict[str, Answer] = {}
    try:
        engine.add(sick.request("sick"))
        engine.add(fine.request("fine"))
        drain(engine, answers)
        assert is_idle(engine)
    finally:
        engine.close()
    assert answers["sick"].error is not None and answers["sick"].error[0] == "NonFiniteLogits"
    assert answers["sick"].prompt_logprobs is None and answers["sick"].terminal_events == 1
    assert_same(answers["fine"].prompt_logprobs, reference(HASH_LM, [fine])[0].prompt_logprobs or ())


def is_idle(engine: Engine) -> bool:
    return engine.num_running == engine.num_waiting == 0


class Counted:
    """A model that counts the rows of logits it computes."""

    def __init__(self, base: CausalLM) -> None:
        self.vocab_size, self.context_len, self.dtype = base.vocab_size, base.context_len, base.dtype
        self.num_layers, self.kv_layers, self.hidden_size = base.num_layers, base.kv_layers, base.hidden_size
        self._base = base
        self.counts: list[int] = []

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        return self._base.forward(tokens, attention, taps, computes)

    def logits(self, hidden: Tensor) -> Tensor:
        if len(hidden):
            self.counts.append(len(hidden))
        return self._base.logits(hidden)


class SickAt(Counted):
    """A model whose logits are not finite behind one token; its KV is fine."""

    def __init__(self, base: CausalLM, token: int) -> None:
        super().__init__(base)
        self.hidden_size += 1
        self._token = token

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        hidden, tapped = super().forward(tokens, attention, taps, computes)
        return torch.cat([hidden, (tokens == self._token)[:, None].to(hidden.dtype)], 1), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden[:, -1:] > 0, torch.nan, super().logits(hidden[:, :-1]).double())


@pytest.mark.parametrize("warm_first", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_same_values_whatever_ran_before(lag: int, warm_first: bool) -> None:
    """K05: prompts around the size of a page, twice, before and behind requests that leave their pages in the cache."""
    jobs = [scored(length, 2, max_tokens) for length in (15, 16, 17, 33) for max_tokens in (0, 3)]
    plain = [replace(job, params=params(3)) for job in jobs]
    wanted = [reference(HASH_LM, [job])[0] for job in jobs]
    engine = make_engine(HASH_LM, lag=lag, page_size=16, chunk=10)
    rounds = [plain, jobs, jobs] if warm_first else [jobs, plain, jobs]
    cached = 0
    try:
        for number, asked in enumerate(rounds):
            answers: dict[str, Answer] = {}
            for place, job in enumerate(asked):
                engine.add(job.request(f"{number}-{place}"))
            drain(engine, answers)
            cached += sum(answer.num_cached_tokens for answer in answers.values())
            if asked is jobs:
                for place, alone in enumerate(wanted):
                    assert_same(answers[f"{number}-{place}"].prompt_logprobs, alone.prompt_logprobs or ())
                    assert answers[f"{number}-{place}"].key() == alone.key()
                    assert answers[f"{number}-{place}"].num_cached_tokens == 0
    finally:
        engine.close()
    assert cached > 0, "the others must find pages in the cache"


@pytest.mark.parametrize("steps", [1, 3, 8, 12])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_retracted_request_gets_them_once(lag: int, steps: int) -> None:
    """In the middle of its prompt it starts over, whatever the cache has of it; in the middle of its answer it has them."""
    job, urgent = scored(60, 2, max_tokens=40), Job(prompt(2, 20), params(5))
    watch = Watch()
    engine = make_engine(HASH_LM, lag=lag, batch=1, page_size=8, chunk=8, executor=watch.over())
    answers: dict[str, Answer] = {}
    try:
        engine.add(replace(job.request("r"), priority=5))
        for _ in range(steps):
            collect(engine, answers)
        engine.add(urgent.request("urgent"))
        drain(engine, answers)
    finally:
        engine.close()
    assert answers["r"].num_retractions == 1, "it must lose its slot, or the test proves nothing"
    starts = [chunk.start for plan in watch.plans for chunk in plan.chunks if chunk.num_prompt_logprobs is not None]
    assert starts.count(0) == (2 if steps < 8 else 1), "from the start in the middle of it, never again behind it"
    alone = reference(HASH_LM, [job])[0]
    assert_same(answers["r"].prompt_logprobs, alone.prompt_logprobs or ())
    assert answers["r"].key() == alone.key()
