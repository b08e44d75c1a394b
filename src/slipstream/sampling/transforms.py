"""top_k, top_p and min_p, exactly, without sorting a vocabulary.

    sorted by (score descending, id ascending), weights w = exp(score - best score) in float64:
    top_k   the first k
    top_p   the shortest prefix of what top_k left whose weights reach top_p of their sum; at least one
    min_p   scores of at least best score + log(min_p)

All three keep a prefix, so it is enough to rank the best few hundred tokens, if that prefix ends before the first score that
might also occur among the others. That check reads data; where it fails, more tokens are ranked. The outcome is the same in bits
whichever number sufficed, as sums run in an order that depends on nothing but the row.

Cumulative sums are float64 in sorted order. The sum that top_p is measured against is the one over what top_k kept, in sorted
order, or over the whole row, in the order of `total_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.observe.guard import declared
from slipstream.sampling.blocks import COLUMN, column_ids, column_max

SIZES = (64, 256, 4096)  # numbers of tokens ranked at first
ALL = 1 << 62  # more than any vocabulary has
TIES = 8  # tokens ranked behind the k-th, to see where its score ends
SORT_BELOW = 1024  # a vocabulary this small is sorted at once
BINS, BINS_PER_NAT = 256, 8  # of the histogram that finds how far down top_p reaches


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of n rows, by (score descending, id ascending).

    Attributes:
        ids: [n, K] int64. scores: [n, K].
        certain: [n] int64, how many of them are in their true place, whatever is not here; None: all.
        total: [n] float64, weight of the whole row, where top_p is measured against that.
    """

    ids: Tensor
    scores: Tensor
    certain: Tensor | None = None
    total: Tensor | None = None

    def scatter(self, vocab_size: int, scores: Tensor) -> Tensor:
        """Scores [n, K] of the candidates at their ids, -inf elsewhere: [n, vocab_size]."""
        out = scores.new_full((scores.shape[0], vocab_size), -math.inf)
        return out.scatter_(1, self.ids, scores)

    @classmethod
    def stacked(cls, parts: Sequence[Candidates]) -> Candidates:
        """Candidates of several groups of rows, made alike, as one."""
        if len(parts) == 1:
            return parts[0]
        certain = [part.certain for part in parts if part.certain is not None]
        total = [part.total for part in parts if part.total is not None]
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.scores for part in parts]),
            torch.cat(certain) if certain else None,
            torch.cat(total) if total else None,
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """What to keep of n rows; None is off.

    Attributes:
        num_candidates: how many to rank at first, from the function of that name.
        top_k: [n] int64. top_p: [n] float64. log_min_p: [n] float64.
    """

    num_candidates: int
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    log_min_p: Tensor | None = None

    def row(self, i: int) -> Cut:
        """The cut of one row."""

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[i : i + 1]

        return Cut(self.num_candidates, pick(self.top_k), pick(self.top_p), pick(self.log_min_p))


def num_candidates(top_k: int, others: bool) -> int:
    """How many tokens to rank at first: enough for top_k (0: off), or a guess for top_p and min_p; 0 if all are off."""
    if top_k == 0:
        return SIZES[1] if others else 0
    return next((size for size in SIZES if size >= top_k + TIES), ALL)


def ranked(scores: Tensor, cut: Cut) -> Candidates:
    """First candidates of scores [n, V]."""
    found = rank(scores, cut.num_candidates)
    if cut.top_p is None or cut.top_k is not None:
        return found
    return replace(found, total=total_weight(_weights(scores, scores.amax(1, keepdim=True))))


def keep(found: Candidates, cut: Cut) -> tuple[Candidates, Tensor]:
    """Set the scores of dropped candidates to -inf. Also says, [n] bool, where the candidates surely hold all that is kept."""
    kept = _kept(found, cut)
    enough = kept[:, 0] if found.certain is None else kept.sum(1) <= found.certain
    return Candidates(found.ids, found.scores.masked_fill(~kept, -math.inf)), enough


def truncated(scores: Tensor, cut: Cut) -> Candidates | None:
    """The tokens of scores [n, V] that are kept, among others whose score becomes -inf.

    None: they are many, and only min_p is on, so that looking at every token (`above_floor`) is cheaper than ranking.
    """
    first = ranked(scores, cut)
    found, enough = keep(first, cut)
    with declared("do the candidates hold all that is kept?"):
        if bool(enough.all()):
            return found
    if cut.top_k is not None:
        return keep(rank(scores, ALL), cut)[0]
    if cut.top_p is not None and first.total is not None:
        return _nucleus(scores, cut, first.total, first.total * cut.top_p)
    return None


def above_floor(scores: Tensor, log_min_p: Tensor) -> Tensor:
    """Scores [n, V] with those that min_p drops at -inf."""
    floor = _min_p_floor(scores.amax(1), log_min_p)
    return scores.masked_fill(scores < floor[:, None], -math.inf)


