"""Logprobs of chosen tokens and of the most likely ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.sampling.sampler import score_dtype
from slipstream.sampling.transforms import best


@dataclass(frozen=True, slots=True)
class Logprobs:
    """chosen [L, D + 1], ranks [L, D + 1] int64 (1 for the best), top_ids [L, D + 1, k] int64 and top_logprobs [L, D + 1, k],
    best first, the lower id first on ties.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def logprobs_of(scores: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Log-softmax of scores, in float32 (float64 if they are), at chosen tokens and at the best ones.

    Args:
        scores: [L, D + 1, V]: the model's logits for the mode `raw`, `sampler.process` of them for `processed`.
        tokens: [L, D + 1] int64; -1 where none was chosen, which gets the logprob of token 0.
        num_top: k, how many of the most likely tokens to list besides; 0 lists none.
    """
    vocab_size = scores.shape[-1]
    flat = torch.log_softmax(scores.reshape(tokens.numel(), vocab_size).to(score_dtype(scores)), 1)
    ids = tokens.reshape(tokens.numel(), 1).clamp(min=0)
    chosen = flat.gather(1, ids)
    above = (flat > chosen) | ((flat == chosen) & (torch.arange(vocab_size, device=flat.device) < ids))
    shape = (*tokens.shape, min(num_top, vocab_size))
    found = best(flat, shape[-1])
    ranks = above.sum(1) + 1
    return Logprobs(chosen.view(tokens.shape), ranks.view(tokens.shape), found.ids.reshape(shape), found.scores.reshape(shape))
