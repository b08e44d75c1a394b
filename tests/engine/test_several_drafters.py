"""Several drafters in one engine: they come, go, catch up and take turns, the answers stay, and good drafts stay good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.build import assemble_engine
from slipstream.engine.loop import Engine
from slipstream.models.base import CausalLM
from slipstream.speculate.choice import OFF, Choice, RowDrafting, Shape, Widest
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.ngram import NGram
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.drafters import DrafterFactory
from slipstream.testing.hash_lm import HashLM
from slipstream.text.detokenize import StopScanner
from slipstream.types import SamplingParams
from tests.engine.harness import Answer, Job, assert_equal, drain, reference
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


def engine_of(model: CausalLM, names: tuple[str, ...], chooser: object = None, **settings: object) -> Engine:
    fields = {"lag": 1, "page_size": 4, "num_pages": 400, "max_num_seqs": 4, "debug": True, **settings}
    how = {} if chooser is None else {"chooser": chooser}
    return assemble_engine(
        model,
        EngineConfig(model="in-memory", **fields),  # type: ignore[arg-type]
        eos_token_ids=(),
        stop_text=lambda request: StopScanner(ByteTokenizer(), request.params),
        drafters={name: DRAFTERS[name] for name in names},
        **how,  # type: ignore[arg-type]
    )


def answered(engine: Engine) -> list[Answer]:
    answers: dict[str, Answer] = {}
    try:
        for number, job in enumerate(JOBS):
            engine.add(job.request(f"r{number}"))
        drain(engine, answers)
    finally:
        engine.close()
    return [answers[f"r{number}"] for number in range(len(JOBS))]


@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_who_comes_back_has_caught_up(lag: int, page_size: int, budget: int) -> None:
    """A draft model's KV is filled in, in one piece or in what the budget leaves; then all it says is right again."""
    engine = engine_of(MODEL, ("model", "head", "ngram"), Turns, lag=lag, page_size=page_size, max_num_batched_tokens=budget)
    assert_equal(answered(engine), reference(MODEL, JOBS, eos=()), (lag, page_size, budget))
    drafting = engine.stats().drafting
    assert drafting["ngram"].num_drafts and drafting["head"].num_drafts
    mine = drafting["model"]
    assert mine.num_drafts > (2 if budget == 16 else 10)
    assert mine.num_accepted >= mine.num_drafted - 3 * len(JOBS), "only the end of an answer may cut a draft"


@pytest.mark.parametrize("names", [("ngram", "model"), ("model", "ngram"), ("ngram", "head", "model")])
def test_the_cost_model_chooses(names: tuple[str, ...]) -> None:
    """Real times: who is chosen may differ from run to run, what is answered may not."""
    engine = engine_of(MODEL, names)
    assert_equal(answered(engine), reference(MODEL, JOBS, eos=()), names)
    assert engine.stats().num_accepted > 0
