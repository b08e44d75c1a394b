"""A world of tables for `verify`: the target's and the drafter's logits behind a token at a position, thousands of rows at once,
and the exact distribution of the answers, worked out from the sampler's oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.layout import tree_ancestors
from slipstream.sampling.nodes import GrammarMasks, Nodes
from slipstream.sampling.state import FLOATS, INTEGERS, RowNumbers, RowSampling, SamplingState
from slipstream.speculate.accept import AcceptRule
from slipstream.speculate.base import Draft
from slipstream.speculate.sampled_rows import SampledRows
from slipstream.speculate.verify import verify
from tests.sampling.oracle import Array, Asked, edited, truncated
from tests.sampling.steps import CPU, EOS, Row

PROMPT = (3, 0)
CYCLE = 3  # logits depend on the position modulo this


@dataclass(frozen=True)
class World:
    """Logits [CYCLE, V, V] behind each token, at the position of the token that is sampled, and what the requests ask for.

    `allowed`: position modulo CYCLE -> what a grammar allows there.
    """

    target: Array
    draft: Array
    asked: Asked = field(default_factory=Asked)
    allowed: Mapping[int, set[int]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    @property
    def vocab_size(self) -> int:
        return int(self.target.shape[-1])

    def sampling(self, num_rows: int, first_seed: int) -> RowSampling:
        """Rows that ask for the same and have seeds one after the other."""
        state = SamplingState(1, self.vocab_size, EOS, CPU)
        state.admit(0, Row(self.asked, list(PROMPT)).request(), len(PROMPT))
        one = state.rows([0])
        numbers = None
        if one.numbers is not None:
            integers = one.numbers.integers.repeat(num_rows, 1)
            integers[:, INTEGERS.index("seed")] = torch.arange(first_seed, first_seed + num_rows)
            numbers = RowNumbers(one.numbers.floats.expand(num_rows, len(FLOATS)), integers)
        return RowSampling(one.needs * num_rows, one.edits * num_rows, numbers)

    def logits(self, of: Array, position: Tensor, last: Tensor) -> Tensor:
        """[n, V] behind tokens [n], for tokens at positions [n]."""
        last = last.clamp(0, self.vocab_size - 1)
        return torch.from_numpy(of)[position % CYCLE, last].to(self.dtype)

    def probabilities(self, output: Sequence[int]) -> Array:
        """What the next token is drawn from: [V]."""
        position = len(PROMPT) + len(output)
        logits = self.target[position % CYCLE, [*PROMPT, *output][-1]].astype(np.float64)
        allowed = self.allowed.get(position % CYCLE)
        return softmax(truncated(edited(logits, self.asked, PROMPT, output, EOS, allowed), self.asked))

    def joint(self, num_tokens: int) -> Array:
        """[V ** num_tokens]: probability of each answer, the first token counting most."""
        out = np.zeros((self.vocab_size,) * num_tokens)
        for answer in itertools.product(range(self.vocab_size), repeat=num_tokens):
            chance = 1.0
            for place, token in enumerate(answer):
                chance *= self.probabilities(answer[:place])[token] if chance else 0.0
            out[answer] = chance
        return out.ravel()


def random_world(vocab_size: int, seed: int, spread: float = 1.5, **more: object) -> World:
    """Tables drawn at random; target and draft agree in part."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0.0, spread, (CYCLE, vocab_size, vocab_size))
    return World(target, 0.5 * target + rng.normal(0.0, spread, target.shape), **more)


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


@dataclass
class Game:
    """Rows on their way: history [S, P + M + 2], lengths [S] (positions of the roots)."""

    world: World
    rule: AcceptRule
    sampling: RowSampling
    history: Tensor
    lengths: Tensor

    @property
    def slots(self) -> Tensor:
        return torch.arange(len(self.lengths))

    def roots(self) -> Tensor:
        return self.history[self.slots, self.lengths]

    def nodes(self, chain: Sequence[Tensor]) -> Nodes:
        """One node a row, behind the root and `chain`, as a drafter states it."""
        num_rows, level = len(self.lengths), len(chain)
        return Nodes(
            row=self.slots,
            position=self.lengths + level + 1,
            path=torch.stack(list(chain), 1) if chain else self.slots.new_empty((num_rows, 0)),
            depth=torch.full_like(self.slots, level),
            slots=self.slots,
            history=self.history,
            history_lens=self.lengths + 1,
            max_history_len=self.history.shape[1],
            row_ids=tuple(range(num_rows)),
        )


