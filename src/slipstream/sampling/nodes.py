"""Where tokens are sampled: nodes of the rows of a step, each with its own path of drafted tokens behind the row's history."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.sampling.noise import Noise


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
        row_ids: `row` on the host, where the caller knows it (the plan does); None: it is read from the device, a declared read.
        noise: which noise is used.
    """

    row: Tensor
    position: Tensor
    path: Tensor
    depth: Tensor
    slots: Tensor
    history: Tensor
    history_lens: Tensor
    max_history_len: int
    row_ids: tuple[int, ...] | None = None
    noise: Noise = Noise.TARGET


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Which tokens a grammar allows at the nodes of constrained rows.

    Attributes:
        nodes: [M] int64, index into the step's nodes.
        bits: [M, ceil(vocab / 32)] int32, bit b of word w allows token 32 * w + b.
    """

    nodes: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class NodeRun:
    """m nodes of one row, with the tokens before them.

    Attributes:
        history: [L] int64, the row's tokens; valid below history_len.
        history_len: [] int64, at least 1.
        path: [m, P] int64, -1 behind depth. depth: [m] int64. position: [m] int64, of the token sampled at each node.
    """

    history: Tensor
    history_len: Tensor
    path: Tensor
    depth: Tensor
    position: Tensor

    def before(self, count: int) -> Tensor:
        """The `count` tokens before each node's position, in order: [m, count] int64, -1 in front of the history."""
        at = self.position[:, None] - count + torch.arange(count, device=self.path.device)
        behind = at - self.history_len
        tokens = self.history[at.clamp(0, self.history.shape[0] - 1)]
        if self.path.shape[1]:
            drafted = self.path.gather(1, behind.clamp(0, self.path.shape[1] - 1))
            tokens = torch.where(behind >= 0, drafted, tokens)
        return torch.where(at >= 0, tokens, -1)
