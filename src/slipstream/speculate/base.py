"""Words of drafting: what a drafter sees (StepContext), proposes (Draft) and learns (Verdict). Plain decoding is `off`.

A drafter declares what it relays, how deep it proposes and what it writes; the engine obeys and never asks which one it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.attention.kv import KVCache, LayerKV
from slipstream.relay import DraftInput, RelayPayload, RelaySpec
from slipstream.sampling.state import RowSampling

__all__ = ["ChunkTokens", "Draft", "DraftInput", "Drafter", "StepContext", "Verdict"]


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """Prompt chunks of a step, for `observe`: every token the target computed, each with the one that follows it.

    For a drafter that catches up, runs of tokens that its own KV lacks come behind them, in the same form. Such a run may end
    behind the row's committed length: what lies there means nothing, and is written again before it is read.

    Attributes:
        slots: [C] int64. starts: [C] int64, position of each chunk's first token. lens: tokens a chunk (host).
        tokens: [T_c] int64, flat. next_tokens: [T_c] int64: the token after each (the sampled one behind a last chunk).
        is_last: per chunk (host): it sampled, and its row is one of the verdict's.
        ends: position behind each chunk's last token (host).
        page_tables: [C, max_pages] int64. draft_from: [C] int64, as in `StepContext`.
    """

    slots: Tensor
    starts: Tensor
    lens: tuple[int, ...]
    tokens: Tensor
    next_tokens: Tensor
    is_last: tuple[bool, ...]
    ends: tuple[int, ...]
    page_tables: Tensor
    draft_from: Tensor


@dataclass(frozen=True, slots=True)
class StepContext:
    """The frozen device view of a step: the rows one drafter drafts for.

    In `propose` the rows are the step's verify rows; in `observe` the rows that sampled: last chunks first, then the verify rows.

    Attributes:
        slots, epochs: [R] int64.
        lengths: [R] int64, committed length: tokens whose KV exists = position of the root (the bonus token).
        limits: [R] int64, most tokens (prompt and output) the row may ever have.
        max_lens: upper bounds of `lengths` (host).
        num_nodes: nodes planned for each row (host); 0 for a last chunk. In `observe`, `taps` holds the chunk tokens and then,
            for each verify row, its root and its planned nodes.
        page_tables: [R, max_pages] int64.
        history: [num_slots, context + 2] int64; row `slots[i]` is valid up to position lengths[i] (the root included).
        sampling: the rows' sampling parameters; scores and noise come from sampling/sampler.py.
        kv: the target's KV cache (a drafter may have its own beside it, `Drafter.kv`, over the same pages).
        draft_from: [R] int64, first position from which the drafter's own KV is whole.
        chunks: prompt chunks of this step; None in `propose`.
    """

    slots: Tensor
    epochs: Tensor
    lengths: Tensor
    limits: Tensor
    max_lens: tuple[int, ...]
    num_nodes: tuple[int, ...]
    page_tables: Tensor
    history: Tensor
    sampling: RowSampling
    kv: KVCache
    draft_from: Tensor
    chunks: ChunkTokens | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be verified: W nodes a row, in an order where parents come before children. Node 0 is the root.

    Attributes:
        tokens: [R, W] int64, token of node j + 1. W may be 0.
        parents: [R, W] int64, parent node of node j + 1 (0 is the root), at most j. None: a chain.
        num_nodes: [R] int64, nodes that count; the rest is padding.
        probs: [R, W, vocab] float32, the q that node j + 1 was drawn from, given the path to it; all of it on the node's token
            where that was certain. Rows that draw at random are chains. None: every node was certain.
    """

    tokens: Tensor
    num_nodes: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step decided for each row that sampled. D is the deepest path of the step's drafts.

    Attributes:
        tokens: [R, D + 1] int64, committed tokens, -1 behind them.
        accept_lens: [R] int64, tokens committed, bonus included: 0 (at its limit) to D + 1.
        path: [R, D + 1] int64, node at each depth of the accepted path (0, the root, first; 0 behind its end). The KV of
            path[:, i], i < accept_lens, is what the row keeps.
        bonus_tokens: [R] int64, the last committed token; the root itself where nothing was committed.
        new_lengths: [R] int64, committed length after this step = lengths + accept_lens.
        non_finite: [R] int64, index of the first committed token whose logits were not finite: it and those behind it mean
            nothing. -1: none.
    """

    tokens: Tensor
    accept_lens: Tensor
    path: Tensor
    bonus_tokens: Tensor
    new_lengths: Tensor
    non_finite: Tensor


class Drafter(Protocol):
    """A drafting method. One file in this folder; the file's name is the value of --speculate."""

    depth: int  # longest path it proposes; `off` has 0
    num_nodes: int  # most nodes it proposes, root not counted
    max_writes: int  # most KV positions a step writes for a row: root + nodes, or its own draft loop's where larger
    relay: RelaySpec
    taps: tuple[int, ...]  # target layers whose states observe needs
    shifted_kv: bool  # its KV at position t depends on token t + 1 (EAGLE)
    kv_layers: tuple[LayerKV, ...]  # what its own KV stores for a token, in the target's pages; () where it has none
    kv: KVCache | None  # that KV: the engine makes it before the first step, and copies pages in it with the target's
    kv_behind: int  # most positions before the committed length that its own KV may lack between two steps
    num_parameters: int  # of a model of its own; what it shares with the target is not counted
    weight_bytes: int  # of these parameters, as they are held
    catches_up: bool  # it can make its own KV of tokens it never watched, from the tokens alone (`ChunkTokens` that fill)

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """Draft at most `width` nodes (it may be 0) a row from the roots `payload.bonus_tokens`."""
        ...

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """See what was computed and decided; return the extras to relay (one row a sampled row) or None."""
        ...