Propose = Callable[[Game], Draft]


def drawn_chain(depth: int) -> Propose:
    """What a draft model does: a chain drawn from the draft's tables by the accept rule's own half."""

    def propose(game: Game) -> Draft:
        chain: list[Tensor] = []
        probs: list[Tensor] = []
        for level in range(depth):
            logits = game.world.logits(game.world.draft, game.lengths + level + 1, chain[-1] if chain else game.roots())
            proposal = game.rule.propose(logits, game.sampling, game.nodes(chain))
            chain.append(proposal.tokens)
            probs.extend([] if proposal.probs is None else [proposal.probs])
        tokens = torch.stack(chain, 1)
        return Draft(tokens, torch.full_like(game.lengths, depth), probs=torch.stack(probs, 1) if probs else None)

    return propose


def play(world: World, rule: AcceptRule, propose: Propose, num_rows: int, num_tokens: int, first_seed: int = 0) -> Iterator[Game]:
    """Verify step after step until every row has `num_tokens` tokens; yields the game after each."""
    total = len(PROMPT) + num_tokens
    history = torch.full((num_rows, total + 2), -1, dtype=torch.int64)
    history[:, : len(PROMPT)] = torch.tensor(PROMPT)
    lengths = torch.full((num_rows,), len(PROMPT) - 1)
    game = Game(world, rule, world.sampling(num_rows, first_seed), history, lengths)
    while int(game.lengths.min()) < total - 1:
        draft = propose(game)
        room = (total - 1 - game.lengths).clamp(min=0)
        draft = replace(draft, num_nodes=torch.minimum(draft.num_nodes, room))
        rows = sampled_rows(game, draft, total)
        nodes = torch.cat([game.roots()[:, None], draft.tokens], 1).flatten()
        position = (game.lengths[:, None] + 1 + depths(draft)).flatten()
        logits = world.logits(world.target, position, nodes)
        verdict = verify(logits, rows, game.sampling, masks_of(world, position), rule)
        column = torch.arange(verdict.tokens.shape[1])
        counted = column < verdict.accept_lens[:, None]
        at = torch.where(counted, game.lengths[:, None] + 1 + column, total + 1)
        game.history.scatter_(1, at, verdict.tokens)
        game.lengths = verdict.new_lengths
        yield game


def answers(world: World, rule: AcceptRule, propose: Propose, num_rows: int, num_tokens: int, first_seed: int = 0) -> Array:
    """[V ** num_tokens]: how often each answer came, numbered as in `World.joint`."""
    *_, game = play(world, rule, propose, num_rows, num_tokens, first_seed)
    tokens = game.history[:, len(PROMPT) : len(PROMPT) + num_tokens]
    number = tokens @ (world.vocab_size ** torch.arange(num_tokens - 1, -1, -1))
    return torch.bincount(number, minlength=world.vocab_size**num_tokens).numpy()


def depths(draft: Draft) -> Tensor:
    """[S, W + 1] int64: depth of each node."""
    num_rows, width = draft.tokens.shape
    if draft.parents is None:
        return torch.arange(width + 1).expand(num_rows, -1)
    return tree_ancestors(draft.parents).sum(2) - 1


def sampled_rows(game: Game, draft: Draft, limit: int) -> SampledRows:
    """All nodes of all rows, none left out."""
    num_rows, width = draft.tokens.shape
    return SampledRows(
        slots=game.slots,
        base_lens=game.lengths,
        limits=torch.full((num_rows,), limit),
        roots=game.roots(),
        draft=draft,
        ancestors=None if draft.parents is None else tree_ancestors(draft.parents),
        flat_row=torch.arange(num_rows).repeat_interleave(width + 1),
        flat_node=torch.arange(width + 1).repeat(num_rows),
        flat_index=torch.arange(num_rows * (width + 1)).view(num_rows, width + 1),
        row_ids=tuple(row for row in range(num_rows) for _ in range(width + 1)),
        depth=int(depths(draft).max()),
        history=game.history,
        max_history_len=game.history.shape[1],
    )


def masks_of(world: World, position: Tensor) -> GrammarMasks | None:
    """What the world's grammar allows at the nodes for tokens at these positions."""
    if not world.allowed:
        return None
    every = (1 << world.vocab_size) - 1
    words = [sum(1 << token for token in world.allowed[p]) if p in world.allowed else every for p in range(CYCLE)]
    bits = torch.tensor(words, dtype=torch.int32)[position % CYCLE, None]
    return GrammarMasks(torch.arange(len(position)), bits)
