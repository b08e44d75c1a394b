"""Grammars: what a matcher is, which kinds exist, and the mask worker that alone owns the matchers of running requests.

    open(row) ─► [ commit(tokens) ─► masks(draft) ]*  ─► close(row)          strictly in this order, one FIFO

A step's masks are worked out from the matcher's state behind the committed tokens, down the row's draft and back. Forward and
mask worker run side by side; only `verify` waits for both. Torch and the device are not known here.

Nothing a matcher does can stop the engine: one that raises, or that rejects a token that was committed, makes its own row broken.
A broken row's nodes get masks that allow everything, and the next commit reports the error, which ends that request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidParameter, InvariantBroken, SlipstreamError

IntArray = NDArray[np.int64]
BitArray = NDArray[np.int32]
RowKey = tuple[int, int]  # slot, epoch
ALLOW_ALL = -1  # a word of ones
NOT_CLOSED = -1

_Result = TypeVar("_Result")


class Matcher(Protocol):
    """Follows one answer through a grammar, token by token."""

    @property
    def is_closed(self) -> bool:
        """Whether the last accepted token ended the answer; nothing is accepted any more."""
        ...

    def accept(self, token: int) -> bool:
        """Take a token. False, and nothing changed, if the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        ...

    def fill(self, bits: BitArray) -> None:
        """Set bit b of word w of bits [ceil(vocab / 32)] if token 32 * w + b may come next. `bits` is all zeros."""
        ...


MatcherFactory = Callable[[str, int], Matcher]
"""Compiles (source, vocab_size); raises `InvalidParameter` where the source is no grammar of its kind."""

_FACTORIES: dict[str, MatcherFactory] = {}


def register_grammar(kind: str, factory: MatcherFactory) -> None:
    """Make a kind of grammar known. A kind has one factory."""
    if _FACTORIES.setdefault(kind, factory) != factory:
        raise InvariantBroken(f"a grammar kind must have one factory, but got a second one for {kind!r}")


def grammar_kinds() -> tuple[str, ...]:
    """The kinds that requests may name, sorted."""
    return tuple(sorted(_FACTORIES))


def compile_grammar(grammar: tuple[str, str], vocab_size: int) -> Matcher:
    """A fresh matcher of (kind, source). Raises `InvalidParameter` for an unknown kind or a source that does not compile."""
    kind, source = grammar
    if kind not in _FACTORIES:
        raise InvalidParameter("grammar", f"be of one of the kinds {list(grammar_kinds())}", kind)
    return _FACTORIES[kind](source, vocab_size)


@dataclass(frozen=True, slots=True)
class HostMasks:
    """What grammars allow at M nodes: nodes [M] int64, index into the step's nodes; bits [M, ceil(vocab / 32)] int32."""

    nodes: IntArray
    bits: BitArray


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of committed rows.

    Attributes:
        ends: for each row, tokens of this commit up to and with the one that closed its grammar; -1: not closed by this commit.
        errors: row -> what went wrong with its matcher. Reported at each commit from then on.
    """

    ends: list[int]
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    """A row's matcher, or why it has none."""

    matcher: Matcher | None
    error: str | None = None


