"""Where tokens are sampled: nodes of the rows of a step, each with its own path of drafted tokens behind the row's history."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Nodes:
    """N places a token is sampled at, in R rows.

    Attributes:
        row: [N] int64, row of each node.
        position: [N] int64, absolute position of the token sampled there: the row's root position + depth + 1.
        path: [N, P] int64, tokens below the root on the way to the node, itself included, in order; -1 behind them. P may be 0.
        depth: [N] int64, how many of `path` count; 0 at the root.
        slots: [R] int64, slot of each row.
        history: [num_slots, context + 2] int64, tokens by slot and position (the root included).
        history_lens: [R] int64, tokens that count: root position + 1.
        max_history_len: upper bound of history_lens (host).
    """

    row: Tensor
    position: Tensor
    path: Tensor
    depth: Tensor
    slots: Tensor
    history: Tensor
    history_lens: Tensor
    max_history_len: int


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Which tokens a grammar allows at the nodes of constrained rows.

    Attributes:
        nodes: [M] int64, index into the step's nodes.
        bits: [M, ceil(vocab / 32)] int32, bit b of word w allows token 32 * w + b.
    """

    nodes: Tensor
    bits: Tensor
