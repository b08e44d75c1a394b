"""What the cases of this folder share: draft modes, a model that says what it is told, a watched engine, answers as text.

self_chain and self_tree draft the target's own samples, and so does draft_model, whose model is the target: nearly everything is
accepted. rand drafts anything: nearly nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.engine.executor import Device, Executor, StepHandle, ThreadExecutor
from slipstream.engine.loop import Engine
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.frontend.assemble import Assembler, Delta
from slipstream.frontend.model_info import ModelInfo
from slipstream.frontend.prepare import Frontend
from slipstream.llm import LLM
from slipstream.models.base import CausalLM
from slipstream.speculate.base import Drafter
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.eagle import Eagle
from slipstream.speculate.ngram import NGram
from slipstream.speculate.off import Off
from slipstream.speculate.registry import Target
from slipstream.testing import drafters as d
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.hash_head import HashHead
from slipstream.testing.hash_lm import HashLM
from slipstream.types import RequestOutput, SamplingParams, nothing
from tests.engine.harness import Answer, DrafterFactory, Job, make_engine, reference
from tests.speculate.eagle_heads import eagle

MODES: dict[str, Callable[[int], DrafterFactory]] = {
    "self_chain": lambda k: d.self_chain(k),
    "self_tree": lambda k: d.self_tree(k),
    "rand": lambda k: d.rand_chain(k, beyond=9),
    "draft_model": lambda k: lambda target: DraftModel(target.model, target, k),
}
WITH_OFF = {"off": lambda k: lambda target: Off(), "ngram": lambda k: lambda target: NGram(k), **MODES}
# EAGLE's head is right on HashLM, and what wraps it; on a real model it is a random one, and nothing is accepted.
EAGLE_MODES: dict[str, Callable[[int], DrafterFactory]] = {
    "eagle_chain": lambda k: eagle_mode(1, k, k),
    "eagle_tree": lambda k: eagle_mode(3, k, k + 2 if k > 1 else 3),
}
WITH_EAGLE = {**MODES, **EAGLE_MODES}
EVERY_MODE = {**WITH_OFF, **EAGLE_MODES}
PRINTABLE = tuple(range(32, 127))
FAVOUR = 100.0  # above any logit, bias and noise of the models here


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **more})


def text_ids(text: str) -> tuple[int, ...]:
    return tuple(ByteTokenizer().encode(text))


class Parrot:
    """A model that prefers a given token at each position; all other logits, and the KV, are those of the model it wraps.

    Args:
        base: the wrapped model.
        script: position -> the preferred token there.
    """

    def __init__(self, base: CausalLM, script: Sequence[int]) -> None:
        self.vocab_size, self.context_len, self.dtype = base.vocab_size, base.context_len, base.dtype
        self.num_layers, self.kv_layers = base.num_layers, base.kv_layers
        self.hidden_size = base.hidden_size + 1  # the last one is the position
        self.base = base
        self._script = torch.tensor([*script, 0])  # behind the last position nothing is sampled

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        hidden, tapped = self.base.forward(tokens, attention, taps, computes)
        return torch.cat([hidden, attention.layout.positions[:, None].to(hidden.dtype)], 1), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        preferred = self._script[hidden[:, -1].long() + 1]
        logits = self.base.logits(hidden[:, :-1])
        return logits.scatter_add(1, preferred[:, None], torch.full_like(logits[:, :1], FAVOUR))


class Counter:
    """A model that counts: behind a token it prefers the next higher one. Everything else is the model's that it wraps.

    It notes the least and the greatest id it was given, so that a placeholder or a draft from outside the vocabulary shows.

    Args:
        base: the wrapped model.
    """

    def __init__(self, base: CausalLM) -> None:
        self.vocab_size, self.context_len, self.dtype = base.vocab_size, base.context_len, base.dtype
        self.num_layers, self.kv_layers = base.num_layers, base.kv_layers
        self.hidden_size = base.hidden_size + 1  # the last one is the input token
        self.least, self.greatest = torch.tensor(0), torch.tensor(0)
        self.base = base

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        self.least, self.greatest = torch.minimum(self.least, tokens.min()), torch.maximum(self.greatest, tokens.max())
        hidden, tapped = self.base.forward(tokens, attention, taps, computes)
        return torch.cat([hidden, tokens[:, None].to(hidden.dtype)], 1), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        preferred = (hidden[:, -1].long() + 1) % self.vocab_size
        logits = self.base.logits(hidden[:, :-1])
        return logits.scatter_add(1, preferred[:, None], torch.full_like(logits[:, :1], FAVOUR))

    def assert_known_ids(self) -> None:
        """That all tokens it was ever given are of its vocabulary."""
        assert int(self.least) >= 0 and int(self.greatest) < self.vocab_size, (self.least, self.greatest)


class WrappedHead(HashHead):
    """HashHead for a model that wraps HashLM and looks at one number more besides the hidden state."""

    def __init__(self, model: Parrot | Counter, base: HashLM) -> None:
        super().__init__(base)
        self._outer = model
        self._column = 1 if isinstance(model, Counter) else 2  # of the head's states: the token, or the position

    def logits(self, states: Tensor) -> Tensor:
        return self._outer.logits(states[:, [0, self._column]])


def eagle_mode(topk: int, steps: int, draft_tokens: int) -> DrafterFactory:
    """EAGLE for any target of these cases."""

    def make(target: Target) -> Drafter:
        model = target.model
        if isinstance(model, (Parrot, Counter)):
            assert isinstance(model.base, HashLM)
            return Eagle(WrappedHead(model, model.base), target, topk, steps, draft_tokens)
        return eagle(topk, steps, draft_tokens)(target)

    return make


@dataclass
class Watch:
    """All plans, and for each request how many tokens each of its steps committed, those behind its end included."""

    plans: list[StepPlan] = field(default_factory=list)
    runs: dict[str, list[int]] = field(default_factory=dict)
    owners: dict[tuple[int, int], str] = field(default_factory=dict)  # (slot, epoch) -> request id
    unsettled: list[StepPlan] = field(default_factory=list)

    def over(self, make: Callable[[Device], Executor] = ThreadExecutor) -> Callable[[Device], Executor]:
        """An executor that tells this watch."""
        return lambda device: _WatchedExecutor(make(device), self)

    def submitted(self, plan: StepPlan) -> None:
        busy = {part.slot for step in self.unsettled for part in step.parts}
        # Steps run in order here, so no answer would show it: a slot must not change hands while a step names it.
        assert not busy.intersection(admit.slot for admit in plan.admits), (plan.step, busy)
        self.plans.append(plan)
        self.unsettled.append(plan)
        self.owners.update({(admit.slot, admit.epoch): admit.request.request_id for admit in plan.admits})

    def came_back(self, plan: StepPlan, result: StepResult) -> None:
        assert self.unsettled.pop(0) is plan
        for part, accepted in zip(plan.sampled, result.accept_lens, strict=True):
            self.runs.setdefault(self.owners[part.slot, part.epoch], []).append(int(accepted))

    def was_cut_inside(self, request_id: str, answer: Answer) -> bool:
        """Whether the step that ended the answer had committed tokens behind its end."""
        kept = len(answer.token_ids)
        return next(total for total in accumulate(self.runs[request_id]) if total >= kept) > kept

    def names(self, plan: StepPlan) -> list[str]:
        """Requests that a plan computes something for."""
        return [self.owners[part.slot, part.epoch] for part in plan.parts]


class _WatchedExecutor:
    def __init__(self, inner: Executor, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def submit(self, plan: StepPlan) -> StepHandle:
        self._watch.submitted(plan)
        return _WatchedHandle(self._inner.submit(plan), plan, self._watch)

    def close(self) -> None:
        self._inner.close()


class _WatchedHandle:
    def __init__(self, inner: StepHandle, plan: StepPlan, watch: Watch) -> None:
        self._inner, self._plan, self._watch = inner, plan, watch

    def done(self) -> bool:
        return self._inner.done()

    def result(self) -> StepResult:
        result = self._inner.result()
        self._watch.came_back(self._plan, result)
        return result


def oracle(model: CausalLM, job: Job, eos: tuple[int, ...] = ()) -> Answer:
    """The answer at lag 0, alone, without a drafter."""
    return reference(model, [job], eos=eos)[0]


def assert_drafts_count(mode: str, answers: Sequence[Answer], at_least: float = 0.6) -> None:
    """That the mode does what it is for: most of SELF's tokens come from drafts, hardly any of RAND's drafts is accepted."""
    drafted, accepted = sum(a.num_drafted for a in answers), sum(a.num_accepted for a in answers)
    num_tokens = sum(len(a.token_ids) for a in answers)
    assert drafted > 0
    if mode == "rand":
        assert accepted < 0.1 * drafted, (accepted, drafted)
    else:
        assert accepted > at_least * num_tokens, (accepted, num_tokens)


@dataclass
class Streamed:
    """One prompt's answers with the deltas that made them."""

    output: RequestOutput
    deltas: list[Delta]
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafted: int
    num_accepted: int
    num_retractions: int

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def model_info(engine: Engine, eos: tuple[int, ...]) -> ModelInfo:
    return ModelInfo("tiny", ByteTokenizer(), None, engine.vocab_size, engine.context_len, eos)


