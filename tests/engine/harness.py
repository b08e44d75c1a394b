"""Runs requests through an engine and compares answers. The reference is lag 0, one request at a time, drafter off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.cache.pool import ReuseOrder
from slipstream.config import EngineConfig
from slipstream.engine.build import assemble_engine, default_chooser
from slipstream.engine.executor import Device, Executor, ThreadExecutor
from slipstream.engine.loop import Engine
from slipstream.models.base import CausalLM
from slipstream.speculate.base import Drafter
from slipstream.speculate.choice import Chooser, Shape
from slipstream.speculate.registry import Target
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.text.detokenize import StopScanner
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import DraftCounts, EngineRequest, FinishReason, SamplingParams, TokenLogprobs

DrafterFactory = Callable[[Target], Drafter]
EOS = 3


@dataclass(frozen=True)
class Job:
    """One request of a test."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: tuple[str, str] | None = None

    def request(self, name: str, **how: Any) -> EngineRequest:
        """The engine request; `how`: priority, cache_salt, parent_id."""
        return EngineRequest(name, self.prompt, self.params, self.seed, self.bad_word_ids, self.grammar, **how)


@dataclass
class Answer:
    """What came back for one job."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: tuple[str, str] | None = None
    terminal_events: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafting: Mapping[str, DraftCounts] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_retractions: int = 0

    def key(self) -> tuple[object, ...]:
        """What must be equal on every path."""
        return (tuple(self.token_ids), self.finish_reason, self.stop_reason, self.error and self.error[0])


def make_engine(
    model: CausalLM,
    *,
    lag: int = 0,
    page_size: int = 16,
    chunk: int = 2048,
    batch: int = 8,
    drafters: Mapping[str, DrafterFactory] | None = None,
    num_pages: int | None = None,
    executor: Callable[[Device], Executor] = ThreadExecutor,
    order: ReuseOrder = "newest",
    eos: tuple[int, ...] = (EOS,),
    context_len: int | None = None,
    knows: Tokenizer | None = None,
    chooser: Callable[[Mapping[str, Shape], EngineConfig], Chooser] = default_chooser,
    **settings: Any,
) -> Engine:
    """A debug engine around a model that is already there. `knows`: a tokenizer with fewer ids than the model's head."""
    config = EngineConfig(
        model="in-memory",
        lag=lag,
        page_size=page_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=batch,
        num_pages=num_pages if num_pages is not None else 4096 // page_size,
        debug=True,
        **{"adaptive_speculation": False, **settings},
    )
    tokenizer = ByteTokenizer()
    return assemble_engine(
        model,
        config,
        eos_token_ids=eos,
        stop_text=lambda request: StopScanner(tokenizer, request.params),
        context_len=context_len,
        drafters=drafters,
        executor=executor,
        order=order,
        tokenizer=knows,
        chooser=chooser,
    )


def collect(engine: Engine, answers: dict[str, Answer]) -> None:
    """One engine step; adds its news to the answers."""
    for output in engine.step():
        answer = answers.setdefault(output.request_id, Answer())
        assert answer.finish_reason is None, f"{output.request_id} got news after it had ended"
        answer.token_ids.extend(output.token_ids)
        answer.logprobs.extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None, f"{output.request_id} got the logprobs of its prompt twice"
            answer.prompt_logprobs = list(output.prompt_logprobs)
        if output.finish_reason is not None:
            answer.finish_reason, answer.stop_reason, answer.error = output.finish_reason, output.stop_reason, output.error
            answer.terminal_events += 1
            answer.num_drafted, answer.num_accepted = output.num_drafted, output.num_accepted
            answer.drafting = output.drafting
            answer.num_cached_tokens, answer.num_retractions = output.num_cached_tokens, output.num_retractions


def drain(engine: Engine, answers: dict[str, Answer], max_steps: int = 20_000) -> None:
    """Step until nothing is left; fails when that does not happen."""
    for _ in range(max_steps):
        if not engine.has_work:
            engine.scheduler.ledger.check_balanced()
            return
        collect(engine, answers)
    raise AssertionError(f"the engine must come to an end, but was still at work after {max_steps} steps")


def run(model: CausalLM, jobs: Sequence[Job], **cell: object) -> list[Answer]:
    """All jobs at once through one engine; answers in the order of the jobs."""
    return run_on(make_engine(model, **cell), jobs)


def run_on(engine: Engine, jobs: Sequence[Job]) -> list[Answer]:
    """All jobs at once through an engine, which is closed then; answers in the order of the jobs."""
    answers: dict[str, Answer] = {}
    try:
        for number, job in enumerate(jobs):
            engine.add(job.request(f"r{number}"))
        drain(engine, answers)
    finally:
        engine.close()
    return [answers[f"r{number}"] for number in range(len(jobs))]


def reference(model: CausalLM, jobs: Sequence[Job], **cell: object) -> list[Answer]:
    """Each job alone, at lag 0, without a drafter."""
    return [run(model, [job], lag=0, batch=1, **cell)[0] for job in jobs]


def assert_equal(got: Sequence[Answer], wanted: Sequence[Answer], cell: object) -> None:
    """Same ids, finish reasons and stop reasons; logprobs within 1e-9."""
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.key() == other.key(), f"job {number} differs in {cell}:\n{one.key()}\n{other.key()}"
        assert one.terminal_events == 1
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token_id == theirs.token_id and abs(mine.logprob - theirs.logprob) < 1e-5, (number, cell)
            assert mine.top_ids == theirs.top_ids
