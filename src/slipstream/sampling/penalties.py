"""Repetition, frequency and presence penalties, exact at every node: the row's counts plus those of the node's own path.

    repetition   x > 0 ? x / r : x * r       tokens seen in prompt, output or path
    frequency    x - f * count               tokens of the output and path
    presence     x - p * (count > 0)         in this order

Only tokens that were seen change, so only they are touched: the history's ids are gathered, penalised and scattered back, then
the path's, whose counts are higher. No node gets counts over the whole vocabulary of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.sampling.nodes import NodeRun


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of one row: each [] in the dtype of the scores. prompt_len: [] int64; output starts there."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    prompt_len: Tensor

    def of(self, scores: Tensor, counts: Tensor | None) -> Tensor:
        """Penalised scores of tokens that were seen, with their counts in the output (None: not needed)."""
        scores = torch.where(scores > 0, scores / self.repetition, scores * self.repetition)
        if counts is None:
            return scores
        return scores - counts.to(scores.dtype) * self.frequency - (counts > 0).to(scores.dtype) * self.presence


def apply_penalties(scores: Tensor, run: NodeRun, penalties: Penalties, output_counts: bool) -> None:
    """Penalise scores [m, V] of m nodes of one row, in place. `output_counts`: presence or frequency is on."""
    nodes, vocab_size = scores.shape
    place = torch.arange(run.history.shape[0], device=scores.device)
    valid = place < run.history_len
    # What is not a token becomes the first token of the history, which gets the right value however often it is written.
    first = run.history[0]
    ids = torch.where(valid, run.history, first)
    counts = None
    if output_counts:
        in_output = (valid & (place >= penalties.prompt_len)).to(torch.int32)
        counts = torch.zeros(vocab_size, dtype=torch.int32, device=scores.device).scatter_add_(0, ids, in_output)
    penalised = penalties.of(scores.index_select(1, ids), None if counts is None else counts.index_select(0, ids))

    depth = run.path.shape[1]
    if depth:
        # A drafter may propose ids that do not exist; nothing behind such a node is ever accepted.
        drafted = (torch.arange(depth, device=scores.device) < run.depth[:, None]) & (run.path >= 0) & (run.path < vocab_size)
        path = torch.where(drafted, run.path, first)
        path_counts = None
        if counts is not None:
            on_path = ((path[:, :, None] == path[:, None, :]) & drafted[:, None, :]).sum(2)
            path_counts = counts[path] + on_path
        path_penalised = penalties.of(scores.gather(1, path), path_counts)
    scores.scatter_(1, ids.expand(nodes, -1), penalised)
    if depth:
        scores.scatter_(1, path, path_penalised)
