"""A draft tree that grows level by level: at each level the best candidates are expanded, at the end the best of all are drafted.

    level 1           a .5      b .3      c .1                   from the relay; all three are expanded
    level 2         d .4  e .05   f .2  g .05   h .06  i .01     the best three, d f h, are expanded
    level 3         ...
    drafted         a .5, d .4, b .3, f .2, ...                  in this order, so that whoever takes fewer takes the best

A candidate's score is the logarithm of the product along its path (Li et al., EAGLE-2, 2024), so no node scores above its parent
and any number of best ones is a tree. A chain is a tree of one candidate a level; it needs no scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.speculate.base import Draft


class DraftTree:
    """The candidates so far, R rows of them.

    Args:
        tokens: [R, k] int64, the first level: k is how many candidates are expanded a level, and how many each of them gets.
        scores: [R, k], their log probabilities.
        states: [R, hidden], what the head continues from at the root.

    Attributes:
        beam_tokens: [R, k] int64, candidates to expand next.
        beam_states: [R, k, hidden], what the head continues from at each of them: what it made at the candidate's parent.
        beam_paths: [R, k, L] int64, tokens from the root down to each, at level L.
        ancestors: [R, L * k, L * k] bool: which of the nodes expanded so far, those to expand next included, each one sees.
    """

    def __init__(self, tokens: Tensor, scores: Tensor, states: Tensor) -> None:
        rows, self._width = tokens.shape
        scores = usable(scores)
        self._tokens = [tokens]
        self._scores = [scores]
        self._parents = [torch.full_like(tokens, -1)]  # places in the row's candidates, all levels one after the other
        self._beam_places = torch.arange(self._width, device=tokens.device).expand(rows, -1)
        self._beam_scores = scores
        self._num_candidates = self._width
        self.beam_tokens = tokens
        self.beam_states = states[:, None].expand(-1, self._width, -1)
        self.beam_paths = tokens[:, :, None]
        self.ancestors = torch.eye(self._width, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)

    def grow(self, tokens: Tensor, scores: Tensor, states: Tensor) -> None:
        """The beam was expanded.

        Args:
            tokens: [R, k, k] int64, candidates behind each of the beam. scores: [R, k, k], their log probabilities.
            states: [R, k, hidden], what the head made at each of the beam.
        """
        rows, width = self.beam_tokens.shape
        total = (self._beam_scores[:, :, None] + usable(scores)).flatten(1)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(total)
        self._parents.append(self._beam_places.repeat_interleave(width, 1))
        best = total.topk(width, 1)
        parent = best.indices // width  # of the beam
        self._beam_places = self._num_candidates + best.indices
        self._beam_scores = best.values
        self._num_candidates += width * width
        self.beam_tokens = tokens.flatten(1).gather(1, best.indices)
        self.beam_states = states.gather(1, parent[:, :, None].expand(-1, -1, states.shape[2]))
        paths = self.beam_paths.gather(1, parent[:, :, None].expand(-1, -1, self.beam_paths.shape[2]))
        self.beam_paths = torch.cat((paths, self.beam_tokens[:, :, None]), 2)
        above = self.ancestors[:, -width:].gather(1, parent[:, :, None].expand(-1, -1, self.ancestors.shape[2]))
        self_seen = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        unseen = torch.zeros_like(self.ancestors[:, :, :width])
        self.ancestors = torch.cat((torch.cat((self.ancestors, unseen), 2), torch.cat((above, self_seen), 2)), 1)

    def draft(self, num_nodes: int) -> Draft:
        """The best `num_nodes` candidates, best first."""
        tokens, scores, parents = (torch.cat(part, 1) for part in (self._tokens, self._scores, self._parents))
        # Stable: a parent stands before its children, and where they score the same it comes first.
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        picked = order[:, :num_nodes]
        chosen = tokens.gather(1, picked)
        counts = torch.full_like(chosen[:, 0], chosen.shape[1])
        node = order.argsort(1) + 1
        above = parents.gather(1, picked)
        return Draft(chosen, counts, torch.where(above < 0, 0, node.gather(1, above.clamp(min=0))))


class DraftChain:
    """The same with one candidate a level: each one is taken, whatever it scores.

    Args:
        token: [R, 1] int64, the first level.
        states: [R, hidden], what the head continues from at the root.

    Attributes:
        beam_tokens, beam_states, beam_paths: as a `DraftTree` has them.
    """

    def __init__(self, token: Tensor, states: Tensor) -> None:
        self.beam_tokens = token
        self.beam_states = states[:, None]
        self._tokens = [token]

    @property
    def beam_paths(self) -> Tensor:
        """[R, 1, L] int64."""
        return torch.cat(self._tokens, 1)[:, None]

    def grow(self, tokens: Tensor, states: Tensor) -> None:
        """The last token was followed by `tokens` [R, 1] int64; the head made `states` [R, hidden] at it."""
        self._tokens.append(tokens)
        self.beam_tokens, self.beam_states = tokens, states[:, None]

    def draft(self, num_nodes: int) -> Draft:
        """Its first `num_nodes` tokens."""
        tokens = torch.cat(self._tokens[:num_nodes], 1)
        return Draft(tokens, torch.full_like(tokens[:, 0], tokens.shape[1]))


def usable(scores: Tensor) -> Tensor:
    """Log probabilities that can be added and compared: at most 0, and -inf where they mean nothing."""
    return torch.nan_to_num(scores, nan=-math.inf, posinf=-math.inf, neginf=-math.inf).clamp(max=0)
