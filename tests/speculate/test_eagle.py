"""EAGLE drafting: the same tokens in every cell, and the head's numbers against the same head in plain torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.observe.guard import declared
from slipstream.relay import DraftInput, RelayPayload
from slipstream.speculate.base import Draft, StepContext, Verdict
from slipstream.speculate.choice import Widest
from slipstream.speculate.eagle import Eagle
from slipstream.speculate.ngram import NGram
from slipstream.speculate.registry import Target
from slipstream.testing.hash_head import HashHead, hash_eagle
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.testing.toy_grammar import digits
from slipstream.types import SamplingParams
from tests.engine.harness import Answer, DrafterFactory, Job, assert_equal, collect, drain, make_engine, reference, run
from tests.engine.test_cache_and_pressure import run_in_waves, tight
from tests.speculate.eagle_heads import PlainHead, hidden_states, plain_target, random_head, through_files, train

CHAIN, TREE = "topk=1,steps=3", "topk=4,steps=4,draft_tokens=8"
SHAPES = {"chain": CHAIN, "tree": TREE}
STEM = tuple((place * place * 7 + 3) % 60 for place in range(70))


def params(max_tokens: int = 20, **more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})


# Shared prefixes, greedy and hot rows, each kind of parameter, ends inside a run.
JOBS = [
    Job(STEM[:40], params(36)),
    Job((*STEM[:40], 5), params(36, temperature=1.0), seed=3),
    Job(STEM[:64], params(16, frequency_penalty=0.8, logprobs=2)),
    Job((*STEM[:33], *STEM[:9]), params(36, temperature=0.8, min_p=0.02, repetition_penalty=1.2), seed=-9),
    Job(STEM, params(20, min_tokens=12, presence_penalty=0.5, ignore_eos=False)),
    Job(STEM[5:6], params(36, temperature=4.0, top_p=0.95, logit_bias={7: 3.0}), seed=8),
    Job(STEM[:20], params(36, temperature=1.0), seed=1, grammar=digits("10-19:3")),
]


@cache
def wanted_of(family: str) -> list[Answer]:
    return reference(tiny_model(family), JOBS, enable_prefix_caching=False)


def texts_of(family: str) -> list[list[int]]:
    return [list(job.prompt) + answer.token_ids for job, answer in zip(JOBS, wanted_of(family), strict=True)]


@cache
def good_head(family: str, kind: int) -> PlainHead:
    """A head that knows the answers, but for those of its reduced vocabulary; EAGLE-3's has all of it."""
    head = random_head(kind, seed=1, draft_vocab=None)
    train(head, family, texts_of(family), 80)
    return head


@cache
def head_of(family: str, name: str) -> PlainHead:
    return random_head(3) if name == "reduced" else good_head(family, 3 if name == "eagle3" else 1)


HEADS = ("eagle3", "eagle1", "reduced")
each_family = pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])


# -- equal tokens -----------------------------------------------------------------------------------------------------

CELLS = list(itertools.product((0, 1), (1, 16), ((24, 8), (2048, 8), (24, 1)), SHAPES))


@pytest.mark.parametrize("lag, page_size, chunk_and_batch, shape", CELLS)
def test_every_cell(lag: int, page_size: int, chunk_and_batch: tuple[int, int], shape: str) -> None:
    chunk, batch = chunk_and_batch
    drafters = {"eagle": through_files(head_of("llama", "eagle3"), SHAPES[shape])}
    got = run(tiny_model("llama"), JOBS, lag=lag, page_size=page_size, chunk=chunk, batch=batch, drafters=drafters)
    assert_equal(got, wanted_of("llama"), (lag, page_size, chunk, batch, shape))
    assert accept_length(got[:5]) > 1.5, "a head that knows the answers must be accepted"


