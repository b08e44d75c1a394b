"""Drafts of a smaller model with the same vocabulary. Its KV lies in the target's pages, in a cache of its own.

    positions        ... L-1   L    L+1  L+2  L+3        root r at L, width 3
    pass 1               x     r                         x, the token before the root, only where its KV is missing
    pass 2                          a                    a is what pass 1 says behind r, and so on
    pass 3                               b
    verify                     r    a    b    c          all three accepted: the next root comes at L+4, and the KV of c
                                                         is missing. It is x of the next step.

So a step costs `width` passes, and the one position that the loop does not reach is caught up by the first of them. `observe`
runs the draft model over prompt chunks, and over what it missed while it slept. (Leviathan et al. 2023, Chen et al. 2023; how
a token is drawn from the draft model's logits is the accept rule's, see accept.py.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import SCRATCH_PAGE, KVCache, LayerKV
from slipstream.attention.layout import build_layout, chain_layouts
from slipstream.errors import ConfigError, InvariantBroken
from slipstream.models.base import CausalLM
from slipstream.observe import log
from slipstream.relay import DraftInput, RelayPayload, RelaySpec
from slipstream.sampling.nodes import Nodes
from slipstream.sampling.sampler import choose
from slipstream.speculate.accept import Proposal
from slipstream.speculate.base import ChunkTokens, Draft, StepContext, Verdict
from slipstream.speculate.registry import Target, integer_option, known_options
from slipstream.text.tokenizer import Tokenizer
from slipstream.weights import load
from slipstream.weights.loaded import Numbers

MAX_WIDTH = 64

logger = logging.getLogger("slipstream.speculate")


class DraftModel:
    """Proposes the chain that the draft model would say with the row's parameters.

    Args:
        model: the draft model, on the target's device.
        target: ids from `target.num_known_ids` on are never proposed, however many rows either head has.
        width: most tokens it proposes.
        num_parameters, weight_bytes: of the draft model.
    """

    relay = RelaySpec()
    taps: tuple[int, ...] = ()
    shifted_kv = False
    kv_behind = 1
    catches_up = True

    def __init__(
        self, model: CausalLM, target: Target, width: int, num_parameters: int = 0, weight_bytes: int = 0
    ) -> None:
        self.num_parameters, self.weight_bytes = num_parameters, weight_bytes
        self.depth = self.num_nodes = width
        self.max_writes = 1 + width
        self.kv_layers: tuple[LayerKV, ...] = model.kv_layers
        self.kv: KVCache | None = None
        self._model = model
        self._page_size = target.page_size
        self._attention = target.attention
        self._accept = target.accept
        self._head_size = target.model.vocab_size
        self._num_ids = min(target.num_known_ids, model.vocab_size)
        # By slot: the KV of the position before the root is missing. Made at the first step.
        self._is_behind: Tensor | None = None

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """`width` passes. A row at the end of the draft model's context gets no node."""
        planned = torch.tensor(ctx.num_nodes, dtype=torch.int64, device=ctx.slots.device)
        # A row that gets fewer nodes has fewer pages: what it may not write goes to the scratch page.
        ends = torch.minimum(ctx.limits, ctx.lengths + planned.clamp(min=1)).clamp(max=self._model.context_len)
        hidden = self._first_pass(ctx, payload.bonus_tokens, ends)
        chain: list[Tensor] = []
        probs: list[Tensor] = []
        layouts = chain_layouts(
            page_tables=ctx.page_tables,
            page_size=self._page_size,
            base_lens=ctx.lengths + 1,
            limits=ends,
            max_key_lens=tuple(length + 2 for length in ctx.max_lens),
            num_levels=width - 1,
        )
        while len(chain) < width:
            if chain:
                hidden = self._forward(chain[-1], layouts[len(chain) - 1])
            drawn = self._drawn(hidden, ctx, chain)
            # Ids that nobody knows have no probability; a sick model's choice may still be one.
            chain.append(drawn.tokens.clamp(max=self._num_ids - 1))
            if drawn.probs is not None:
                probs.append(drawn.probs)
        tokens = torch.stack(chain, 1) if chain else planned.new_empty((len(planned), 0))
        room = (self._model.context_len - ctx.lengths).clamp(min=0)
        return Draft(tokens, torch.minimum(planned, room), probs=torch.stack(probs, 1) if probs else None)

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """Write the KV of prompt chunks; note which rows went further than their draft loop."""
        if ctx.chunks is not None:
            self._fill(ctx.chunks)
        # The loop wrote the root and all nodes but the last: one position is missing where everything was accepted.
        written = torch.tensor(ctx.num_nodes, dtype=torch.int64, device=ctx.slots.device).clamp(min=1)
        self._behind(ctx.history).index_copy_(0, ctx.slots, verdict.accept_lens > written)
        return None

    # -- passes ---------------------------------------------------------------------------------------------------------

    def _first_pass(self, ctx: StepContext, roots: Tensor, ends: Tensor) -> Tensor:
        """Two tokens a row, the one before the root and the root: [R, hidden] of the roots."""
        before = ctx.history[ctx.slots, ctx.lengths - 1]
        layout = build_layout(
            page_tables=ctx.page_tables,
            page_size=self._page_size,
            base_lens=ctx.lengths - 1,
            limits=ends,
            query_lens=(2,) * len(ctx.max_lens),
            max_key_lens=tuple(length + 1 for length in ctx.max_lens),
        )
        is_behind = self._behind(ctx.history).index_select(0, ctx.slots)
        written = torch.stack([is_behind, torch.ones_like(is_behind)], 1).flatten()
        layout = replace(layout, write_slots=torch.where(written, layout.write_slots, SCRATCH_PAGE * self._page_size))
        return self._forward(torch.stack([before, roots], 1).flatten(), layout)[1::2]

    def _fill(self, chunks: ChunkTokens) -> None:
        lens = torch.tensor(chunks.lens, dtype=torch.int64, device=chunks.starts.device)
        layout = build_layout(
            page_tables=chunks.page_tables,
            page_size=self._page_size,
            base_lens=chunks.starts,
            limits=(chunks.starts + lens).clamp(max=self._model.context_len),
            query_lens=chunks.lens,
            max_key_lens=chunks.ends,
            num_chunks=len(chunks.lens),
        )
        self._forward(chunks.tokens, layout)

    def _forward(self, tokens: Tensor, layout: BatchLayout) -> Tensor:
        if self.kv is None:
            raise InvariantBroken("a draft model must have its KV before the first step, but has none")
        # The target may know ids that the draft model has no embedding for.
        tokens = tokens.clamp(0, self._model.vocab_size - 1)
        return self._model.forward(tokens, self._attention.begin(layout, self.kv))[0]

    def _drawn(self, hidden: Tensor, ctx: StepContext, chain: list[Tensor]) -> Proposal:
        """A token a row, drawn from the draft model's logits behind `chain`."""
        logits = self._fitted(self._model.logits(hidden))
        if ctx.sampling.numbers is None:  # all greedy: where they stand does not matter
            return Proposal(choose(logits, ctx.sampling, partial(self._nodes, ctx, chain)).tokens)
        return self._accept.propose(logits, ctx.sampling, self._nodes(ctx, chain))

    def _nodes(self, ctx: StepContext, chain: list[Tensor]) -> Nodes:
        """Where the ends of `chain` stand."""
        level, num_rows = len(chain), len(ctx.slots)
        return Nodes(
            row=torch.arange(num_rows, device=ctx.slots.device),
            position=ctx.lengths + level + 1,
            path=torch.stack(chain, 1) if chain else ctx.slots.new_empty((num_rows, 0)),
            depth=torch.full_like(ctx.slots, level),
            slots=ctx.slots,
            history=ctx.history,
            history_lens=ctx.lengths + 1,
            max_history_len=max(ctx.max_lens) + 1,
            row_ids=tuple(range(num_rows)),
        )

    def _fitted(self, logits: Tensor) -> Tensor:
        """[R, draft head] -> [R, target head], with -inf for ids that only one of the two knows, or nobody."""
        if logits.shape[1] == self._num_ids == self._head_size:
            return logits
        out = logits.new_full((len(logits), self._head_size), -torch.inf)
        out[:, : self._num_ids] = logits[:, : self._num_ids]
        return out

    def _behind(self, history: Tensor) -> Tensor:
        if self._is_behind is None:
            self._is_behind = torch.zeros(len(history), dtype=torch.bool, device=history.device)
        return self._is_behind


