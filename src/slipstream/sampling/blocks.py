"""Blocks of a row of a whole vocabulary: a cheap first look, one vectorised pass, to find a row's best few without sorting it.

`first_argmax` uses 64 neighbouring ids as a block. The others use columns of 16 ids, far apart, which are quicker to reduce:

    ids   0    1    2  ..  c-1        column j: ids j, j + c, j + 2c, ...
          c   c+1  c+2 .. 2c-1        c = V // 16
          ...                 tail    fewer than 16 ids, always looked at
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cpu.argmax import argmax, takes

NEIGHBOURS = 64
COLUMN = 16
MIN_VOCAB = 4096  # below this, blocks cost more than they save


def column_max(x: Tensor) -> Tensor:
    """Largest element of each column: [n, V] -> [n, V // COLUMN]. NaN wins."""
    num_columns = x.shape[1] // COLUMN
    return x[:, : num_columns * COLUMN].view(len(x), COLUMN, num_columns).amax(1)


def column_ids(columns: Tensor, vocab_size: int) -> Tensor:
    """Ids in the given columns [n, B] and in the tail, in no order: [n, B * COLUMN + tail] int64."""
    num_columns = vocab_size // COLUMN
    whole = num_columns * COLUMN
    ids = (columns[:, :, None] + torch.arange(0, whole, num_columns, device=columns.device)).flatten(1)
    if whole == vocab_size:
        return ids
    tail = torch.arange(whole, vocab_size, device=columns.device)
    return torch.cat([ids, tail.expand(ids.shape[0], -1)], 1)


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """`first_argmax` [n] and the element there [n]; as one kernel where kernels are in use."""
    if x.shape[1] >= MIN_VOCAB and takes(x):
        return argmax(x)
    ids = first_argmax(x)
    return ids, x.gather(1, ids[:, None])[:, 0]


def first_argmax(x: Tensor) -> Tensor:
    """Id of the largest element of each row, the lowest id on ties: [n, V] -> [n] int64. A NaN counts as largest."""
    vocab_size = x.shape[1]
    if vocab_size < MIN_VOCAB:
        return x.argmax(1)
    num_blocks = vocab_size // NEIGHBOURS
    whole = num_blocks * NEIGHBOURS
    best = x[:, :whole].view(len(x), num_blocks, NEIGHBOURS).amax(2).argmax(1, keepdim=True)
    ids = best * NEIGHBOURS + torch.arange(NEIGHBOURS, device=x.device)
    if whole != vocab_size:
        ids = torch.cat([ids, torch.arange(whole, vocab_size, device=x.device).expand(len(x), -1)], 1)
    return ids.gather(1, x.gather(1, ids).argmax(1, keepdim=True))[:, 0]


def lowest_best(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Best of candidates in any order, the lowest id on ties: scores, ids [n, C] -> ids [n], scores [n]."""
    best = scores.amax(1)
    # Not `scores == best`: where a NaN is the best, that is true nowhere.
    return torch.where(scores < best[:, None], torch.iinfo(ids.dtype).max, ids).amin(1), best
