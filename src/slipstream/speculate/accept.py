"""Accept rules: how a drafter draws what it proposes, and which proposals verification takes. --accept names one.

    coupled      The drafter draws with the target's noise. A token is accepted if it equals the target's own sample.
                 For a seed the tokens are those of plain decoding, whatever was drafted.
    rejection    The drafter draws x from its own q, with noise of its own. x is accepted with probability min(1, p(x) / q(x));
                 at the first refusal the row says a token drawn from max(p - q, 0), normalised; behind a chain that was accepted
                 whole, one drawn from p. Tokens have the target's distribution; which they are depends on the drafter.
                 (Leviathan et al. 2023, Chen et al. 2023.)

p is what plain decoding would draw from: after masks, bias, penalties, temperature and truncation, on the node's own path. All
noise is a function of (seed, position) and of what it is for (`Noise`), so a row's tokens do not depend on its neighbours.

A proposal that was certain, q(x) = 1, is accepted with probability p(x); where it is refused a token is drawn from p without x.
The target's own sample t, drawn from p, does both at one stroke: it is x with probability p(x), and where it is not, it is drawn
from p without x. So what was not drawn at random is compared with t under `rejection` too: n-grams, trees, greedy rows, rows
without a draft, and a q that is no distribution, as that of a sick draft model. That is exact whatever x is, and for several
children of a node as well: one of them equals t, or none. A lost q would cost acceptance, but no token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from slipstream.sampling.nodes import GrammarMasks, Nodes
from slipstream.sampling.noise import Noise, noise_keys, uniform
from slipstream.sampling.sampler import process, sample
from slipstream.sampling.state import NO_EDITS, RowNeeds, RowSampling
from slipstream.speculate.sampled_rows import SampledRows, counted_nodes, sampling_nodes


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token at each of N nodes: tokens [N] int64, and the q they were drawn from, [N, vocab] float32.

    Rows whose token was certain have all of q on it. None: all rows'.
    """

    tokens: Tensor
    probs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a rule makes of a step's drafts.

    Attributes:
        fits: [S, W] bool: node j + 1 is accepted where its parent is (nodes that do not count: anything).
        said: [S, W + 1] int64: the token committed behind each node of an accepted path, its accepted child's where it has one.
    """

    fits: Tensor
    said: Tensor


class AcceptRule(Protocol):
    """Two halves that belong together."""

    draws: bool  # proposals may come with a q that they were drawn from

    def propose(self, logits: Tensor, rows: RowSampling, nodes: Nodes) -> Proposal:
        """Draw a token at each node from a drafter's logits [N, vocab] over the target's ids, -inf for those it does not have."""
        ...

    def accept(
        self, logits: Tensor, rows: SampledRows, sampling: RowSampling, masks: GrammarMasks | None, target: Tensor
    ) -> Accepted:
        """Decide about every node. `target` [S, W + 1] int64: the target's own sample at each. The rest is as in `verify`."""
        ...


class Coupled:
    """A drafted token is accepted if the target says the same."""

    draws = False

    def propose(self, logits: Tensor, rows: RowSampling, nodes: Nodes) -> Proposal:
        """What the target would say if these were its logits."""
        return Proposal(sample(logits, rows, nodes))

    def accept(
        self, logits: Tensor, rows: SampledRows, sampling: RowSampling, masks: GrammarMasks | None, target: Tensor
    ) -> Accepted:
        """Each node against the target's sample at its parent."""
        draft = rows.draft
        behind = target[:, :-1] if draft.parents is None else target.gather(1, draft.parents)
        return Accepted(draft.tokens == behind, target)


