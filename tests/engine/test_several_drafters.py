"""Several drafters in one engine: they come, go, catch up and take turns, the answers stay, and good drafts stay good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.executor import ThreadExecutor
from slipstream.engine.loop import Engine
from slipstream.engine.runner import Runner
from slipstream.speculate.choice import OFF, Choice, RowDrafting, Shape, Widest
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.ngram import NGram
from slipstream.speculate.width import WidthModel
from slipstream.testing.drafters import DrafterFactory
from slipstream.testing.hash_lm import HashLM
from slipstream.types import DraftCounts, SamplingParams
from tests.engine.harness import Answer, Job, assert_equal, collect, drain, make_engine, reference, run_on
from tests.fuzz.cached import check_cached
from tests.speculate.eagle_heads import eagle

MODEL = HashLM(vocab_size=64, context_len=256)
JOBS = [
    Job(
        tuple((salt * 7 + i * i) % 61 for i in range(3 + salt * 5)),
        SamplingParams(max_tokens=60, temperature=0.0 if salt % 2 else 1.0),
        seed=salt,
    )
    for salt in range(6)
]
# The model and the head are right wherever their KV is: what is refused lay in a hole.
DRAFTERS: Mapping[str, DrafterFactory] = {
    "model": lambda target: DraftModel(target.model, target, 3),
    "head": eagle(1, 3, kind=1),
    "ngram": lambda target: NGram(5, 1, 3),
}


class Turns(Widest):
    """Each drafter watches a row for six steps, then the next one."""

    def __init__(self, shapes: Mapping[str, Shape], config: EngineConfig) -> None:
        super().__init__(shapes, OFF)
        self._shapes = shapes
        self._names = [name for name in shapes if name != OFF]
        self._steps: Counter[int] = Counter()

    def choose(self, rows: Sequence[RowDrafting], most: Sequence[int], num_other_tokens: int) -> list[Choice]:
        return [self._turn(row, limit) for row, limit in zip(rows, most, strict=True)]

    def _turn(self, row: RowDrafting, limit: int) -> Choice:
        self._steps[id(row)] += 1
        name = self._names[self._steps[id(row)] // 6 % len(self._names)]
        drafter = name if name == row.observer or not self._shapes[name].has_state else OFF
        return Choice(drafter, min(limit, self._shapes[drafter].num_nodes), name)


def engine_of(names: tuple[str, ...], **how: Any) -> Engine:
    return make_engine(MODEL, eos=(), batch=4, drafters={name: DRAFTERS[name] for name in names}, **how)


@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_who_comes_back_has_caught_up(lag: int, page_size: int, budget: int) -> None:
    """A draft model's KV is filled in, in one piece or in what the budget leaves; then all it says is right again."""
    engine = engine_of(("model", "head", "ngram"), lag=lag, page_size=page_size, chunk=budget, chooser=Turns)
    answers = run_on(engine, JOBS)
    assert_equal(answers, reference(MODEL, JOBS, eos=()), (lag, page_size, budget))
    drafting = engine.stats().drafting
    assert drafting["ngram"].num_drafts and drafting["head"].num_drafts
    for name, total in drafting.items():  # what is said of each request adds up to what is said of all
        mine = DraftCounts()
        for answer in answers:
            mine.merge(answer.drafting.get(name, DraftCounts()))
        assert (mine.num_drafts, mine.num_drafted) == (total.num_drafts, total.num_drafted)
        assert mine.num_accepted == total.num_accepted == sum(total.accepted_at) and mine.accepted_at == total.accepted_at
    for answer in answers:
        assert sum(one.num_accepted for one in answer.drafting.values()) == answer.num_accepted < len(answer.token_ids)
    model = drafting["model"]
    assert model.num_drafts > (2 if budget == 16 else 10)
    assert model.num_accepted >= model.num_drafted - 3 * len(JOBS), "only the end of an answer may cut a draft"


