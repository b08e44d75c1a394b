"""Drafters for tests. Each function returns what the engine builds a drafter with: a callable that takes the target.

    self_chain, self_tree    the target's own samples: whole runs are accepted, so stops, EOS and limits fall inside a run
    rand_chain, rand_tree    nearly nothing is accepted; trees have any shape
    partial                  SELF, spoiled here and there by a hash: accept lengths vary by row and step
    relaying                 relays all fields and checks that it gets back exactly what it gave (relaying.py)

A caterpillar, the shape of SELF's tree: each node of the chain has siblings, and the chain's own node is never the first of them,
so that the KV of the accepted path has holes and must be moved.

    root ┬─ 1
         ├─ 2 ┬─ 4
         └─ 3 ├─ 5      siblings = 3, depth = 2; the path root, 2, 6 is the target's own
              └─ 6
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.attention.base import AttentionBackend
from slipstream.attention.kv import KVCache, LayerKV
from slipstream.attention.layout import build_layout
from slipstream.attention.reference import ReferenceBackend
from slipstream.relay import DraftInput, RelayPayload, RelaySpec
from slipstream.sampling.nodes import Nodes
from slipstream.sampling.sampler import perturbed
from slipstream.speculate.base import Draft, Drafter, StepContext, Verdict
from slipstream.speculate.registry import Target
from slipstream.testing.hash_lm import LAYER_SALT, mix

DrafterFactory = Callable[[Target], Drafter]
NUM_SHAPES = 16  # random tree shapes a rand_tree chooses from


def self_chain(depth: int, attention: AttentionBackend | None = None) -> DrafterFactory:
    """The target's next `depth` tokens."""
    return lambda target: SelfDrafter(target, depth, 1, attention)


def self_tree(depth: int, siblings: int = 3, attention: AttentionBackend | None = None) -> DrafterFactory:
    """A caterpillar: the target's next `depth` tokens, each among its `siblings` best candidates."""
    return lambda target: SelfDrafter(target, depth, siblings, attention)


def partial(
    depth: int, siblings: int = 1, percent: int = 30, seed: int = 0, attention: AttentionBackend | None = None
) -> DrafterFactory:
    """SELF, with `percent` of the chain's tokens replaced by a wrong one."""
    return lambda target: SelfDrafter(target, depth, siblings, attention, percent, seed)


def rand_chain(depth: int, seed: int = 0, beyond: int = 0) -> DrafterFactory:
    """`depth` arbitrary tokens; `beyond`: ids up to that far above the vocabulary occur too."""
    return lambda target: RandDrafter(target.model.vocab_size + beyond, depth, None, seed)


def rand_tree(num_nodes: int, seed: int = 0, beyond: int = 0) -> DrafterFactory:
    """`num_nodes` arbitrary tokens in trees of arbitrary shape, from one chain to all children of the root."""
    rng = random.Random(seed)
    shapes = [[rng.randint(rng.randrange(node), node - 1) for node in range(1, num_nodes + 1)] for _ in range(NUM_SHAPES)]
    return lambda target: RandDrafter(target.model.vocab_size + beyond, num_nodes, torch.tensor(shapes), seed)


def hash_of(salt: int, *columns: Tensor) -> Tensor:
    """[R] int64, from R rows of integers: their order counts."""
    out = torch.full_like(columns[0], salt)
    for column in columns:
        out = mix(out * LAYER_SALT + column)
    return out


