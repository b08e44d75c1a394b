"""A draft model: accepted whole where it is the target, never past its own context, its KV copied and counted as the target's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.attention.kv import KVCache
from slipstream.config import EngineConfig
from slipstream.engine.build import pick_num_pages
from slipstream.engine.memory import Memory, plan_memory
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.runner import Runner
from slipstream.errors import ConfigError
from slipstream.models.base import CausalLM
from slipstream.relay import RelayPayload
from slipstream.sampling.state import NO_EDITS, NO_NEEDS, RowSampling
from slipstream.speculate.base import Draft, StepContext, Verdict
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.registry import Target, build_drafter
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_checkpoint, tiny_model
from slipstream.types import SamplingParams, nothing
from tests.cases.stage import greedy
from tests.engine.harness import Answer, DrafterFactory, Job, assert_equal, drain, make_engine, reference, run

LLAMA = tiny_model("llama")
EVERY_ID = 100.0  # above any logit of the models here


def draft_model(width: int, model: CausalLM | None = None) -> DrafterFactory:
    """`model` as the draft model; None: the target itself."""
    return lambda target: DraftModel(model or target.model, target, width)


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + place * place * 7) % 250 for place in range(length))


HOT = SamplingParams(temperature=1.0, max_tokens=34, ignore_eos=True)
TRUNCATED = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, frequency_penalty=0.5, max_tokens=34, ignore_eos=True)
JOBS = [
    Job(prompt(1, 5), greedy(34, ignore_eos=True)), Job(prompt(2, 40), HOT, seed=3), Job(prompt(3, 17), TRUNCATED, seed=9),
    Job(prompt(4, 1), HOT, seed=4),
]  # fmt: skip


class Resized:
    """A model with another number of rows in its head; rows that are new are the favourites at every position."""

    def __init__(self, base: CausalLM, vocab_size: int) -> None:
        self.vocab_size, self.context_len, self.dtype = vocab_size, base.context_len, base.dtype
        self.num_layers, self.kv_layers, self.hidden_size = base.num_layers, base.kv_layers, base.hidden_size
        self._base = base

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        assert int(tokens.max()) < self.vocab_size, "an id without an embedding"
        return self._base.forward(tokens.clamp(max=self._base.vocab_size - 1), attention, taps, computes)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._base.logits(hidden)
        more = max(0, self.vocab_size - logits.shape[1])
        return torch.cat([logits[:, : self.vocab_size], logits.new_full((len(logits), more), EVERY_ID)], 1)


class Short:
    """A model with fewer positions; it fails where it is asked for one more."""

    def __init__(self, base: CausalLM, context_len: int) -> None:
        self.vocab_size, self.context_len, self.dtype = base.vocab_size, context_len, base.dtype
        self.num_layers, self.kv_layers, self.hidden_size = base.num_layers, base.kv_layers, base.hidden_size
        self.logits = base.logits
        self._base = base

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        assert int(attention.layout.positions.max()) < self.context_len, "a position behind its last"
        return self._base.forward(tokens, attention, taps, computes)


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models above look at values."""
    from contextlib import nullcontext

    monkeypatch.setattr("slipstream.engine.runner.SyncGuard", nullcontext)