def streamed(model: CausalLM, prompt: str, params: SamplingParams, *, eos: tuple[int, ...] = (), **cell: object) -> Streamed:
    """One prompt through front, engine and assembler, delta by delta."""
    engine = make_engine(model, eos=eos, **cell)
    info = model_info(engine, eos)
    prepared = Frontend(info).prepare("one", prompt, params)
    assembler = Assembler(prepared, info)
    deltas, drafted, accepted = [], 0, 0
    for request in prepared.requests:
        engine.add(request)
    try:
        while engine.has_work:
            for output in engine.step():
                deltas.append(assembler.push(output))
                if output.finish_reason is not None:
                    drafted, accepted = drafted + output.num_drafted, accepted + output.num_accepted
        stats = engine.stats()
        engine.scheduler.ledger.check_balanced()
    finally:
        engine.close()
    assert assembler.is_finished
    assert (stats.num_drafted, stats.num_accepted) == (drafted, accepted), "the totals must be the sum of the requests'"
    assert stats.num_output_tokens == assembler.num_output_tokens
    output = assembler.request_output()
    counts = (assembler.num_prompt_tokens, assembler.num_output_tokens, drafted, accepted, stats.num_retractions)
    return Streamed(output, deltas, *counts)


def generated(
    model: CausalLM, prompts: Sequence[str], params: SamplingParams, *, eos: tuple[int, ...] = (), **cell: object
) -> list[RequestOutput]:
    """Prompts through `LLM.generate`, all at once."""
    engine = make_engine(model, eos=eos, **cell)
    with LLM.around(engine, model_info(engine, eos), max_num_seqs=64) as llm:
        return llm.generate(prompts, params, use_tqdm=False)