@pytest.mark.parametrize("names", [("ngram", "model"), ("model", "ngram"), ("ngram", "head", "model")])
def test_the_cost_model_chooses(names: tuple[str, ...]) -> None:
    """Real times: who is chosen, if anybody, may differ from run to run, what is answered may not."""
    engine = engine_of(names, lag=1, adaptive_speculation=True)
    assert_equal(run_on(engine, JOBS), reference(MODEL, JOBS, eos=()), names)


class OnPaper(WidthModel):
    """The cost model with times that do not depend on the machine: a node costs a twentieth of a step, drafting as much."""

    def __init__(self, shapes: Mapping[str, Shape], config: EngineConfig) -> None:
        super().__init__(shapes)

    def step_took(
        self, num_rows: int, num_other_tokens: int, num_nodes: Mapping[str, int], step_s: float, draft_s: Mapping[str, float]
    ) -> None:
        nodes = sum(num_nodes.values())
        drafted = {name: 0.005 * count for name, count in num_nodes.items()}
        super().step_took(num_rows, num_other_tokens, num_nodes, 0.1 + 0.005 * (num_rows + num_other_tokens + nodes), drafted)

    def filled(self, drafter: str, num_tokens: int, fill_s: float) -> None:
        super().filled(drafter, num_tokens, 0.001 * num_tokens)

    def watched(self, drafter: str, num_rows: int, watch_s: float) -> None:
        super().watched(drafter, num_rows, 0.001 * num_rows)


@pytest.mark.parametrize("names", [("ngram", "model"), ("model", "ngram"), ("ngram", "head", "model")])
def test_the_cost_model_finds_drafters_that_are_always_right(names: tuple[str, ...]) -> None:
    engine = engine_of(names, lag=1, adaptive_speculation=True, chooser=OnPaper)
    assert_equal(run_on(engine, JOBS), reference(MODEL, JOBS, eos=()), names)
    assert engine.stats().num_accepted > 0.5 * sum(job.params.max_tokens or 0 for job in JOBS)


class HeadFromTheSecondOn(Widest):
    """Nobody watches the prompt of a request that finds the engine empty; the head comes behind it."""

    def __init__(self, shapes: Mapping[str, Shape], config: EngineConfig) -> None:
        super().__init__(shapes, "head")

    def first_observer(self, num_rows: int) -> str:
        return "head" if num_rows else OFF


def test_a_sample_knows_that_the_head_came_late_to_the_page_it_copies() -> None:
    """What is cached with its draft KV must be: the copied part of the page has none."""
    engine = engine_of(("head",), chooser=HeadFromTheSecondOn)
    prompt = tuple((7 * i * i + 3) % 61 for i in range(28))
    jobs = [Job(prompt, SamplingParams(max_tokens=20), seed=seed) for seed in (1, 2)]
    answers: dict[str, Answer] = {}
    engine.add(jobs[0].request("0"))
    for _ in range(3):
        collect(engine, answers)
    engine.add(jobs[1].request("1", parent_id="0"))
    drain(engine, answers)
    assert answers["1"].num_cached_tokens == 27, "the page is copied"
    assert_equal([answers["0"], answers["1"]], reference(MODEL, jobs, eos=()), "late")
    told = [("", (*prompt, *answer.token_ids), len(prompt) + 19) for answer in answers.values()]
    assert isinstance(engine._executor, ThreadExecutor) and isinstance(engine._executor._device, Runner)
    check_cached(engine.scheduler.ledger, told, engine._executor._device)
    engine.close()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", ["model", "head"])
def test_no_drafter_watches_a_request_that_wants_no_drafts(name: str, adaptive: bool) -> None:
    """It would pay for passes over a drafter's KV that no draft starts from."""
    engine = engine_of((name,), lag=1, adaptive_speculation=adaptive)
    jobs = [replace(job, params=replace(job.params, speculate=0)) for job in JOBS]
    assert_equal(run_on(engine, jobs), reference(MODEL, JOBS, eos=()), (name, adaptive))
    assert name not in engine.stats().drafting