# -- acceptance ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag, page_size, chunk", [(0, 16, 64), (0, 1, 8), (1, 16, 8), (1, 1, 64)])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_the_target_itself_is_accepted_whole(width: int, lag: int, page_size: int, chunk: int) -> None:
    """Greedy and at temperature 1, truncated and with a penalty: every node of every step, as far as the limit."""
    cell = {"lag": lag, "page_size": page_size, "chunk": chunk}
    original, full, drafted, short = Runner.run, 0, 0, 0

    def spy(self: Runner, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        nonlocal full, drafted, short
        result = original(self, plan, computes)
        for accepted, nodes in zip(result.accept_lens, result.num_drafted, strict=True):
            assert nodes <= accepted <= nodes + 1, (plan, result)
            full, drafted, short = full + (nodes == width), drafted + nodes, short + (accepted == nodes)
        return result

    with mock.patch.object(Runner, "run", spy):
        got = run(LLAMA, JOBS, drafters={"draft": draft_model(width)}, **cell)
    assert_equal(got, reference(LLAMA, JOBS), (width, cell))
    assert drafted > 60 and (full > 8 or chunk == 8)
    assert short <= 2 * len(JOBS), "only the limit may cut a run: once, and a step of nothing where that one was in flight"


def test_the_host_need_not_wait_until_the_draft_is_made() -> None:
    """A draft's passes take long; the step before is handed over ahead of them."""
    said: list[str] = []
    original, propose = Runner.run, DraftModel.propose

    def run_spy(self: Runner, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        return original(self, plan, lambda: said.append("computes"))

    def propose_spy(self: DraftModel, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        said.append("drafts")
        return propose(self, ctx, payload, width)

    with mock.patch.object(Runner, "run", run_spy), mock.patch.object(DraftModel, "propose", propose_spy):
        run(LLAMA, JOBS[:1], drafters={"draft": draft_model(3)})
    assert "drafts" in said
    assert all(said[place - 1] == "computes" for place, word in enumerate(said) if word == "drafts")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cached_and_copied_pages_hold_its_kv_too(lag: int, page_size: int) -> None:
    """Samples of one prompt share and copy pages, and a second turn finds the first one's: all is accepted as it was cold."""
    base = Job(prompt(5, 38), HOT, seed=1)
    engine = make_engine(LLAMA, lag=lag, page_size=page_size, batch=3, drafters={"draft": draft_model(3)})
    copies, hits = [], []
    original = Runner.run

    def spy(self: Runner, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        copies.extend(plan.page_copies)
        hits.extend(admit.computed_len for admit in plan.admits)
        return original(self, plan, computes)

    answers: dict[str, Answer] = {}
    jobs = {f"s{n}": replace(base, seed=n) for n in range(3)}
    try:
        with mock.patch.object(Runner, "run", spy):
            for name, job in jobs.items():
                engine.add(job.request(name, parent_id=None if name == "s0" else "s0"))
            drain(engine, answers)
            for name in ("s0", "s1"):
                jobs[f"{name} again"] = Job((*base.prompt, *answers[name].token_ids, 7, 8, 9), HOT, seed=5)
                engine.add(jobs[f"{name} again"].request(f"{name} again"))
            drain(engine, answers)
    finally:
        engine.close()
    assert copies or page_size == 1
    assert max(hits) >= 38 + 34 - 2 - page_size
    assert_equal([answers[name] for name in jobs], reference(LLAMA, list(jobs.values())), (lag, page_size))
    for name, answer in answers.items():
        assert answer.num_accepted >= 22, (name, answer.num_accepted)  # of 34, a quarter is the target's own


@pytest.mark.parametrize("lag", [0, 1])
def test_under_pressure_it_is_retracted_and_comes_back(lag: int) -> None:
    jobs = [replace(job, prompt=prompt(n, 20)) for n, job in enumerate(JOBS)]
    got = run(LLAMA, jobs, lag=lag, page_size=4, num_pages=30, drafters={"draft": draft_model(3)}, admission_headroom_tokens=0)
    assert_equal(got, reference(LLAMA, jobs), lag)
    assert sum(answer.num_retractions for answer in got) > 0
    assert sum(answer.num_accepted for answer in got) > 60


@pytest.mark.parametrize("lag", [0, 1])
def test_another_model_changes_nothing_but_the_speed(lag: int) -> None:
    got = run(LLAMA, JOBS, lag=lag, chunk=8, drafters={"draft": draft_model(3, tiny_model("qwen2", seed=1))})
    assert_equal(got, reference(LLAMA, JOBS), lag)
    assert sum(answer.num_accepted for answer in got) < 0.25 * 4 * 34


# -- S16: positions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prompt_len", [100, 126, 127, 128, 200])
@pytest.mark.usefixtures("unguarded")
def test_s16_a_row_behind_the_draft_models_context_goes_on_without_drafts(prompt_len: int, lag: int) -> None:
    model = HashLM(vocab_size=64, context_len=256)
    job = Job(tuple(n * n % 61 for n in range(prompt_len)), greedy(1000, ignore_eos=True))
    neighbour = Job((1, 2, 3), greedy(100, ignore_eos=True))
    drafts: list[tuple[Tensor, Tensor, int]] = []
    propose = DraftModel.propose

    def spy(self: DraftModel, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        draft = propose(self, ctx, payload, width)
        drafts.append((ctx.lengths, draft.num_nodes, width))
        return draft

    with mock.patch.object(DraftModel, "propose", spy):
        cell = {"lag": lag, "chunk": 64, "context_len": 256}
        got = run(model, [job, neighbour], drafters={"draft": draft_model(7, Short(model, 128))}, **cell)
    assert_equal(got, reference(model, [job, neighbour], context_len=256), (prompt_len, lag))
    assert prompt_len + len(got[0].token_ids) == 256 and got[0].finish_reason == "length"
    assert got[1].num_accepted > 70, "a row within the context must not suffer"
    for lengths, num_nodes, _ in drafts:
        for length, nodes in zip(lengths.tolist(), num_nodes.tolist(), strict=True):
            assert nodes <= max(0, 128 - length)
    assert got[0].num_accepted <= max(0, 129 - prompt_len)
    assert prompt_len > 126 or got[0].num_accepted > 0


# -- L09: vocabularies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_rows", [259 + 64, 259 + 128, 259])
@pytest.mark.parametrize("target_rows", [259 + 64, 259])
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.usefixtures("unguarded")
def test_l09_padded_heads_run_and_padding_is_never_proposed(lag: int, draft_rows: int, target_rows: int, heat: float) -> None:
    """Both ways: the draft head is larger, smaller, or as large. Padding is the favourite of both; it is never said."""
    target: CausalLM = LLAMA if target_rows == 259 else Resized(LLAMA, target_rows)
    draft: CausalLM = LLAMA if draft_rows == 259 else Resized(LLAMA, draft_rows)
    params = SamplingParams(temperature=heat, max_tokens=30, ignore_eos=True, logprobs=3)
    jobs = [Job(prompt(n, 9), params, seed=n) for n in range(3)]
    proposed: list[Tensor] = []
    propose = DraftModel.propose

    def spy(self: DraftModel, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        draft = propose(self, ctx, payload, width)
        proposed.append(draft.tokens.flatten())
        return draft

    with mock.patch.object(DraftModel, "propose", spy):
        drafters = {"draft": lambda of: DraftModel(draft, of, 4)}
        got = run(target, jobs, lag=lag, eos=(), drafters=drafters, knows=ByteTokenizer())
    assert_equal(got, reference(LLAMA, jobs, eos=()), (lag, draft_rows, target_rows))
    assert int(torch.cat(proposed).max()) < 259
    assert all(token < 259 for answer in got for one in answer.logprobs for token in (one.token_id, *one.top_ids))
    assert sum(answer.num_accepted for answer in got) > 0.6 * 90


def checkpoint_with(tmp_path: Path, change: dict[str, str]) -> Path:
    """The tiny Llama with some entries of its vocabulary renamed."""
    folder = tmp_path / "foreign"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    told["model"]["vocab"] = {change.get(text, text): token_id for text, token_id in told["model"]["vocab"].items()}
    path.write_text(json.dumps(told))
    return folder


def test_l09_a_foreign_tokenizer_is_refused_at_start_up(tmp_path: Path) -> None:
    """Of equal size: two letters have changed places."""
    folder = checkpoint_with(tmp_path, {"a": "b", "b": "a"})
    target = Target(LLAMA, 16, tokenizer=ByteTokenizer())
    with pytest.raises(ConfigError, match=r"the target's vocabulary, but id 97 of .*foreign is b'b' and the target's is b'a'"):
        build_drafter(f"draft_model:model={folder}", target)
    name, drafter = build_drafter(f"draft_model:model={tiny_checkpoint('llama')},width=2", target)
    assert (name, drafter.depth, drafter.num_nodes, drafter.max_writes, drafter.kv_behind) == ("draft_model", 2, 2, 3, 1)


@pytest.mark.parametrize("spec, must", [
    ("draft_model", "must name a model"), ("draft_model:model=x,width=0", "width of --speculate draft_model must be"),
    ("draft_model:model=x,depth=2", "options of model, width, but got 'depth'"),
])  # fmt: skip
def test_wrong_options_are_refused(spec: str, must: str) -> None:
    with pytest.raises(ConfigError, match=must):
        build_drafter(spec, Target(LLAMA, 16))


def test_it_serves_from_the_command_line_to_the_answer() -> None:
    """`--speculate draft_model:model=...` builds, runs and is accepted."""
    spec = f"draft_model:model={tiny_checkpoint('llama')},width=3"
    got = run(LLAMA, JOBS[:2], speculate=(spec,))
    assert_equal(got, reference(LLAMA, JOBS[:2]), spec)
    assert sum(answer.num_accepted for answer in got) > 45


# -- its KV -------------------------------------------------------------------------------------------------------------


def test_its_kv_counts_in_pages_and_in_the_table() -> None:
    drafter = DraftModel(LLAMA, Target(HashLM(), 4), 3)
    config = EngineConfig(model="in-memory", page_size=4, kv_cache_memory_bytes=10_000, max_num_seqs=3)
    mine = sum(layer.bytes_per_token for layer in LLAMA.kv_layers)
    assert pick_num_pages(HashLM(), config, 64, [drafter]) == 10_000 // (4 * (16 + mine))
    table = plan_memory(
        HashLM(), config, context_len=22, num_pages=10, num_parameters=9, drafters=[drafter], memory=Memory(2**30, 2**30)
    )  # fmt: skip
    item = next(item for item in table.items if item.name == "draft KV pages")
    kv = KVCache(LLAMA.kv_layers, 12, 4, torch.device("cpu"))
    assert item.num_bytes == sum(tensor.nbytes for layer in range(2) for tensor in kv.layer(layer)) and item.must_fit


def test_a_row_with_fewer_nodes_writes_no_further_than_its_pages() -> None:
    """Beside a row of seven nodes one of none and one of two: nothing but their own places and the scratch page is written."""
    model = HashLM(vocab_size=64, context_len=64)
    drafter = DraftModel(model, Target(model, 4), 7)
    drafter.kv = KVCache(model.kv_layers, 12, 4, torch.device("cpu"), poison=True)
    ctx = StepContext(
        slots=torch.tensor([1, 2, 3]), epochs=torch.tensor([1, 1, 1]), lengths=torch.tensor([3, 2, 1]),
        limits=torch.tensor([60, 60, 60]), max_lens=(4, 3, 2), num_nodes=(0, 2, 7),
        page_tables=torch.tensor([[2, 0, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]]), history=torch.full((4, 66), 5),
        sampling=RowSampling((NO_NEEDS,) * 3, (NO_EDITS,) * 3, None), kv=drafter.kv, draft_from=torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    draft = drafter.propose(ctx, RelayPayload(torch.tensor([7, 8, 9])), 7)
    assert draft.num_nodes.tolist() == [0, 2, 7]
    written = {slot for slot in range(48) if int(drafter.kv.layer(0)[0][slot]) != -1}
    assert written - {4, 5, 6, 7} == {0, 1, 2, 3, 8 + 3, 12 + 2, 12 + 3, *range(16 + 1, 16 + 8)}
    assert not drafter.kv.layer(0)[0][:4].any(), "the padding page stays zero"


def test_observe_forgets_nothing_between_the_loop_and_the_root() -> None:
    """Only rows whose whole draft was accepted are behind, by one position."""
    model = HashLM(vocab_size=64, context_len=64)
    drafter = DraftModel(model, Target(model, 4), 3)
    history = torch.zeros((6, 66), dtype=torch.int64)
    ctx = mock.Mock(slots=torch.tensor([1, 2, 3, 4, 5]), num_nodes=(0, 3, 3, 0, 1), history=history, chunks=None)
    verdict = mock.Mock(spec=Verdict, accept_lens=torch.tensor([1, 4, 3, 1, 2]))
    assert drafter.observe(ctx, verdict, None) is None
    assert drafter._behind(history).tolist() == [False, False, True, False, False, True]