class Rejection:
    """Speculative sampling. Rows that are drawn at random are chains; see `Draft.probs`."""

    draws = True

    def propose(self, logits: Tensor, rows: RowSampling, nodes: Nodes) -> Proposal:
        """A token drawn from what the row's parameters make of the logits, and that distribution."""
        nodes = replace(nodes, noise=Noise.DRAFT)
        tokens = sample(logits, rows, nodes)
        if not any(needs.noise for needs in rows.needs):
            return Proposal(tokens)
        probs = process(logits, rows, nodes).softmax(1).to(torch.float32)
        at_random = _at_random(rows, tokens.device).index_select(0, nodes.row)
        return Proposal(tokens, torch.where(at_random[:, None], probs, one_hot(tokens, probs.shape[1])))

    def accept(
        self, logits: Tensor, rows: SampledRows, sampling: RowSampling, masks: GrammarMasks | None, target: Tensor
    ) -> Accepted:
        """As `Coupled`, but for the nodes that were drawn at random."""
        compared = COUPLED.accept(logits, rows, sampling, masks, target)
        draft, nodes = rows.draft, sampling_nodes(rows)
        if draft.probs is None or sampling.numbers is None:
            return compared
        p = process(logits, sampling, nodes, masks).softmax(1)  # [N, vocab]
        width, vocab_size = draft.tokens.shape[1], p.shape[1]
        # Node j + 1 of a chain was drawn behind node j.
        behind = rows.flat_index[:, :width]
        x = draft.tokens.clamp(0, vocab_size - 1)
        q_of_x = draft.probs.gather(2, x[:, :, None])[:, :, 0]
        p_of_x = p[behind, x]
        counts = counted_nodes(draft)
        at_random = counts & _at_random(sampling, p.device)[:, None] & (q_of_x > 0) & (q_of_x < 1) & (x == draft.tokens)

        seeds, positions = sampling.numbers.integer("seed")[:, None].expand_as(behind), nodes.position[behind]
        u = uniform(*noise_keys(seeds.flatten(), positions.flatten(), Noise.ACCEPT)).view_as(behind)
        fits = torch.where(at_random, u * q_of_x < p_of_x, compared.fits)
        said = torch.cat([torch.where(at_random & fits, draft.tokens, target[:, :width]), target[:, width:]], 1)

        # Where a chain ends because a token drawn at random was refused, something is drawn from what p has more than q.
        num_accepted = (fits & counts).cumprod(1).sum(1, keepdim=True)
        end = num_accepted.clamp(max=width - 1)
        refused = (num_accepted < draft.num_nodes[:, None]) & at_random.gather(1, end)
        row = torch.arange(len(said), device=said.device)
        p_end = p.index_select(0, behind.gather(1, end)[:, 0])
        more = _residual(p_end, draft.probs[row, end[:, 0]])
        drawn = _drawn(more, sampling, nodes, row, positions.gather(1, end)[:, 0])
        return Accepted(fits, said.scatter(1, end, torch.where(refused, drawn[:, None], said.gather(1, end))))


COUPLED = Coupled()
RULES: Mapping[str, Callable[[], AcceptRule]] = {"coupled": Coupled, "rejection": Rejection}


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """The q of tokens that were certain: tokens [...] int64 -> [..., vocab_size] float32; zeros where there is no such id."""
    known = (tokens >= 0) & (tokens < vocab_size)
    out = torch.zeros((*tokens.shape, vocab_size), dtype=torch.float32, device=tokens.device)
    return out.scatter_(-1, tokens.clamp(0, vocab_size - 1)[..., None], known[..., None].to(torch.float32))


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) [S, vocab], not normalised; p itself where rounding leaves nothing of it."""
    more = (p - q).clamp(min=0)
    return torch.where(more.amax(1, keepdim=True) > 0, more, p)


def _drawn(weights: Tensor, sampling: RowSampling, nodes: Nodes, row: Tensor, position: Tensor) -> Tensor:
    """[S]: a token of each row, drawn from weights [S, vocab] as they are."""
    plain = RowSampling((RowNeeds(noise=True),) * len(weights), (NO_EDITS,) * len(weights), sampling.numbers)
    ends = replace(
        nodes,
        row=row,
        position=position,
        path=row.new_empty((len(row), 0)),
        depth=torch.zeros_like(row),
        row_ids=tuple(range(len(weights))),
        noise=Noise.RESIDUAL,
    )
    return sample(weights.log(), plain, ends)


def _at_random(rows: RowSampling, device: torch.device) -> Tensor:
    """[R] bool: temperature above 0."""
    return torch.tensor([needs.noise for needs in rows.needs]).to(device)