class SelfDrafter:
    """Runs the target over the target's own KV, one token a row and level.

    Args:
        target: whose samples to foresee.
        depth: levels.
        siblings: candidates a level, the chain's own node included.
        attention: a backend; None is the reference.
        percent: of the chain's tokens to spoil.
        seed: of the spoiling.
    """

    relay = RelaySpec()
    taps: tuple[int, ...] = ()
    shifted_kv = False
    kv_layers: tuple[LayerKV, ...] = ()
    kv: KVCache | None = None
    kv_behind = 0
    catches_up = False
    num_parameters = 0
    weight_bytes = 0

    def __init__(
        self, target: Target, depth: int, siblings: int, attention: AttentionBackend | None, percent: int = 0, seed: int = 0
    ) -> None:
        self.depth = depth
        self.num_nodes = depth * siblings
        self.max_writes = 1 + self.num_nodes
        self._siblings = siblings
        self._model = target.model
        self._page_size = target.page_size
        self._attention = attention or ReferenceBackend()
        self._percent = percent
        self._seed = seed

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """The target's own continuation of each row, level by level."""
        siblings = self._siblings
        num_levels = min(self.depth, -(-width // siblings))
        root = payload.bonus_tokens
        chain: list[Tensor] = []
        columns: list[Tensor] = []
        parents: list[int] = []
        parent = 0
        for level in range(num_levels):
            scores = self._scores(ctx, root if level == 0 else chain[-1], chain)
            best = scores.topk(siblings, 1).indices
            own = self._spoiled(ctx, best[:, 0], level)
            place = 0 if siblings == 1 else 1 + level % (siblings - 1)
            others = list(best[:, 1:].unbind(1))
            columns.extend([*others[:place], own, *others[place:]])
            parents.extend([parent] * siblings)
            parent = level * siblings + place + 1
            chain.append(own)
        tokens = torch.stack(columns, 1)[:, :width] if columns else root.new_empty((len(root), 0))
        num_nodes = torch.full_like(root, tokens.shape[1])
        if siblings == 1:
            return Draft(tokens, num_nodes)
        return Draft(tokens, num_nodes, torch.tensor(parents[:width], dtype=torch.int64, device=root.device).expand_as(tokens))

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """Nothing to learn: the target's own KV is all there is."""
        return None

    def _scores(self, ctx: StepContext, tokens: Tensor, chain: list[Tensor]) -> Tensor:
        """[R, vocab]: final scores, noise included, of the token behind `tokens` [R], which come after the root and `chain`."""
        level, num_rows = len(chain), len(tokens)
        # A row that gets fewer nodes has fewer pages: what it may not write goes to the scratch page.
        planned = torch.tensor(ctx.num_nodes, dtype=torch.int64, device=tokens.device)
        layout = build_layout(
            page_tables=ctx.page_tables,
            page_size=self._page_size,
            base_lens=ctx.lengths + level,
            limits=torch.minimum(ctx.limits, ctx.lengths + 1 + planned),
            query_lens=(1,) * num_rows,
            max_key_lens=tuple(length + level + 1 for length in ctx.max_lens),
        )
        hidden, _ = self._model.forward(tokens, self._attention.begin(layout, ctx.kv))
        nodes = Nodes(
            row=torch.arange(num_rows, device=tokens.device),
            position=ctx.lengths + level + 1,
            path=torch.stack(chain, 1) if chain else tokens.new_empty((num_rows, 0)),
            depth=torch.full_like(tokens, level),
            slots=ctx.slots,
            history=ctx.history,
            history_lens=ctx.lengths + 1,
            max_history_len=max(ctx.max_lens) + 1,
            row_ids=tuple(range(num_rows)),
        )
        return perturbed(self._model.logits(hidden), ctx.sampling, nodes, None)

    def _spoiled(self, ctx: StepContext, tokens: Tensor, level: int) -> Tensor:
        if not self._percent:
            return tokens
        spoil = hash_of(self._seed * 64 + level, ctx.slots, ctx.epochs, ctx.lengths) % 100 < self._percent
        return torch.where(spoil, (tokens + 1) % self._model.vocab_size, tokens)


class RandDrafter:
    """Tokens made of a hash of row and step.

    Args:
        num_ids: proposed ids lie below this.
        num_nodes: nodes a row.
        shapes: [n, num_nodes] int64, parents to choose from; None: chains.
        seed: another number proposes other tokens.
    """

    relay = RelaySpec()
    taps: tuple[int, ...] = ()
    shifted_kv = False
    kv_layers: tuple[LayerKV, ...] = ()
    kv: KVCache | None = None
    kv_behind = 0
    catches_up = False
    num_parameters = 0
    weight_bytes = 0

    def __init__(self, num_ids: int, num_nodes: int, shapes: Tensor | None, seed: int) -> None:
        self.depth = self.num_nodes = num_nodes
        self.max_writes = 1 + num_nodes
        self._num_ids = num_ids
        self._shapes = shapes
        self._seed = seed

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """Arbitrary tokens, in an arbitrary tree where there are shapes."""
        key = hash_of(self._seed, ctx.slots, ctx.epochs, ctx.lengths)
        nodes = torch.arange(width, device=key.device)
        tokens = mix(key[:, None] + nodes * LAYER_SALT) % self._num_ids
        num_nodes = torch.full_like(ctx.slots, width)
        if self._shapes is None:
            return Draft(tokens, num_nodes)
        shape = (key >> 8) % len(self._shapes)
        return Draft(tokens, num_nodes, self._shapes.index_select(0, shape)[:, :width])

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """Nothing to learn."""
        return None