class MaskWorker:
    """Owns the matchers of running rows, keyed by (slot, epoch). One thread, first in first out.

    Args:
        vocab_size: columns of the logits.
        inline: do the work in the caller's thread, before returning; for tests and tracing.
    """

    def __init__(self, vocab_size: int, inline: bool = False) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._rows: dict[RowKey, _Row] = {}
        self._pool = None if inline else ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def open(self, slot: int, epoch: int, grammar: tuple[str, str], output_tokens: Sequence[int] = ()) -> Future[None]:
        """Start a row; `output_tokens` are those it has generated before (a resumed request)."""
        tokens = [int(token) for token in output_tokens]
        return self._submit(lambda: self._open((slot, epoch), grammar, tokens))

    def close(self, slot: int, epoch: int) -> Future[None]:
        """Forget a row. One that was never opened is not an error: retired rows need not have a grammar."""
        return self._submit(lambda: self._close((slot, epoch)))

    def commit(self, rows: Sequence[RowKey], tokens: IntArray, accept_lens: IntArray) -> Future[Committed]:
        """Advance matchers by what a step committed: tokens [R, D + 1], of which accept_lens [R] count."""
        return self._submit(lambda: self._commit(rows, tokens, accept_lens))

    def masks(
        self, rows: Sequence[RowKey], tokens: IntArray, parents: IntArray | None, num_nodes: IntArray, node_index: IntArray
    ) -> Future[HostMasks]:
        """Work out the masks of a step's constrained rows, at their roots and at all their draft nodes.

        Args:
            rows: R rows.
            tokens: [R, W] drafted tokens, of node j + 1; W may be 0.
            parents: [R, W] parent of node j + 1, at most j (0 is the root). None: chains.
            num_nodes: [R] draft nodes that count.
            node_index: [R, W + 1] each row's nodes, root first, as index into the step's nodes.
        """
        return self._submit(lambda: self._masks(rows, tokens, parents, num_nodes, node_index))

    def shutdown(self) -> None:
        """Finish what was asked for and stop the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    # -- on the worker ----------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[_Result] = Future()
        try:
            done.set_result(work())
        except SlipstreamError as error:
            done.set_exception(error)
        return done

    def _row(self, key: RowKey) -> _Row:
        if key not in self._rows:
            raise InvariantBroken(f"a constrained row must be opened before use, but slot {key[0]}, epoch {key[1]} was not")
        return self._rows[key]

    def _open(self, key: RowKey, grammar: tuple[str, str], tokens: list[int]) -> None:
        reopened = key in self._rows
        row = self._rows[key] = _Row(None)
        if reopened:  # nobody waits for this future, so the row itself has to tell
            row.error = f"a constrained row must be opened once, but slot {key[0]}, epoch {key[1]} was open"
            return
        with _blame(row):
            row.matcher = compile_grammar(grammar, self._vocab_size)
        self._advance(row, tokens)

    def _close(self, key: RowKey) -> None:
        self._rows.pop(key, None)

    def _commit(self, keys: Sequence[RowKey], tokens: IntArray, accept_lens: IntArray) -> Committed:
        ends: list[int] = []
        errors: dict[int, str] = {}
        for i, key in enumerate(keys):
            row = self._row(key)
            ends.append(self._advance(row, tokens[i, : accept_lens[i]].tolist()))
            if row.error is not None:
                errors[i] = row.error
        return Committed(ends, errors)

    def _advance(self, row: _Row, tokens: list[int]) -> int:
        """Accept tokens; where the grammar closed, what follows is cut off anyway."""
        with _blame(row):
            if row.matcher is None or row.matcher.is_closed:
                return NOT_CLOSED
            for place, token in enumerate(tokens):
                if not row.matcher.accept(token):
                    row.error = f"the grammar must allow every token of the answer, but does not allow token {token}"
                    row.matcher = None
                    return NOT_CLOSED
                if row.matcher.is_closed:
                    return place + 1
        return NOT_CLOSED

    def _masks(
        self, keys: Sequence[RowKey], tokens: IntArray, parents: IntArray | None, num_nodes: IntArray, node_index: IntArray
    ) -> HostMasks:
        nodes = np.concatenate([node_index[i, : num_nodes[i] + 1] for i in range(len(keys))] or [np.zeros(0, dtype=np.int64)])
        bits = np.zeros((len(nodes), self._num_words), dtype=np.int32)
        first = 0
        for i, key in enumerate(keys):
            count = int(num_nodes[i])
            own = bits[first : first + count + 1]
            first += count + 1
            row = self._row(key)
            with _blame(row):
                if row.matcher is None:
                    own[:] = ALLOW_ALL
                    continue
                chain = range(count)
                above = list(chain) if parents is None else parents[i, :count].tolist()
                _fill_tree(row.matcher, own, tokens[i, :count].tolist(), above, self._vocab_size)
            if row.error is not None:
                own[:] = ALLOW_ALL
        return HostMasks(nodes.astype(np.int64, copy=False), bits)


def _fill_tree(matcher: Matcher, bits: BitArray, tokens: list[int], parents: list[int], vocab_size: int) -> None:
    """Masks of the root (row 0 of bits) and of the nodes below it; the matcher ends where it began.

    A node whose token its parent's mask forbids, and all below it, are never accepted, and behind the token that closes the
    grammar everything is cut off: these allow everything. Ids that do not exist, which a drafter may make up, are forbidden
    anyway; no matcher gets to see one.
    """
    children: list[list[int]] = [[] for _ in bits]
    for place, parent in enumerate(parents):
        children[parent].append(place + 1)
    reached = np.zeros(len(bits), dtype=np.bool_)

    def enter(node: int) -> Iterator[int]:
        reached[node] = True
        if matcher.is_closed:
            bits[node] = ALLOW_ALL
            return iter(())
        matcher.fill(bits[node])
        return iter(children[node])

    # Depth first, without recursion: a draft may be deeper than Python's stack likes.
    path = [enter(0)]
    while path:
        child = next(path[-1], None)
        if child is None:
            path.pop()
            if path:
                matcher.rollback(1)
        elif 0 <= tokens[child - 1] < vocab_size and matcher.accept(tokens[child - 1]):
            path.append(enter(child))
    bits[~reached] = ALLOW_ALL


class _blame:  # noqa: N801 - reads as a statement
    """Whatever goes wrong inside is this row's fault: it loses its matcher and keeps the reason. Bugs of ours pass through."""

    def __init__(self, row: _Row) -> None:
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, InvariantBroken):
            return False
        self._row.error = f"the grammar failed: {error}" if str(error) else f"the grammar failed: {type(error).__name__}"
        self._row.matcher = None
        return True
