"""n-gram drafts: the longest suffix, the latest match, the end of what is known; a corpus; and no draft state anywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.engine.runner import Runner
from slipstream.errors import ConfigError
from slipstream.observe.guard import SyncGuard
from slipstream.relay import RelayPayload
from slipstream.speculate.base import Draft, StepContext
from slipstream.speculate.ngram import Corpus, NGram, corpus_ids
from slipstream.speculate.registry import Target, build_drafter
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.hash_lm import HashLM
from tests.cases.stage import Parrot, greedy, text_ids
from tests.engine.harness import Job, drain, make_engine, reference, run

TARGET = Target(HashLM(), page_size=16)
BYTES = Target(HashLM(vocab_size=259), page_size=16, tokenizer=ByteTokenizer())
COPY = text_ids("alpha beta gamma delta epsilon\n" * 8)


def context(rows: Sequence[Sequence[int]], context_len: int = 64, stale: int = -1) -> tuple[StepContext, RelayPayload]:
    """Rows whose last token is the root, in slots that are out of order; `stale` lies behind them."""
    history = torch.full((len(rows) + 3, context_len + 2), stale)
    slots = torch.arange(len(rows), 0, -1)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        history[slot, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) - 1 for row in rows])
    ctx = mock.Mock(slots=slots, lengths=lengths, history=history, max_lens=tuple(len(row) + 2 for row in rows))
    return ctx, RelayPayload(torch.tensor([row[-1] for row in rows]))


def proposed(drafter: NGram, rows: Sequence[Sequence[int]], width: int = 4, stale: int = -1) -> list[list[int]]:
    ctx, payload = context(rows, stale=stale)
    with SyncGuard():
        draft = drafter.propose(ctx, payload, width)
    assert draft.parents is None and draft.probs is None and draft.tokens.shape == (len(rows), width)
    return [tokens[:count] for tokens, count in zip(draft.tokens.tolist(), draft.num_nodes.tolist(), strict=True)]


def expected(tokens: Sequence[int], known: Sequence[int], width: int, min_n: int, max_n: int) -> list[int]:
    """The same with strings in mind: the longest suffix of `tokens` in `known`, its last place, and what follows there."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for end in range(len(known) - 1, n - 1, -1):
            if list(known[end - n : end]) == list(tokens[-n:]):
                return list(known[end : end + width])
    return []


def test_the_latest_match_of_the_longest_suffix_wins() -> None:
    drafter = NGram(4, 1, 4)
    assert proposed(drafter, [[1, 2, 3, 9, 9, 4, 3, 7, 1, 2, 3]]) == [[9, 9, 4, 3]]  # 1 2 3 is longer than the later 3
    assert proposed(drafter, [[2, 3, 5, 2, 3, 6, 2, 3]]) == [[6, 2, 3]]  # and ends where the known tokens end
    assert proposed(drafter, [[4, 4]]) == [[4]]
    assert proposed(drafter, [[1, 2, 3], [7], [5, 6, 5]]) == [[], [], [6, 5]]
    assert proposed(NGram(4, 2, 4), [[1, 9, 2, 9]]) == [[]]
    assert proposed(NGram(4, 1, 1), [[1, 2, 8, 2, 7, 1, 2]]) == [[7, 1, 2]]


@pytest.mark.parametrize("stale", [-1, 0, 1])
@pytest.mark.parametrize("min_n, max_n", [(1, 1), (1, 4), (2, 3), (3, 9)])
def test_every_row_against_a_search_by_hand(min_n: int, max_n: int, stale: int) -> None:
    """Few different tokens, rows of all lengths, and behind their ends what an earlier owner left."""
    rng = random.Random(max_n)
    drafter = NGram(5, min_n, max_n)
    found = 0
    for _ in range(60):
        rows = [[rng.randrange(rng.choice((2, 3, 6))) for _ in range(rng.randint(1, 40))] for _ in range(rng.randint(1, 7))]
        width = rng.randint(1, 5)
        wanted = [expected(row, row, width, min_n, max_n) for row in rows]
        assert proposed(drafter, rows, width, stale) == wanted, (rows, width)
        found += sum(map(bool, wanted))
    assert found > 50