@each_family
@pytest.mark.parametrize("name, caching", [("eagle3", True), ("eagle3", False), ("eagle1", True), ("reduced", True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_under_pressure(family: str, name: str, shape: str, caching: bool, page_size: int) -> None:
    engine = make_engine(
        tiny_model(family),
        lag=1,
        page_size=page_size,
        chunk=32,
        drafters={"eagle": through_files(head_of(family, name), SHAPES[shape])},
        num_pages=tight(JOBS, page_size),
        enable_prefix_caching=caching,
        admission_headroom_tokens=0,
    )
    got = run_in_waves(engine, JOBS)
    assert_equal(got, wanted_of(family), (family, name, shape, caching, page_size))
    stats = engine.stats()
    assert stats.num_retractions > 0 and (stats.num_cached_tokens > 0) == caching
    assert sum(answer.num_accepted for answer in got) > 0


@pytest.mark.parametrize("shape", ["topk=1,steps=1", "topk=1,steps=7", "topk=2,steps=3,draft_tokens=10", "topk=9,steps=2"])
@pytest.mark.parametrize("budget", [9, 2048])
def test_other_shapes_and_rows_with_fewer_nodes(shape: str, budget: int) -> None:
    drafters = {"eagle": through_files(head_of("llama", "eagle1"), shape)}
    got = run(tiny_model("llama"), JOBS, lag=1, chunk=budget, drafters=drafters)
    assert_equal(got, wanted_of("llama"), (shape, budget))
    assert sum(answer.num_accepted for answer in got) > 0


def accept_length(answers: list[Answer]) -> float:
    tokens, accepted = sum(len(a.token_ids) for a in answers), sum(a.num_accepted for a in answers)
    return tokens / (tokens - accepted)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_noise_keeps_acceptance_high(temperature: float) -> None:
    """The head's best token with the target's noise is the target's more often than its best without."""
    jobs = [Job(STEM[: 9 + n], params(30, temperature=temperature), seed=n) for n in range(6)]
    head = random_head(3, draft_vocab=None)
    got = run(tiny_model("llama"), jobs, drafters={"eagle": through_files(head, CHAIN)})
    assert_equal(got, reference(tiny_model("llama"), jobs), temperature)
    cold = [Job(job.prompt, params(30)) for job in jobs]
    without = run(tiny_model("llama"), cold, drafters={"eagle": through_files(head, CHAIN)})
    assert sum(a.num_accepted for a in got) > 3 * sum(a.num_accepted for a in without)


# -- the head's numbers -----------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What a drafter saw and did for one row: `relayed` at the end of a step, `drafted` in the next one."""

    tokens: list[int]
    state: Tensor | None = None
    topk_p: Tensor | None = None
    topk_index: Tensor | None = None
    drafted: tuple[list[int], list[int]] | None = None


@dataclass
class Watched:
    """An Eagle that writes down what it relays and drafts."""

    inner: Eagle
    records: list[Record] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "kv":
            self.inner.kv = value
        else:
            object.__setattr__(self, name, value)

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        draft = self.inner.propose(ctx, payload, width)
        with declared("a test's check"):
            for row, (slot, length) in enumerate(zip(ctx.slots.tolist(), ctx.lengths.tolist(), strict=True)):
                parents = torch.arange(draft.tokens.shape[1])[None] if draft.parents is None else draft.parents
                nodes = (draft.tokens[row].tolist(), parents.expand_as(draft.tokens)[row].tolist())
                self.records.append(Record(ctx.history[slot, : length + 1].tolist(), drafted=nodes))
        return draft

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        extras = self.inner.observe(ctx, verdict, taps)
        if extras is None:
            return None
        assert extras.hidden_states is not None and extras.topk_p is not None and extras.topk_index is not None
        with declared("a test's check"):
            for row, (slot, length) in enumerate(zip(ctx.slots.tolist(), verdict.new_lengths.tolist(), strict=True)):
                self.records.append(
                    Record(
                        ctx.history[slot, : length + 1].tolist(),
                        extras.hidden_states[row],
                        extras.topk_p[row],
                        extras.topk_index[row],
                    )
                )
        return extras


def watched(head: PlainHead, shape: str, into: list[Watched]) -> DrafterFactory:
    def make(target: Target) -> Watched:
        into.append(Watched(through_files(head, shape)(target)))
        return into[-1]

    return make


class Oracle:
    """The head in plain torch, over one whole text."""

    def __init__(self, head: PlainHead, family: str, text: list[int]) -> None:
        self.head, self.target = head, plain_target(family)
        self.text = text
        self.states = head.start(head.features(hidden_states(family, text)))
        self.made = head.run(self.target, torch.tensor(text[1:]), self.states[:-1])

    def best(self, state: Tensor, count: int) -> list[tuple[int, float]]:
        """Ids and log probabilities of the best tokens."""
        scores = self.head.logits(self.target, state[None])[0].log_softmax(0)
        found = scores.topk(count)
        return list(zip(self.head.target_ids[found.indices].tolist(), found.values.tolist(), strict=True))

    def after(self, length: int, path: list[int]) -> Tensor:
        """The state at the end of a path of drafted tokens behind the root at `length`, the head going on by itself."""
        state = self.made[length - 1]
        states, following = self.states[:length], self.text[1 : length + 1]
        for token in path:
            states, following = torch.cat((states, state[None])), [*following, token]
            state = self.head.run(self.target, torch.tensor(following), states)[-1]
        return state

    def tree(self, length: int, topk: int, steps: int) -> dict[tuple[int, ...], float]:
        """Paths and log probabilities of the nodes that are looked at."""
        found: dict[tuple[int, ...], float] = {}
        beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(steps):
            level = []
            for score, path in beam:
                level += [(score + p, (*path, token)) for token, p in self.best(self.after(length, list(path)), topk)]
            found |= {path: score for score, path in level}
            beam = sorted(level, reverse=True)[:topk]
        return found


def check_records(records: list[Record], oracles: list[Oracle], num_trees: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Compare with the oracle whose text begins with a record's tokens; returns how many were relayed and how many drafted."""
    relayed = drafted = 0
    for record in records:
        length = len(record.tokens) - 1
        oracle = next((one for one in oracles if one.text[: length + 1] == record.tokens), None)
        if oracle is None or length + 1 >= len(oracle.text):  # behind the answer's end
            continue
        if record.state is not None and record.topk_p is not None and record.topk_index is not None:
            relayed += 1
            # `transformers` has its RMS norms in float32, so its states differ from the target's by some 1e-6.
            assert torch.allclose(record.state, oracle.made[length - 1], atol=1e-3, rtol=0), (length, "state")
            wanted = oracle.best(oracle.made[length - 1], len(record.topk_index))
            assert record.topk_index.tolist() == [token for token, _ in wanted]
            # A chain takes its one candidate whatever it scores.
            scores = [0.0] if len(wanted) == 1 else [p for _, p in wanted]
            assert record.topk_p.tolist() == pytest.approx(scores, abs=1e-3)
        elif record.drafted is not None and record.drafted[0]:
            drafted += 1
            if drafted > num_trees:
                continue
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(*record.drafted, strict=True):
                paths.append((*paths[parent], token))
            if shape[0] > 1 and length + shape[0] * (shape[1] - 1) > len(oracle.text):
                continue  # at a row's limit a tree has no room for the KV of its last levels
            # The best ones, best first: compared by their scores, as ties may go either way.
            wanted_scores = oracle.tree(length, *shape)
            scores = [wanted_scores.get(path, math.nan) for path in paths[1:]]
            assert scores == pytest.approx(sorted(wanted_scores.values(), reverse=True)[: len(scores)], abs=1e-3), (length, paths)
    return relayed, drafted


GREEDY = [
    Job(STEM[:40], params(16)),
    Job(STEM[:64], params(16)),
    Job((*STEM[:33], 9, 9), params(16)),
    Job(STEM[3:5], params(16)),
]


@cache
def greedy_texts(family: str) -> list[list[int]]:
    answers = reference(tiny_model(family), GREEDY, enable_prefix_caching=False)
    return [list(job.prompt) + answer.token_ids for job, answer in zip(GREEDY, answers, strict=True)]


@each_family
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shape, numbers", [(CHAIN, (1, 3)), (TREE, (4, 4))], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size, chunk", [(1, 2048), (4, 16)])
def test_numbers_against_plain_torch(
    family: str, name: str, shape: str, numbers: tuple[int, int], page_size: int, chunk: int
) -> None:
    """What is relayed and drafted after chunked prompts, cached prefixes and accepted runs."""
    head = head_of(family, name)
    made: list[Watched] = []
    engine = make_engine(
        tiny_model(family), lag=1, page_size=page_size, chunk=chunk, drafters={"eagle": watched(head, shape, made)}
    )
    answers: dict[str, Answer] = {}
    for turn in range(2):  # the second time everything is cached
        for number, job in enumerate(GREEDY):
            engine.add(job.request(f"{turn}-{number}"))
            drain(engine, answers)
    engine.close()
    texts = greedy_texts(family)
    assert [list(GREEDY[n].prompt) + answers[f"1-{n}"].token_ids for n in range(4)] == texts
    assert answers["1-0"].num_cached_tokens >= 36 and answers["1-3"].num_cached_tokens <= 1
    oracles = [Oracle(head, family, text) for text in texts]
    relayed, drafted = check_records(made[0].records, oracles, 10, numbers)
    assert relayed > 20 and drafted > 10


def test_draft_kv_comes_back_from_host_memory() -> None:
    """Pages that the pool gave up come back with the head's keys and values in them."""
    head = head_of("llama", "eagle3")
    made: list[Watched] = []
    layers = [*tiny_model("llama").kv_layers]
    engine = make_engine(
        tiny_model("llama"),
        page_size=4,
        num_pages=24,
        drafters={"eagle": watched(head, CHAIN, made)},
        kv_offload_memory_bytes=600 * sum(layer.bytes_per_token for layer in layers),
    )
    jobs = [GREEDY[1], Job(STEM[2:66], params(16))]
    answers: dict[str, Answer] = {}
    for turn in range(2):
        for number, job in enumerate(jobs):
            engine.add(job.request(f"{turn}-{number}"))
            drain(engine, answers)
        if turn == 0:
            made[0].records.clear()
    engine.close()
    texts = [list(job.prompt) + answers[f"1-{number}"].token_ids for number, job in enumerate(jobs)]
    assert [answers[f"1-{number}"].num_cached_tokens for number in range(2)] == [60, 60]
    relayed, drafted = check_records(made[0].records, [Oracle(head, "llama", text) for text in texts], 4, (1, 3))
    assert relayed > 4 and drafted > 4


def test_a_draft_begins_where_its_kv_does() -> None:
    """Behind `draft_from` the head's keys may be anything: drafts come out as if the text began there."""
    head = head_of("llama", "reduced")
    made: list[Watched] = []
    engine = make_engine(tiny_model("llama"), page_size=4, chunk=13, drafters={"eagle": watched(head, CHAIN, made)})
    job = Job(STEM[:30], params(6))
    contexts = _with_draft_from(13, made)
    engine.add(job.request("one"))
    answers: dict[str, Answer] = {}
    drain(engine, answers)
    engine.close()
    text = list(job.prompt) + answers["one"].token_ids
    assert_equal([answers["one"]], reference(tiny_model("llama"), [job]), "draft_from")
    target = plain_target("llama")
    states = head.start(head.features(hidden_states("llama", text)))
    # rope is relative: a head that starts at 13 makes the same states as one that starts at 0 and sees nothing before
    wanted = head.run(target, torch.tensor(text[14:]), states[13:-1])
    found = [record for record in made[0].records if record.state is not None and len(record.tokens) < len(text)]
    assert contexts and len(found) > 2
    for record in found:
        assert record.state is not None
        assert torch.allclose(record.state, wanted[len(record.tokens) - 2 - 13], atol=1e-3, rtol=0)


def _with_draft_from(start: int, made: list[Watched]) -> list[int]:
    """Every context says that draft KV begins at `start`; the first chunk ends there."""
    inner, seen = made[0].inner, []
    propose, observe = inner.propose, inner.observe

    def moved(ctx: StepContext) -> StepContext:
        seen.append(1)
        chunks = ctx.chunks
        if chunks is not None:
            chunks = replace(chunks, draft_from=chunks.starts.clamp(max=start))
        return replace(ctx, draft_from=ctx.lengths.clamp(max=start), chunks=chunks)

    inner.propose = lambda ctx, payload, width: propose(moved(ctx), payload, width)
    inner.observe = lambda ctx, verdict, taps: observe(moved(ctx), verdict, taps)
    return seen


# -- the engine's buffers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [CHAIN, "topk=4,steps=4,draft_tokens=3"])
def test_nothing_is_written_beyond_what_was_reserved(shape: str) -> None:
    """Free pages, the padding page and other rows' pages keep their bytes through every step."""
    made: list[Watched] = []
    engine = make_engine(
        tiny_model("llama"),
        lag=0,
        page_size=1,
        num_pages=60,
        drafters={"eagle": watched(head_of("llama", "eagle3"), shape, made)},
    )
    for number, job in enumerate((Job(STEM[:9], params(11)), Job(STEM[3:15], params(13)))):
        engine.add(job.request(f"r{number}"))
    kv = made[0].inner.kv
    assert kv is not None
    answers: dict[str, Answer] = {}
    while engine.has_work:
        before = kv.layer(0)[0].clone()
        collect(engine, answers)
        held = {page for r in engine.scheduler.running if r.holding is not None for page in r.holding.table.pages}
        changed = {
            page for page in range(kv.num_pages) if not torch.equal(before[page].nan_to_num(), kv.layer(0)[0][page].nan_to_num())
        }
        assert 0 not in changed, "the padding page stays zero"
        if held:
            ended = {page for page in changed if page not in held and page != 1}
            assert not ended or any(a.finish_reason is not None for a in answers.values()), ended
    engine.close()
    assert math.isfinite(accept_length(list(answers.values())))


def test_what_it_declares() -> None:
    target = Target(tiny_model("llama"), page_size=4)
    tree = through_files(random_head(3), "topk=4,steps=6,draft_tokens=8")(target)
    assert (tree.depth, tree.num_nodes, tree.max_writes, tree.shifted_kv) == (6, 8, 20, True)
    assert {name: spec.shape for name, spec in tree.relay.fields.items()} == {
        "topk_p": (4,), "topk_index": (4,), "hidden_states": (32,),
    }  # fmt: skip
    chain = through_files(random_head(1), CHAIN)(target)
    assert (chain.depth, chain.num_nodes, chain.max_writes, chain.taps) == (3, 3, 4, (2,))


# -- a head that is always right ------------------------------------------------------------------------------------------

HASH_LM = HashLM(vocab_size=64, context_len=256)
HASH_JOBS = [
    Job(STEM[:40], params(31)),
    Job((*STEM[:40], 5), params(33, temperature=1.0), seed=3),
    Job(STEM[:64], params(16, frequency_penalty=0.8)),
    Job((*STEM[:33], *STEM[:9]), params(24, temperature=0.8, min_p=0.02, repetition_penalty=1.2), seed=-9),
    Job(STEM[5:6], params(24, temperature=2.0, top_p=0.9), seed=8),
    Job(STEM[7:8], params(2)),
    Job(STEM[:16], params(1)),
]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk, steps", [(16, 1), (16, 3), (16, 7), (2048, 3)])
def test_a_right_head_is_always_accepted(lag: int, page_size: int, chunk: int, steps: int) -> None:
    """In chains, behind chunks, cached prefixes and each other: one wrong key or state and a draft is refused."""
    engine = make_engine(HASH_LM, lag=lag, page_size=page_size, chunk=chunk, drafters={"eagle": hash_eagle(1, steps)})
    answers: dict[str, Answer] = {}
    for turn in range(2):
        for number, job in enumerate(HASH_JOBS):
            engine.add(job.request(f"{turn}-{number}"))
        drain(engine, answers)
    engine.close()
    wanted = reference(HASH_LM, HASH_JOBS, enable_prefix_caching=False)
    for turn in range(2):
        got = [answers[f"{turn}-{number}"] for number in range(len(HASH_JOBS))]
        assert_equal(got, wanted, (turn, lag, page_size, chunk))
        # At lag 1 an answer may end with a drafted token, which counts as the step's own.
        assert all(answer.num_drafted - answer.num_accepted in (0, lag) for answer in got)
        assert got[0].num_drafted >= 30 * steps // (steps + 1) - steps
        assert got[5].num_drafted == got[6].num_drafted == 0, "an answer of two tokens leaves nothing to draft"
    assert answers["1-2"].num_cached_tokens >= 48


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_right_head_is_always_accepted_in_a_tree(page_size: int, lag: int) -> None:
    """The best path is in the tree, so each step accepts as many tokens as the tree is deep, but for a row's last ones."""
    jobs = [Job(job.prompt, params(49), seed=job.seed) for job in HASH_JOBS[:5]]
    got = run(HASH_LM, jobs, lag=lag, page_size=page_size, chunk=32, drafters={"eagle": hash_eagle(3, 3, 9)})
    assert_equal(got, reference(HASH_LM, jobs), (page_size, lag))
    # 48 tokens behind the first in steps of 4: 36 but where nine nodes were too few for the best path, or the end was near.
    assert all(answer.num_accepted >= 30 for answer in got), [answer.num_accepted for answer in got]


def test_draft_kv_of_another_drafter_is_not_looked_at() -> None:
    """A prefix computed under ngram has no KV of the head: drafting goes on behind it, and the tokens are the same."""
    engine = make_engine(HASH_LM, lag=1, page_size=4, drafters={"ngram": lambda target: NGram(3), "eagle": hash_eagle(3, 3, 9)})
    answers: dict[str, Answer] = {}
    wanted = reference(HASH_LM, HASH_JOBS[:2], enable_prefix_caching=False)
    for number in range(4):
        engine.scheduler._chooser = Widest(engine.scheduler._shapes, ("ngram", "eagle")[number % 2])
        engine.add(HASH_JOBS[number // 2].request(f"r{number}"))
        drain(engine, answers)
    engine.close()
    assert_equal([answers[f"r{number}"] for number in range(4)], [wanted[0], wanted[0], wanted[1], wanted[1]], "mixed")
    assert answers["r1"].num_cached_tokens >= 36 and answers["r1"].num_drafted > 0


# -- what drafting costs --------------------------------------------------------------------------------------------------


@dataclass
class Counting:
    """A head that counts its passes, by how many tokens each has."""

    inner: HashHead
    passes: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def forward(self, tokens: Tensor, states: Tensor, attention: AttentionStep) -> Tensor:
        self.passes.append(len(tokens))
        return self.inner.forward(tokens, states, attention)


@pytest.mark.parametrize("topk, steps, draft_tokens", [(1, 3, 3), (3, 4, 8)])
def test_a_draft_of_n_levels_takes_n_passes_one_of_them_to_observe(topk: int, steps: int, draft_tokens: int) -> None:
    heads: list[Counting] = []

    def make(target: Target) -> Eagle:
        heads.append(Counting(HashHead(HASH_LM)))
        return Eagle(heads[-1], target, topk, steps, draft_tokens)

    engine = make_engine(HASH_LM, drafters={"eagle": make})
    engine.add(Job(STEM[:9], params(30)).request("one"))
    answers: dict[str, Answer] = {}
    collect(engine, answers)
    assert heads[0].passes == [9], "a prompt is looked at once"
    heads[0].passes.clear()
    collect(engine, answers)
    assert heads[0].passes == [topk] * (steps - 1) + [1 + steps]
    engine.close()


def test_no_draft_no_pass() -> None:
    """At width 0 nothing is proposed; what the target computed is looked at all the same, for the next draft."""
    heads: list[Counting] = []

    def make(target: Target) -> Eagle:
        heads.append(Counting(HashHead(HASH_LM)))
        return Eagle(heads[-1], target, 1, 3, 3)

    engine = make_engine(HASH_LM, drafters={"eagle": make}, chunk=1)  # a budget of one token: the row's own
    engine.add(Job(STEM[:3], params(9)).request("one"))
    answers: dict[str, Answer] = {}
    drain(engine, answers)
    engine.close()
    assert answers["one"].num_drafted == 0
    assert heads[0].passes == [1] * len(heads[0].passes) and len(heads[0].passes) in (11, 12)