@dataclass(frozen=True, slots=True)
class Options:
    """`--speculate draft_model:model=NAME,width=4`: NAME is whatever --model may be."""

    model: str
    width: int


def parse(options: Mapping[str, str]) -> Options:
    """`model` must be given. Raises `ConfigError`."""
    known_options("draft_model", options, "model", "width")
    if not options.get("model"):
        raise ConfigError("--speculate draft_model must name a model, but got none", hint="draft_model:model=NAME,width=4")
    return Options(options["model"], integer_option("draft_model", options, "width", 4, MAX_WIDTH))


def build(options: Mapping[str, str], target: Target) -> DraftModel:
    """Load the model and draft with it. Raises `ConfigError`."""
    given = parse(options)
    numbers = target.numbers or Numbers(str(target.model.dtype).removeprefix("torch."))
    loaded = load(
        given.model,
        dtype=numbers.dtype,
        quantization=numbers.quantization,
        cpu_kernels=numbers.cpu_kernels,
        kv_cache_dtype=numbers.kv_cache_dtype,
        device=target.device,
    )
    if target.tokenizer is not None:
        check_same_vocabulary(loaded.tokenizer, target.tokenizer, loaded.name)
    drafter = DraftModel(loaded.model, target, given.width, loaded.num_parameters, loaded.weight_bytes)
    size = f"{loaded.num_parameters / 1e6:.0f}M"
    facts = {"parameters": size, "width": given.width, "context": loaded.context_len}
    log.event(logger, logging.INFO, f"drafting with {loaded.name}", **facts)
    return drafter


def check_same_vocabulary(draft: Tokenizer, target: Tokenizer, name: str) -> None:
    """Raise `ConfigError` unless each id that both tokenizers know stands for the same bytes; one may know more of them."""
    for token_id in range(min(draft.vocab_size, target.vocab_size)):
        mine, theirs = draft.token_bytes(token_id), target.token_bytes(token_id)
        if mine != theirs:
            raise ConfigError(
                f"the draft model must have the target's vocabulary, but id {token_id} of {name} is {mine!r} and the target's is "
                f"{theirs!r}",
                hint="draft with a model of the same family, whose tokenizer is the same",
            )
