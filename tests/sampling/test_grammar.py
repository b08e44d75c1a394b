"""The mask worker, with the toy grammar and with matchers that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidParameter, InvariantBroken
from slipstream.sampling.grammar import MaskWorker, compile_grammar, grammar_kinds, register_grammar
from slipstream.testing.toy_grammar import DigitsMatcher

VOCAB = 70  # more than two words, the last one in part
DIGITS = set(range(30, 40))
END = 65
GRAMMAR = ("digits", "30-39:65")
EVERYTHING = set(range(VOCAB))


@pytest.fixture(params=[True, False], ids=["inline", "thread"])
def worker(request: pytest.FixtureRequest) -> Iterator[MaskWorker]:
    worker = MaskWorker(VOCAB, inline=request.param)
    yield worker
    worker.shutdown()


def allowed(bits: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if bits[token // 32].item() >> (token % 32) & 1}


def masks_of(worker: MaskWorker, key: tuple[int, int], draft: list[int], parents: list[int] | None = None) -> list[set[int]]:
    """What the grammar allows at the root and at each node of one row."""
    tokens = np.array([draft], dtype=np.int64).reshape(1, -1)
    above = None if parents is None else np.array([parents], dtype=np.int64).reshape(1, -1)
    index = np.arange(10, 11 + len(draft))[None]
    masks = worker.masks([key], tokens, above, np.array([len(draft)]), index).result()
    assert masks.nodes.tolist() == index[0].tolist() and masks.bits.dtype == np.int32
    return [allowed(row) for row in masks.bits]


def commit(worker: MaskWorker, key: tuple[int, int], tokens: list[int]) -> tuple[int, str | None]:
    padded = np.array([[*tokens, -1, -1]], dtype=np.int64)
    done = worker.commit([key], padded, np.array([len(tokens)])).result()
    return done.ends[0], done.errors.get(0)


def after(tokens: list[int]) -> set[int]:
    """The toy grammar once more: what may follow these tokens; everything where the answer is over or was never possible."""
    for place, token in enumerate(tokens):
        if token == END and place > 0:
            return EVERYTHING
        if token not in DIGITS:
            return EVERYTHING
    return DIGITS | ({END} if tokens else set())


def test_a_chain(worker: MaskWorker) -> None:
    worker.open(1, 7, GRAMMAR)
    assert masks_of(worker, (1, 7), [30, 39, END, 31]) == [DIGITS, DIGITS | {END}, DIGITS | {END}, EVERYTHING, EVERYTHING]
    assert masks_of(worker, (1, 7), [5, 30]) == [DIGITS, EVERYTHING, EVERYTHING]
    assert masks_of(worker, (1, 7), []) == [DIGITS]


def test_a_commit_moves_the_row_on_and_says_where_it_closed(worker: MaskWorker) -> None:
    worker.open(1, 7, GRAMMAR)
    assert commit(worker, (1, 7), []) == (-1, None)
    assert commit(worker, (1, 7), [30, 31]) == (-1, None)
    assert masks_of(worker, (1, 7), []) == [DIGITS | {END}]
    assert commit(worker, (1, 7), [32, END, 4]) == (2, None)
    # The row rides the step that was already on its way; what that commits is dropped.
    assert masks_of(worker, (1, 7), [30]) == [EVERYTHING, EVERYTHING]
    assert commit(worker, (1, 7), [1, 2]) == (-1, None)


def test_a_row_is_rebuilt_from_its_history(worker: MaskWorker) -> None:
    worker.open(1, 7, GRAMMAR, (30, 31))
    assert masks_of(worker, (1, 7), []) == [DIGITS | {END}]
    assert commit(worker, (1, 7), [END]) == (1, None)


@given(st.data())
def test_any_tree(data: st.DataObject) -> None:
    """Each node's mask is that of its own path, and the matcher comes back to the root."""
    token = st.sampled_from((30, 35, END, 5))
    draft = data.draw(st.lists(token, max_size=8))
    parents = [data.draw(st.integers(0, j)) for j in range(len(draft))]
    output = data.draw(st.lists(st.sampled_from((30, 31)), max_size=3))
    worker = MaskWorker(VOCAB, inline=True)
    worker.open(1, 1, GRAMMAR, output)
    paths: list[list[int]] = [output]
    for token_id, parent in zip(draft, parents, strict=True):
        paths.append([*paths[parent], token_id])
    wanted = [after(path) for path in paths]
    for _ in range(2):
        assert masks_of(worker, (1, 1), draft, parents) == wanted


def test_rows_are_kept_apart_by_slot_and_epoch(worker: MaskWorker) -> None:
    worker.open(1, 1, GRAMMAR)
    worker.open(2, 1, GRAMMAR, (30,))
    worker.close(1, 1)
    worker.open(1, 2, GRAMMAR, (31,))
    worker.open(3, 1, GRAMMAR)
    index = np.array([[4, 5, 6], [0, 1, 2], [7, 8, 9]])
    tokens = np.array([[30, 31], [END, 0], [0, 0]])
    masks = worker.masks([(1, 2), (2, 1), (3, 1)], tokens, None, np.array([2, 1, 0]), index).result()
    assert masks.nodes.tolist() == [4, 5, 6, 0, 1, 7]
    both = DIGITS | {END}
    assert [allowed(row) for row in masks.bits] == [both, both, both, both, EVERYTHING, DIGITS]
    done = worker.commit([(2, 1), (1, 2)], np.array([[END, 1], [30, END]]), np.array([1, 2])).result()
    assert done.ends == [1, 2] and not done.errors


