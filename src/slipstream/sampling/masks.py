"""Edits of logits that name tokens: grammar bits, allowed_token_ids, bad_words, min_tokens (masks: -inf), and logit_bias.

All work in place on scores [m, V]; apart from the grammar's, on m nodes of one row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.sampling.nodes import NodeRun
from slipstream.sampling.state import RowEdits


def apply_bits(scores: Tensor, bits: Tensor) -> None:
    """Mask what a grammar does not allow: bit b of word w of bits [m, ceil(V / 32)] int32 allows token 32 * w + b."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    forbidden = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : scores.shape[1]] == 0
    scores.masked_fill_(forbidden, -math.inf)


def apply_edits(scores: Tensor, edits: RowEdits, run: NodeRun, prompt_len: Tensor) -> None:
    """All edits of one row: allowed_token_ids, bad_words, min_tokens, logit_bias.

    Args:
        scores: [m, V].
        edits: the row's; its ids are below V.
        run: the m nodes.
        prompt_len: [] int64, tokens of the original prompt.
    """
    if edits.allowed is not None:
        kept = scores.index_select(1, edits.allowed)
        scores.fill_(-math.inf).index_copy_(1, edits.allowed, kept)
    if edits.word_ends is not None and edits.word_starts is not None:
        # A banned word is masked where the tokens before the node are the word's start; -1 in a shorter word matches anything.
        starts = edits.word_starts
        before = run.before(starts.shape[1])
        banned = ((before[:, None, :] == starts) | (starts < 0)).all(2)
        _mask(scores, edits.word_ends, banned)
    if edits.early is not None:
        too_early = (run.position - prompt_len < edits.min_tokens)[:, None].expand(-1, edits.early.shape[0])
        _mask(scores, edits.early, too_early)
    if edits.bias_ids is not None and edits.bias is not None:
        scores.index_copy_(1, edits.bias_ids, scores.index_select(1, edits.bias_ids) + edits.bias.to(scores.dtype))


def _mask(scores: Tensor, ids: Tensor, banned: Tensor) -> None:
    """Set scores[i, ids[j]] to -inf where banned [m, J]. An id may be named more than once."""
    ceiling = torch.where(banned, -math.inf, math.inf).to(scores.dtype)
    scores.scatter_reduce_(1, ids.expand(scores.shape[0], -1), ceiling, "amin", include_self=True)
