"""verify: one function decides what a step commits, for plain and speculative decoding alike.

    root r ── logits ─► t0 = sample(r)         W draft nodes; D = deepest path
      ├─ a            go on to the child that the accept rule takes (coupled: the one
      │   └─ c        that equals the target's own sample), stop where it takes none.
      └─ b ─► t1 = sample(b)                   t0 = b:  tokens = [b, t1], path = [r, b], accept_len 2

The target's sample at a node depends on the seed, the position and the node's own path alone (design section 6). What is made of
it is the accept rule's (accept.py). The last committed token is the bonus token: the root of the next step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from slipstream.sampling.nodes import GrammarMasks
from slipstream.sampling.sampler import choose
from slipstream.sampling.state import RowSampling
from slipstream.speculate.accept import AcceptRule
from slipstream.speculate.base import Verdict
from slipstream.speculate.sampled_rows import SampledRows, counted_nodes, sampling_nodes


def verify(logits: Tensor, rows: SampledRows, sampling: RowSampling, masks: GrammarMasks | None, rule: AcceptRule) -> Verdict:
    """Sample the target's token at each node and keep the drafted path that the rule accepts.

    Args:
        logits: [N, vocab], one row a node, in the order of `rows.flat_row`.
        rows: who samples, and what was drafted.
        sampling: parameters of the S rows.
        masks: what grammars allow, at the nodes of constrained rows.
        rule: which drafted tokens are accepted, and what is said where none is.
    """
    choice = choose(logits, sampling, partial(sampling_nodes, rows), masks)
    room = (rows.limits - rows.base_lens - 1).clamp(min=0)
    if not rows.draft.tokens.shape[1]:  # roots alone
        matched, said = torch.zeros_like(rows.roots), choice.tokens[:, None]
        path = matched[:, None]
    else:
        said = choice.tokens.index_select(0, rows.flat_index.flatten()).view(rows.flat_index.shape)
        matched, path, said = _followed(logits, rows, sampling, masks, rule, said)
    accept_lens = torch.minimum(matched + 1, room)
    counted = torch.arange(rows.depth + 1, device=logits.device) < accept_lens[:, None]
    tokens = torch.where(counted, said.gather(1, path), -1)
    bonus = torch.where(accept_lens > 0, tokens.gather(1, (accept_lens - 1).clamp(min=0)[:, None])[:, 0], rows.roots)
    bad_node = ~choice.scores.isfinite()
    bad = bad_node.index_select(0, rows.flat_index.gather(1, path).flatten()).view_as(path) & counted
    first_bad = torch.where(bad.any(1), bad.to(torch.int8).argmax(1), -1)
    return Verdict(tokens, accept_lens, torch.where(counted, path, 0), bonus, rows.base_lens + accept_lens, first_bad)


def _followed(
    logits: Tensor, rows: SampledRows, sampling: RowSampling, masks: GrammarMasks | None, rule: AcceptRule, said: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How many levels of its draft each row accepts [S], the path [S, D + 1], and what is said at each node [S, W + 1].

    `said`: the target's own sample there. The rest is as in `verify`.
    """
    draft = rows.draft
    accepted = rule.accept(logits, rows, sampling, masks, said)
    fits = accepted.fits & counted_nodes(draft)
    if draft.parents is None:
        matched = fits[:, : rows.depth].cumprod(1).sum(1)
        step = torch.arange(rows.depth + 1, device=fits.device)
        return matched, torch.where(step <= matched[:, None], step, 0), accepted.said
    current = torch.zeros_like(rows.roots)
    alive = torch.ones_like(rows.roots, dtype=torch.bool)
    steps = [current]
    matched = torch.zeros_like(rows.roots)
    for _ in range(rows.depth):
        child = (draft.parents == current[:, None]) & fits
        alive = alive & child.any(1)
        # Equal siblings have equal futures only where their subtrees are; argmax takes the first, the drafter's best.
        current = torch.where(alive, child.to(torch.int8).argmax(1) + 1, current)
        matched = matched + alive
        steps.append(torch.where(alive, current, 0))
    return matched, torch.stack(steps, 1), accepted.said