def rank(scores: Tensor, size: int) -> Candidates:
    """The best `size` tokens of scores [n, V], or all. Of those tied with the last one any may be missing."""
    vocab_size = scores.shape[1]
    if vocab_size <= SORT_BELOW or size >= vocab_size:
        ordered, ids = torch.sort(scores, dim=1, descending=True, stable=True)
        return Candidates(ids, ordered)
    if size * COLUMN * 2 <= vocab_size:
        # The best `size` tokens are in the `size` columns with the highest maxima.
        pool = column_ids(column_max(scores).topk(size, 1).indices, vocab_size)
        ids = pool.gather(1, scores.gather(1, pool).topk(size, 1).indices)
    else:
        ids = scores.topk(size, 1).indices
    found = _sorted(scores, ids.sort(1).values)
    return Candidates(found.ids, found.scores, (found.scores > found.scores[:, -1:]).sum(1))


def best(scores: Tensor, count: int) -> Candidates:
    """Exactly the best `count` tokens of scores [n, V]."""
    found = rank(scores, num_candidates(max(count, 1), False))
    with declared("are the best tokens tied with others?"):
        if found.certain is not None and bool((found.certain < count).any()):
            found = rank(scores, ALL)
    return Candidates(found.ids[:, :count], found.scores[:, :count])


def total_weight(weights: Tensor) -> Tensor:
    """Sum of each row of weights [n, V] float64: [n], the same in bits whatever n is.

    Summed first over rows of 64, then over the 64 columns and the tail, in order: torch splits a plain sum over a single long row
    between threads, and does not where there are more rows.
    """
    num_rows = weights.shape[1] // 64
    columns = weights[:, : num_rows * 64].view(len(weights), num_rows, 64).sum(1)
    return torch.cat([columns, weights[:, num_rows * 64 :]], 1).cumsum(1)[:, -1]


def _nucleus(scores: Tensor, cut: Cut, total: Tensor, needed: Tensor) -> Candidates:
    """top_p where it keeps many: a histogram of the weights tells how far down it reaches, and all above that is sorted.

    One row at a time, as each has its own number of tokens.
    """
    rows = []
    best = scores.amax(1, keepdim=True)
    weights = _weights(scores, best)
    depths = ((best - scores) * BINS_PER_NAT).nan_to_num_(0.0, BINS, 0.0).clamp_(max=BINS - 1).to(torch.int64)
    with declared("top_p keeps many tokens: how many?"):
        for i, depth in enumerate(depths):
            reached = torch.bincount(depth, weights[i], BINS).cumsum(0)
            # A bin more than needed: sums in another order differ in their last bits.
            last = (reached < needed[i]).sum() + 1
            found = _sorted(scores[i : i + 1], (depth <= last).nonzero().T)
            rows.append(keep(replace(found, total=total[i : i + 1]), cut.row(i))[0])
    width = max(row.ids.shape[1] for row in rows)
    return Candidates.stacked([_padded(row, width) for row in rows])


def _padded(row: Candidates, width: int) -> Candidates:
    """Repeat the last token, which says nothing new."""
    missing = width - row.ids.shape[1]
    if missing == 0:
        return row
    ids, scores = (torch.cat([values, values[:, -1:].expand(-1, missing)], 1) for values in (row.ids, row.scores))
    return Candidates(ids, scores)


def _sorted(scores: Tensor, ids: Tensor) -> Candidates:
    """Rank given tokens, whose ids [n, K] ascend."""
    ordered, order = torch.sort(scores.gather(1, ids), dim=1, descending=True, stable=True)
    return Candidates(ids.gather(1, order), ordered)


def _weights(scores: Tensor, best: Tensor) -> Tensor:
    return (scores.double() - best.double()).exp_()


def _min_p_floor(best: Tensor, log_min_p: Tensor) -> Tensor:
    """The lowest score that min_p keeps: the smallest number of best's dtype that is at least best + log(min_p) in float64."""
    exact = best.double() + log_min_p
    floor = exact.to(best.dtype)
    return torch.where(floor.double() < exact, torch.nextafter(floor, torch.full_like(floor, math.inf)), floor)


def _kept(found: Candidates, cut: Cut) -> Tensor:
    """[n, K] bool, a prefix of each row. The best token always stays."""
    scores = found.scores
    kept = scores != -math.inf  # a NaN stays: it is found at its node, not hidden here
    if cut.top_k is not None:
        kept &= torch.arange(scores.shape[1], device=scores.device) < cut.top_k[:, None]
    if cut.top_p is not None:
        reached = (_weights(scores, scores[:, :1]) * kept).cumsum(1)
        of = reached[:, -1] if found.total is None else found.total
        kept[:, 1:] &= reached[:, :-1] < (of * cut.top_p)[:, None]
    if cut.log_min_p is not None:
        kept &= ~(scores < _min_p_floor(scores[:, 0], cut.log_min_p)[:, None])
    kept[:, 0] = True
    return kept
