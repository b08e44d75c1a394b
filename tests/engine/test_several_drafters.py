"""Several drafters in one engine: they come, go, catch up and take turns, the answers stay, and good drafts stay good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.loop import Engine
from slipstream.speculate.choice import OFF, Choice, RowDrafting, Shape, Widest
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.ngram import NGram
from slipstream.testing.drafters import DrafterFactory
from slipstream.testing.hash_lm import HashLM
from slipstream.types import DraftCounts, SamplingParams
from tests.engine.harness import Job, assert_equal, make_engine, reference, run_on
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
    """Real times: who is chosen may differ from run to run, what is answered may not."""
    engine = engine_of(names, lag=1, adaptive_speculation=True)
    assert_equal(run_on(engine, JOBS), reference(MODEL, JOBS, eos=()), names)
    assert engine.stats().num_accepted > 0