def test_no_rows(worker: MaskWorker) -> None:
    empty = np.zeros((0, 1), dtype=np.int64)
    masks = worker.masks([], empty[:, :0], None, empty[:, 0], empty).result()
    assert masks.nodes.shape == (0,) and masks.bits.shape == (0, 3)
    assert worker.commit([], empty, empty[:, 0]).result().ends == []


def test_a_rejected_commit_is_that_rows_error_and_nobody_elses(worker: MaskWorker) -> None:
    worker.open(1, 1, GRAMMAR)
    worker.open(2, 1, GRAMMAR)
    done = worker.commit([(1, 1), (2, 1)], np.array([[30, 5], [30, END]]), np.array([2, 2])).result()
    assert done.ends == [-1, 2] and list(done.errors) == [0] and "token 5" in done.errors[0]
    assert masks_of(worker, (1, 1), [30]) == [EVERYTHING, EVERYTHING]
    assert "token 5" in str(commit(worker, (1, 1), [30])[1])


@pytest.mark.parametrize("grammar", [("digits", "nonsense"), ("no such kind", "")])
def test_a_grammar_that_does_not_compile_is_reported_at_the_first_commit(worker: MaskWorker, grammar: tuple[str, str]) -> None:
    worker.open(1, 1, grammar)
    assert masks_of(worker, (1, 1), [30]) == [EVERYTHING, EVERYTHING]
    ends, error = commit(worker, (1, 1), [30])
    assert ends == -1 and error is not None and "but got" in error


def test_a_history_the_grammar_rejects_is_reported(worker: MaskWorker) -> None:
    worker.open(1, 1, GRAMMAR, (5,))
    assert "token 5" in str(commit(worker, (1, 1), [30])[1])


class Explosive(DigitsMatcher):
    """Raises in the method its source names."""

    def __init__(self, where: str) -> None:
        super().__init__(30, 39, END)
        self._where = where

    def _maybe(self, where: str) -> None:
        if where == self._where:
            raise ZeroDivisionError("boom")

    def accept(self, token: int) -> bool:
        self._maybe("accept")
        return super().accept(token)

    def rollback(self, count: int) -> None:
        self._maybe("rollback")
        super().rollback(count)

    def fill(self, bits: np.ndarray) -> None:
        bits[0] = 1
        self._maybe("fill")
        super().fill(bits)


register_grammar("explosive", lambda where, vocab_size: Explosive(where))


@pytest.mark.parametrize("where", ["accept", "rollback", "fill"])
def test_a_matcher_that_raises_breaks_its_own_row_only(worker: MaskWorker, where: str) -> None:
    worker.open(1, 1, ("explosive", where))
    worker.open(2, 1, GRAMMAR)
    index = np.array([[0, 1], [2, 3]])
    masks = worker.masks([(1, 1), (2, 1)], np.array([[30], [30]]), None, np.array([1, 1]), index).result()
    assert [allowed(row) for row in masks.bits] == [EVERYTHING, EVERYTHING, DIGITS, DIGITS | {END}]
    done = worker.commit([(1, 1), (2, 1)], np.array([[30], [30]]), np.array([1, 1])).result()
    assert "boom" in done.errors[0] and 1 not in done.errors


def test_bugs_of_ours_are_not_blamed_on_a_row(worker: MaskWorker) -> None:
    with pytest.raises(InvariantBroken, match="opened before use"):
        masks_of(worker, (1, 1), [])
    with pytest.raises(InvariantBroken, match="opened before use"):
        commit(worker, (1, 1), [])
    worker.close(1, 1).result()
    worker.open(1, 1, GRAMMAR)
    worker.open(1, 1, GRAMMAR)
    assert "opened once" in str(commit(worker, (1, 1), [30])[1])


def test_work_is_done_in_order_on_one_thread_of_its_own() -> None:
    """A commit that was asked for while an earlier one is stuck waits for it, and so does a shutdown."""
    gate = threading.Event()
    seen: list[tuple[str, str]] = []

    class Slow(DigitsMatcher):
        def accept(self, token: int) -> bool:
            gate.wait(10)
            seen.append((threading.current_thread().name, str(token)))
            return super().accept(token)

    register_grammar("slow", lambda source, vocab_size: Slow(30, 39, END))
    worker = MaskWorker(VOCAB)
    worker.open(1, 1, ("slow", ""))
    first = worker.commit([(1, 1)], np.array([[30]]), np.array([1]))
    second = worker.commit([(1, 1)], np.array([[31]]), np.array([1]))
    masks = worker.masks([(1, 1)], np.zeros((1, 0), dtype=np.int64), None, np.array([0]), np.array([[0]]))
    assert not first.done() and not second.done() and not masks.done()
    gate.set()
    assert allowed(masks.result(10).bits[0]) == DIGITS | {END}
    worker.shutdown()
    assert [token for _, token in seen] == ["30", "31"]
    assert {name.split("_")[0] for name, _ in seen} == {"grammar"}


def test_the_registry() -> None:
    assert "digits" in grammar_kinds()
    register_grammar("digits", DigitsMatcher.compile)
    with pytest.raises(InvariantBroken, match="'digits'"):
        register_grammar("digits", lambda source, vocab_size: Explosive(""))
    with pytest.raises(InvalidParameter, match="'xml'"):
        compile_grammar(("xml", ""), VOCAB)


@pytest.mark.parametrize("source", ["", "1-2", "1-2:", "5-2:9", "1-70:3", "1-2:70", "1-5:3", "a-b:c", "1-2:3 ", "-1-2:3"])
def test_bad_toy_grammars_are_refused(source: str) -> None:
    with pytest.raises(InvalidParameter, match="grammar must read"):
        compile_grammar(("digits", source), VOCAB)