def test_a_width_of_zero_costs_nothing() -> None:
    ctx, payload = context([[1, 1], [2, 3]])
    draft = NGram().propose(ctx, payload, 0)
    assert draft.tokens.shape == (2, 0) and draft.num_nodes.tolist() == [0, 0]


def test_only_known_columns_of_the_history_are_read() -> None:
    """The work follows the longest row of the step, not the context."""
    ctx, payload = context([[1, 2, 1], [1]], context_len=1000)
    seen: list[tuple[int, ...]] = []
    original = Tensor.index_select

    def spy(self: Tensor, dim: int, index: Tensor) -> Tensor:
        out = original(self, dim, index)
        seen.append(tuple(out.shape))
        return out

    with mock.patch.object(Tensor, "index_select", spy):
        NGram().propose(ctx, payload, 2)
    assert seen == [(2, 6)]  # the longest row may have its root at position 5


# -- corpus -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_n, max_n", [(1, 1), (1, 4), (2, 5)])
def test_the_corpus_is_searched_where_the_row_itself_has_no_match(min_n: int, max_n: int) -> None:
    rng = random.Random(max_n)
    from_corpus = 0
    for _ in range(20):
        known = [rng.randrange(9) for _ in range(rng.randint(2, 60))]
        drafter = NGram(4, min_n, max_n, Corpus(torch.tensor(known), max_n))
        rows = [[rng.randrange(9) for _ in range(rng.randint(1, 7))] for _ in range(8)]
        wanted = []
        for row in rows:
            own, other = expected(row, row, 4, min_n, max_n), expected(row, known, 4, min_n, max_n)
            wanted.append(own or other)
            from_corpus += bool(other and not own)
        assert proposed(drafter, rows) == wanted, (known, rows)
    assert from_corpus > 20


def test_a_corpus_file(tmp_path: Path) -> None:
    text, ids = tmp_path / "corpus.txt", tmp_path / "corpus.json"
    text.write_text("to be, or not to be")
    ids.write_text("[5, 6, 7, 8]")
    assert corpus_ids(text, BYTES) == list(b"to be, or not to be")
    assert corpus_ids(ids, TARGET) == [5, 6, 7, 8]
    _, drafter = build_drafter(f"ngram:width=2,corpus={ids}", TARGET)
    assert isinstance(drafter, NGram) and proposed(drafter, [[1, 5], [8]], width=2) == [[6, 7], []]


@pytest.mark.parametrize("content, must", [
    ("{", "must be readable"), ('{"a": 1}', "must hold a list of token ids"), ("[1, true]", "must hold a list of token ids"),
    ("[" * 100_000 + "]" * 100_000, "must be readable"),
    ("[1]", "at least 2 token ids from 0 to 63"), ("[1, 64]", "from 0 to 63"), ("[-1, 3]", "from 0 to 63"),
])  # fmt: skip
def test_a_corpus_that_cannot_be_one_is_refused(content: str, must: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=must):
        build_drafter(f"ngram:corpus={path}", TARGET)


def test_text_needs_a_tokenizer_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    with pytest.raises(ConfigError, match="must be readable"):
        build_drafter(f"ngram:corpus={path}", TARGET)
    path.write_text("a b")
    with pytest.raises(ConfigError, match=r"\.json list of token ids where there is no tokenizer"):
        build_drafter(f"ngram:corpus={path}", TARGET)


