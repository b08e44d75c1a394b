"""Drafting with an EAGLE head: one decoder layer that reads the target's states and foretells the tokens behind the next one.

The head's step at position t takes the target's states there and token t + 1, and foretells token t + 2:

    position          L-2      L-1       L        L+1
    token             x        x       root       a?              root: the bonus token, the last one committed
    target's KV       done     done      -         -
    head's step      (f, x)   (f, root)                           by `observe`, with the target's states f
                                 └─► first level a: relayed as topk_p, topk_index; the head's state as hidden_states
    draft                             (s, a)    (s', b)           by `propose`, with its own states; KV rewritten by `observe`

`observe` runs the head over every token whose KV the target computed and keeps: prompt chunks and accepted runs. `propose` begins
with what was relayed, and runs the head once a level: topk=1,steps=3 drafts chains, topk=4 trees that follow the best paths. The
formats are read by heads/checkpoint.py.

Candidates are ordered by log-softmax of what the target's own sampler makes of the head's logits, noise included. So at any
temperature the first one is what the target will say if the head's logits are right, and scores can be added along a path.

Under an accept rule that draws (`--accept rejection`) the one candidate of a chain is drawn by it, and its q goes along: for the
first level relayed as draft_probs, over the head's own vocabulary. Trees stay certain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep, BatchLayout
from slipstream.attention.kv import KVCache, LayerKV
from slipstream.attention.layout import build_layout, chain_layouts
from slipstream.errors import ConfigError, InvariantBroken
from slipstream.layers.decoder import Decoder
from slipstream.observe import log
from slipstream.relay import DraftInput, FieldSpec, RelayPayload, RelaySpec
from slipstream.sampling.nodes import Nodes
from slipstream.sampling.sampler import choose, perturbed
from slipstream.speculate.accept import one_hot
from slipstream.speculate.base import Draft, StepContext, Verdict
from slipstream.speculate.heads.checkpoint import AUX_MEANINGS, load_head
from slipstream.speculate.heads.layers import DraftHead
from slipstream.speculate.heads.observed import Observed
from slipstream.speculate.heads.tree import DraftChain, DraftTree
from slipstream.speculate.registry import Target, integer_option, known_options

MOST = 256  # of topk, steps and draft_tokens: far beyond what pays
OPTIONS = ("model", "topk", "steps", "draft_tokens", "aux_layers")

logger = logging.getLogger("slipstream.speculate")


class Eagle:
    """See the module.

    Args:
        head: drafts.
        target: its pages hold the head's KV too.
        topk: candidates expanded a level, and looked at behind each; 1: a chain.
        steps: levels.
        draft_tokens: nodes of a tree, at most; a chain has `steps`.
    """

    shifted_kv = True
    kv_behind = 0
    catches_up = False

    def __init__(self, head: DraftHead, target: Target, topk: int, steps: int, draft_tokens: int) -> None:
        self.depth = min(steps, draft_tokens)
        self.num_nodes = draft_tokens
        self.max_writes = max(1 + draft_tokens, topk * (self.depth - 1))
        fields = {
            "topk_p": FieldSpec((topk,), torch.float32),
            "topk_index": FieldSpec((topk,), torch.int64),
            "hidden_states": FieldSpec((head.hidden_size,), head.dtype),
        }
        self._draws = topk == 1 and target.accept.draws
        if self._draws:
            num_ids = target.model.vocab_size if head.target_ids is None else len(head.target_ids)
            fields["draft_probs"] = FieldSpec((num_ids,), torch.float32)
        self.relay = RelaySpec(fields)
        self.taps = head.taps
        self.num_parameters, self.weight_bytes = head.num_parameters, head.weight_bytes
        self.kv_layers: tuple[LayerKV, ...] = (head.kv_layer,)
        self.kv: KVCache | None = None
        self._head = head
        self._attention = target.attention
        self._accept = target.accept
        self._page_size = target.page_size
        self._topk = topk
        self._vocab_size = target.model.vocab_size
        self._num_known_ids = target.num_known_ids
        ids = head.target_ids
        self._knows_all = self._num_known_ids >= (self._vocab_size if ids is None else 1 + int(ids.max()))

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """Grow a tree from what was relayed, one step of the head a level."""
        root, k = payload.bonus_tokens, self._topk
        if width == 0:
            return Draft(root.new_empty((len(root), 0)), torch.zeros_like(root))
        if payload.topk_p is None or payload.topk_index is None or payload.hidden_states is None:
            raise InvariantBroken("propose must get what observe relayed, but a field is missing")
        if k > 1:
            return self._tree(ctx, DraftTree(payload.topk_index, payload.topk_p, payload.hidden_states), width)
        return self._chain(ctx, DraftChain(payload.topk_index, payload.hidden_states), payload.draft_probs, width)

    def _chain(self, ctx: StepContext, chain: DraftChain, first_q: Tensor | None, width: int) -> Draft:
        """A token a level, at its own position."""
        is_drawn = any(needs.noise for needs in ctx.sampling.needs)
        probs = [self._for_target(first_q, 0.0)] if first_q is not None and is_drawn else []
        layouts = chain_layouts(
            page_tables=ctx.page_tables,
            page_size=self._page_size,
            base_lens=ctx.lengths,
            limits=self._limits(ctx),
            max_key_lens=tuple(length + 1 for length in ctx.max_lens),
            num_levels=min(self.depth, width) - 1,
            first_keys=ctx.draft_from,
        )
        for level, layout in enumerate(layouts, 1):
            states = self._head.forward(chain.beam_tokens[:, 0], chain.beam_states[:, 0], self._begin(layout))
            _, tokens, q = self._candidates(states, ctx, partial(self._nodes, ctx, chain, level))
            chain.grow(tokens, states)
            probs += [] if q is None else [q]
        draft = chain.draft(width)
        return replace(draft, probs=torch.stack(probs, 1)) if probs else draft

    def _tree(self, ctx: StepContext, tree: DraftTree, width: int) -> Draft:
        """`topk` nodes a level, which lie behind the root's position level by level."""
        k, num_rows, limits = self._topk, len(ctx.slots), self._limits(ctx)
        for level in range(1, min(self.depth, width)):
            num_earlier = k * (level - 1)
            layout = build_layout(
                page_tables=ctx.page_tables,
                page_size=self._page_size,
                base_lens=ctx.lengths,
                limits=limits,
                query_lens=(k,) * num_rows,
                max_key_lens=tuple(length + num_earlier + k for length in ctx.max_lens),
                ancestors=tree.ancestors,
                first_keys=ctx.draft_from,
                num_earlier=num_earlier,
            )
            states = self._head.forward(tree.beam_tokens.flatten(), tree.beam_states.flatten(0, 1), self._begin(layout))
            scores, tokens, _ = self._candidates(states, ctx, partial(self._nodes, ctx, tree, level))
            tree.grow(tokens.view(-1, k, k), scores.view(-1, k, k), states.view(num_rows, k, -1))
        return tree.draft(width)

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """Run the head over what the target computed and keeps; relay the first level of each row that sampled."""
        if taps is None:
            raise InvariantBroken(f"observe must get the states of layers {self.taps}, but got None")
        seen = Observed.of(ctx, verdict, self._page_size)
        states = self._head.states(taps.index_select(0, seen.taps))
        states = self._head.forward(seen.next_tokens, states, self._begin(seen.layout))
        if not len(ctx.slots):
            return None
        states = states.index_select(0, seen.last)

        def nodes() -> Nodes:
            row = torch.arange(len(ctx.slots), device=states.device)
            return Nodes(
                row=row,
                position=verdict.new_lengths + 1,
                path=row.new_empty((len(row), 0)),
                depth=torch.zeros_like(row),
                slots=ctx.slots,
                history=ctx.history,
                history_lens=verdict.new_lengths + 1,
                max_history_len=max(ctx.max_lens) + verdict.tokens.shape[1] + 1,
                row_ids=tuple(range(len(row))),
            )

        scores, tokens, q = self._candidates(states, ctx, nodes)
        if self._draws:
            q = one_hot(tokens[:, 0], self._vocab_size) if q is None else q
            q = q if self._head.target_ids is None else q.index_select(1, self._head.target_ids)
        return DraftInput(topk_p=scores, topk_index=tokens, hidden_states=states, draft_probs=q)

    def _begin(self, layout: BatchLayout) -> AttentionStep:
        if self.kv is None:
            raise InvariantBroken("a drafter with KV of its own must be given it before the first step")
        return self._attention.begin(layout, self.kv)

    def _candidates(
        self, states: Tensor, ctx: StepContext, nodes: Callable[[], Nodes]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of N nodes the log probabilities [N, k] float32 and the target's ids [N, k] of the k best tokens, best first.

        A chain's one candidate needs no score, and gets 0. Under a rule that draws it is the one that this draws, and its q
        [N, vocab] float32 is the third; None where all were certain.
        """
        logits = self._head.logits(states)
        if self._topk == 1 and ctx.sampling.numbers is None and self._knows_all:  # all greedy: the ids do not matter
            best, ids = choose(logits, ctx.sampling, nodes).tokens, self._head.target_ids
            return _certain(best if ids is None else ids.index_select(0, best))
        logits = self._for_target(logits, -torch.inf)  # before the noise, which belongs to the target's ids
        if self._num_known_ids < self._vocab_size:  # rows that only fill the target's head up
            logits[:, self._num_known_ids :] = -torch.inf
        if self._draws:
            drawn = self._accept.propose(logits, ctx.sampling, nodes())
            tokens, q = drawn.tokens[:, None], drawn.probs
            return _certain(drawn.tokens) if q is None else (q.gather(1, tokens).log(), tokens, q)
        if self._topk == 1:
            return _certain(choose(logits, ctx.sampling, nodes).tokens)
        scores = perturbed(logits, ctx.sampling, nodes(), None)
        best_k = scores.topk(self._topk, 1)
        return (best_k.values - scores.logsumexp(1, keepdim=True)).to(torch.float32), best_k.indices, None

    def _nodes(self, ctx: StepContext, drafted: DraftTree | DraftChain, level: int) -> Nodes:
        """Where the beam stands."""
        paths = drafted.beam_paths
        num_rows, k, _ = paths.shape
        row = torch.arange(num_rows, device=paths.device).repeat_interleave(k)
        return Nodes(
            row=row,
            position=ctx.lengths.index_select(0, row) + level + 1,
            path=paths.flatten(0, 1),
            depth=torch.full_like(row, level),
            slots=ctx.slots,
            history=ctx.history,
            history_lens=ctx.lengths + 1,
            max_history_len=max(ctx.max_lens) + 1,
            row_ids=tuple(place for place in range(num_rows) for _ in range(k)),
        )

    def _for_target(self, values: Tensor, absent: float) -> Tensor:
        """[N, draft vocabulary] -> [N, vocab], with `absent` for ids that the head does not have."""
        ids = self._head.target_ids
        return values if ids is None else values.new_full((len(values), self._vocab_size), absent).index_copy_(1, ids, values)

    def _limits(self, ctx: StepContext) -> Tensor:
        """[R] int64. A row that was given no nodes was given no pages for them: what it would write goes to the scratch page."""
        planned = torch.tensor([self.max_writes if count else 0 for count in ctx.num_nodes], device=ctx.slots.device)
        return torch.minimum(ctx.limits, ctx.lengths + planned)


def _certain(tokens: Tensor) -> tuple[Tensor, Tensor, None]:
    """[N] int64: candidates of a chain that nothing was drawn for."""
    return torch.zeros((len(tokens), 1), device=tokens.device), tokens[:, None], None


@dataclass(frozen=True, slots=True)
class Options:
    """`--speculate eagle:model=HEAD,topk=1,steps=3,draft_tokens=N,aux_layers=input|output`; see `Eagle` and `load_head`."""

    model: str
    topk: int
    steps: int
    draft_tokens: int
    aux_layers: str | None


def parse(options: Mapping[str, str]) -> Options:
    """`model`, a folder or a hub id, must be given. Raises `ConfigError`."""
    known_options("eagle", options, *OPTIONS)
    if not options.get("model"):
        raise ConfigError("--speculate eagle must name its head, but has no model", hint="eagle:model=FOLDER_OR_HUB_ID")
    topk, steps = integer_option("eagle", options, "topk", 1, MOST), integer_option("eagle", options, "steps", 3, MOST)
    usual = steps if topk == 1 else min(2 * steps, _most_nodes(topk, steps), MOST)
    draft_tokens = integer_option("eagle", options, "draft_tokens", usual, MOST)
    if topk == 1 and draft_tokens != steps:
        raise ConfigError(
            f"--speculate eagle's draft_tokens must equal steps where topk is 1, but got {draft_tokens} and {steps}",
            hint="a chain has one token a step: leave draft_tokens out",
        )
    if draft_tokens > _most_nodes(topk, steps):
        raise ConfigError(
            f"--speculate eagle's draft_tokens must be at most the {_most_nodes(topk, steps)} that a tree of topk={topk} and "
            f"steps={steps} can have, but got {draft_tokens}"
        )
    aux_layers = options.get("aux_layers")
    if aux_layers is not None and aux_layers not in AUX_MEANINGS:
        raise ConfigError(f"--speculate eagle's aux_layers must be {' or '.join(AUX_MEANINGS)}, but got {aux_layers!r}")
    return Options(options["model"], topk, steps, draft_tokens, aux_layers)


def build(options: Mapping[str, str], target: Target) -> Eagle:
    """Load the head and draft with it; the target must be one of our own decoders. Raises `ConfigError`."""
    given = parse(options)
    if not isinstance(target.model, Decoder):
        raise ConfigError(
            "--speculate eagle must have a target that is one of our own model types, but this one runs through transformers",
            hint="its states and its embedding cannot be reached",
        )
    head = load_head(given.model, target.model, given.aux_layers, target.numbers)
    if given.topk > (target.model.vocab_size if head.target_ids is None else len(head.target_ids)):
        raise ConfigError(f"--speculate eagle's topk must be at most the head's vocabulary, but got {given.topk}")
    counts = {"topk": given.topk, "steps": given.steps, "draft_tokens": given.draft_tokens}
    log.event(logger, logging.INFO, f"drafting with {given.model}", **counts)
    return Eagle(head, target, given.topk, given.steps, given.draft_tokens)


def _most_nodes(topk: int, steps: int) -> int:
    return topk + (steps - 1) * topk * topk
