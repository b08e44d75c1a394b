"""What the scheduler sends to the device and what comes back. Frozen, small, no torch.

    scheduler ── StepPlan ──► executor ── StepResult ──► settle

A plan decides everything: who runs, how many prompt tokens, how many nodes, which pages. No rank and no kernel decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.types import EngineRequest

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Admit:
    """A slot gets an owner.

    Attributes:
        slot, epoch: the row.
        request: parameters, seed and prompt of the owner.
        tokens: int64, the whole history: prompt, plus generated tokens on resume.
        prompt_len: the original prompt's length; penalties and min_tokens count what comes after it.
        computed_len: tokens whose KV the pages already hold (a cached prefix).
        draft_from: position from which on its drafter's KV is there too; a draft attends only from there on.
        limit: most tokens, prompt and output, the row may ever have: min(prompt_len + max_tokens, context).
    """

    slot: int
    epoch: int
    request: EngineRequest
    tokens: IntArray
    prompt_len: int
    computed_len: int
    draft_from: int
    limit: int


@dataclass(frozen=True, slots=True)
class Retire:
    """A slot lost its owner (finished, aborted or retracted); its unread stash is legal."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PageDelta:
    """Pages of a slot's page table, from entry `start` on: appended, or in place of pages that hold the same."""

    slot: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of prompt tokens [start, start + num_tokens) of one slot, watched by a drafter; a last chunk samples the next token.

    `num_prompt_logprobs`: None, or how many of the most likely tokens to list at each of its positions whose next token is of
    the prompt: at all of them, but for the last position of a last chunk.
    """

    slot: int
    epoch: int
    observer: str
    start: int
    num_tokens: int
    is_last: bool
    num_prompt_logprobs: int | None = None

    @property
    def num_scored(self) -> int:
        """Positions whose next token's logprob is wanted: the first ones of the chunk."""
        return 0 if self.num_prompt_logprobs is None else self.num_tokens - self.is_last

    @property
    def num_nodes(self) -> int:
        """Draft nodes: none. Behind a last chunk only the root, its last token, is sampled."""
        return 0

    @property
    def max_len(self) -> int:
        """Position of its last token, which is the root if it samples."""
        return self.start + self.num_tokens - 1


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """A decoding row: its root (the bonus token) plus `num_nodes` drafted nodes.

    Attributes:
        relayed_by: who watched its last step; that payload is found.
        drafter: who proposes: that one, or a drafter without state.
        observer: who watches this step.
        max_len: the scheduler's upper bound of the committed length at the start of this step, which is the root's position.
    """

    slot: int
    epoch: int
    relayed_by: str
    drafter: str
    observer: str
    num_nodes: int
    max_len: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Committed tokens [start, start + num_tokens) of a slot that a drafter's own KV lacks and gets once the step is decided.

    The last of them may not have been reached yet: the device fills as far as the row has come.
    """

    slot: int
    epoch: int
    drafter: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows that sample are, in this order, the last chunks and then `rows`.

    Applied in this order: retires, admits, page_deltas, page_saves (pairs page, host page), page_loads (pairs host page, page),
    page_copies (pairs of pages: source, target), then the forward pass.
    """

    step: int
    retires: tuple[Retire, ...] = ()
    admits: tuple[Admit, ...] = ()
    page_deltas: tuple[PageDelta, ...] = ()
    page_saves: tuple[tuple[int, int], ...] = ()
    page_loads: tuple[tuple[int, int], ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[VerifyRow, ...] = ()
    fills: tuple[Fill, ...] = ()

    @property
    def parts(self) -> tuple[Chunk | VerifyRow, ...]:
        """All rows of the step, chunks first."""
        return self.chunks + self.rows

    @property
    def verify_width(self) -> int:
        """Nodes of the widest verify row, root not counted."""
        return max((row.num_nodes for row in self.rows), default=0)

    @property
    def sampled(self) -> tuple[Chunk | VerifyRow, ...]:
        """The rows that sample, in the order of `StepResult`."""
        return tuple(chunk for chunk in self.chunks if chunk.is_last) + self.rows

    @property
    def num_tokens(self) -> int:
        """Tokens the target computes in this step."""
        return sum(chunk.num_tokens for chunk in self.chunks) + sum(1 + row.num_nodes for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Logprobs of the rows that asked for them.

    Attributes:
        rows: index into the result's rows -> index into the arrays below.
        chosen, ranks: [L, depth + 1] float32, int64. top_ids, top_logprobs: [L, depth + 1, k], best first.
    """

    rows: dict[int, int]
    chosen: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class ChunkLogprobs:
    """Logprobs of the prompt tokens behind the first n positions of a chunk (`Chunk.num_scored`).

    Attributes:
        tokens, chosen, ranks: [n] int64, float32, int64. top_ids, top_logprobs: [n, k], best first.
    """

    tokens: IntArray
    chosen: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step committed, on the host. One contract for plain and speculative decoding.

    Attributes:
        step: the plan's number.
        tokens: [rows, depth + 1] int64, -1 behind the committed ones.
        accept_lens: [rows] int64, 0 to depth + 1, bonus counted.
        num_drafted: [rows] int64, nodes that were verified: of those planned, as many as the drafter had.
        non_finite: [rows] int64, index of the first committed token that came from logits that are not finite; -1: none.
        grammar_ends: [rows] int64, committed tokens up to and with the one that closed the row's grammar; -1: not closed.
        grammar_errors: row -> what went wrong with its grammar.
        logprobs: None when no row asked.
        device_s: seconds the device step took. propose_s, observe_s: of them, those in each drafter.
        prompt_logprobs: place in the plan's chunks -> logprobs, for those that asked.
    """

    step: int
    tokens: IntArray
    accept_lens: IntArray
    num_drafted: IntArray
    non_finite: IntArray
    grammar_ends: IntArray
    grammar_errors: dict[int, str]
    logprobs: StepLogprobs | None
    device_s: float
    propose_s: Mapping[str, float] = field(default_factory=dict)
    observe_s: Mapping[str, float] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, ChunkLogprobs] = field(default_factory=dict)