@pytest.mark.parametrize("spec, must", [
    ("ngram:width=0", "width of --speculate ngram must be an integer from 1 to 64"), ("ngram:width=x", "but got 'x'"),
    ("ngram:min_n=3,max_n=2", "min_n .* from 1 to 2"), ("ngram:max_n=17", "from 1 to 16"),
    ("ngram:n=3", "options of width, min_n, max_n, corpus, but got 'n'"),
])  # fmt: skip
def test_wrong_options_are_refused(spec: str, must: str) -> None:
    with pytest.raises(ConfigError, match=must):
        build_drafter(spec, TARGET)


# -- in the engine ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_a_text_that_repeats_is_drafted_from_itself(lag: int) -> None:
    """Most of a copy's tokens come from drafts, from the first step on: the root is part of the suffix."""
    model = Parrot(HashLM(vocab_size=259, context_len=512), (COPY * 3)[:512])
    jobs = [Job(COPY[:70], greedy(60)), Job(COPY[:100], greedy(60, seed=None, temperature=1.0), seed=3)]
    got = run(model, jobs, lag=lag, eos=(), drafters={"ngram": lambda target: NGram(7)})
    assert [answer.token_ids for answer in got] == [list(COPY[70:130]), list(COPY[100:160])]
    assert [answer.token_ids for answer in reference(model, jobs, eos=())] == [answer.token_ids for answer in got]
    assert all(answer.num_accepted >= 0.8 * 60 for answer in got)


def test_a_corpus_is_drafted_from_in_the_engine(tmp_path: Path) -> None:
    """An answer that stands in the corpus and nowhere in the prompt."""
    script = random.Random(0).sample(range(60), 40)
    model = Parrot(HashLM(vocab_size=64, context_len=128), [*range(60, 64), *script, *[0] * 84])
    path = tmp_path / "c.json"
    path.write_text(json.dumps(script))
    accepted = {}
    for spec in ("ngram:max_n=3", f"ngram:max_n=3,corpus={path}"):
        (got,) = run(model, [Job((60, 61, 62, 63), greedy(38))], eos=(), drafters={"n": lambda t, s=spec: build_drafter(s, t)[1]})
        assert got.token_ids == script[:38]
        accepted[spec] = got.num_accepted
    assert accepted["ngram:max_n=3"] == 0 and accepted[f"ngram:max_n=3,corpus={path}"] > 25


@pytest.mark.parametrize("lag", [0, 1])
def test_its_steps_carry_a_bonus_only_payload_and_touch_no_draft_buffer(lag: int) -> None:
    """With a stop, EOS and a limit inside runs; checked on the buffers."""
    model = Parrot(HashLM(vocab_size=259, context_len=512, eos_token_ids=(3,)), (*COPY[:150], 3, *COPY, *COPY)[:400])
    jobs = [Job(COPY[:70], greedy(60)), Job(COPY[:90], greedy(200)), Job(COPY[:80], greedy(99, stop=("beta",)))]
    payloads: list[RelayPayload] = []
    engine = make_engine(model, lag=lag, eos=(3,), drafters={"ngram": lambda target: NGram(7)})
    runner = engine._executor._device
    assert isinstance(runner, Runner)
    original = runner.relay.stash
    runner.relay.stash = lambda rows, payload, drafter: (payloads.append(payload), original(rows, payload, drafter))
    drafts: list[Draft] = []
    propose = NGram.propose

    def spy(self: NGram, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        assert not payload.extras()
        drafts.append(propose(self, ctx, payload, width))
        return drafts[-1]

    answers: dict = {}
    try:
        with mock.patch.object(NGram, "propose", spy):
            for number, job in enumerate(jobs):
                engine.add(job.request(f"r{number}"))
            drain(engine, answers)
        assert runner.relay.allocated() == ()
    finally:
        engine.close()
    assert payloads and all(not payload.extras() for payload in payloads)
    assert sum(int(draft.num_nodes.sum()) for draft in drafts) > 30
    got = [answers[f"r{number}"] for number in range(3)]
    assert [a.key() for a in got] == [a.key() for a in reference(model, jobs)]
    assert [a.finish_reason for a in got] == ["length", "stop", "stop"] and got[1].token_ids[-1] == 3
