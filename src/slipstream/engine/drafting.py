"""Runs the drafters of a step. Rows are grouped by the drafter their plan names; a group resolves, proposes, observes, stashes.

The engine never asks which drafter it has: plain decoding is a group whose drafter proposes nothing and relays nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.attention.kv import KVCache
from slipstream.engine.device_state import DeviceState
from slipstream.engine.plan import Chunk, StepPlan, VerifyRow
from slipstream.engine.step_index import StepIndex
from slipstream.errors import InvariantBroken
from slipstream.relay import FutureMap, RelayPayload, Rows
from slipstream.sampling.state import SamplingState
from slipstream.speculate.accept import one_hot
from slipstream.speculate.base import ChunkTokens, Draft, Drafter, StepContext, Verdict


class Drafting:
    """The drafters of an engine, and what they need of a step.

    Args:
        drafters: by name.
        relay: where payloads are resolved from and stashed to.
        state: page tables, histories, limits.
        sampling: parameters by slot.
        kv: the target's KV cache.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], relay: FutureMap, state: DeviceState, sampling: SamplingState, kv: KVCache
    ) -> None:
        self._drafters = drafters
        self._relay = relay
        self._state = state
        self._sampling = sampling
        self._kv = kv

    def depth(self, plan: StepPlan) -> int:
        """Longest path this step's drafts can have."""
        return max((min(self._drafters[row.drafter].depth, row.num_nodes) for row in plan.rows), default=0)

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """Target layers the drafters of this step want to see, ascending."""
        names = {part.drafter for part in plan.parts}
        return tuple(sorted({layer for name in names for layer in self._drafters[name].taps}))

    def propose(self, plan: StepPlan, rows: Rows, lengths: Tensor, limits: Tensor) -> tuple[Tensor, Draft]:
        """Roots [R] and drafts of the verify rows, clamped to what the plan and each row's limit allow."""
        width = plan.verify_width
        groups = [self._propose_group(plan, name, picked, rows, lengths) for name, picked in _groups(plan.rows).items()]
        if len(groups) == 1:
            roots, draft = groups[0][1:]
            draft = _padded(draft, width)
        else:
            roots, draft = _merged(groups, len(plan.rows), width)
        if width == 0:
            return roots, draft
        planned = self._state.upload([row.num_nodes for row in plan.rows])
        room = (limits - lengths - 1).clamp(min=0)
        return roots, replace(draft, num_nodes=torch.minimum(torch.minimum(draft.num_nodes, planned), room))

    def observe(
        self, plan: StepPlan, index: StepIndex, rows: Rows, base_lens: Tensor, verdict: Verdict, taps: Tensor | None
    ) -> None:
        """Show each drafter its tokens and verdicts, and stash the payload of every row that sampled."""
        layers = self.taps(plan)
        sampled = plan.sampled
        for name, picked in _groups(sampled, also=plan.chunks).items():
            drafter = self._drafters[name]
            chosen = self._state.upload(picked)
            group = Rows(rows.slots.index_select(0, chosen), rows.epochs.index_select(0, chosen))
            own = verdict if len(picked) == len(sampled) else _select_verdict(verdict, chosen)
            ctx = self._context([sampled[i] for i in picked], group, base_lens.index_select(0, chosen))
            ctx = replace(ctx, chunks=self._chunks(plan, index, name))
            seen = None if taps is None else self._own_taps(plan, index, name, taps, layers)
            payload = RelayPayload.from_draft_input(own.bonus_tokens, drafter.observe(ctx, own, seen))
            if picked:
                self._relay.stash(group, payload, name)

    def _propose_group(
        self, plan: StepPlan, name: str, picked: list[int], rows: Rows, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Draft]:
        chosen = self._state.upload(picked)
        group = Rows(rows.slots.index_select(0, chosen), rows.epochs.index_select(0, chosen))
        payload = self._relay.resolve(group, name)
        planned = [plan.rows[i] for i in picked]
        ctx = self._context(planned, group, lengths.index_select(0, chosen))
        draft = self._drafters[name].propose(ctx, payload, max(row.num_nodes for row in planned))
        if draft.probs is not None and (draft.parents is not None or draft.probs.shape[:2] != draft.tokens.shape):
            kind = "a chain" if draft.parents is None else "a tree"
            raise InvariantBroken(
                f"what {name} draws at random must be a chain with a q for each node, but got {kind} of "
                f"{tuple(draft.tokens.shape)} tokens with q of {tuple(draft.probs.shape)}"
            )
        return chosen, payload.bonus_tokens, draft

    def _context(self, planned: Sequence[Chunk | VerifyRow], rows: Rows, lengths: Tensor) -> StepContext:
        state = self._state
        return StepContext(
            slots=rows.slots,
            epochs=rows.epochs,
            lengths=lengths,
            limits=state.limits.index_select(0, rows.slots),
            max_lens=tuple(part.max_len for part in planned),
            num_nodes=tuple(part.num_nodes for part in planned),
            page_tables=state.page_tables.index_select(0, rows.slots),
            history=state.history,
            sampling=self._sampling.rows([part.slot for part in planned]),
            kv=self._kv,
            draft_from=state.draft_from.index_select(0, rows.slots),
        )

    def _chunks(self, plan: StepPlan, index: StepIndex, name: str) -> ChunkTokens | None:
        own = [chunk for chunk in plan.chunks if chunk.drafter == name]
        if not own:
            return None
        slots, positions = index.chunk_slots, index.chunk_positions
        if len(own) != len(plan.chunks):
            tokens = self._state.upload(_own_chunk_tokens(plan, name))
            slots, positions = slots.index_select(0, tokens), positions.index_select(0, tokens)
        rows = self._state.upload([chunk.slot for chunk in own])
        return ChunkTokens(
            slots=rows,
            starts=self._state.upload([chunk.start for chunk in own]),
            lens=tuple(chunk.num_tokens for chunk in own),
            tokens=self._state.history[slots, positions],
            next_tokens=self._state.history[slots, positions + 1],
            is_last=tuple(chunk.is_last for chunk in own),
            ends=tuple(chunk.start + chunk.num_tokens for chunk in own),
            page_tables=self._state.page_tables.index_select(0, rows),
            draft_from=self._state.draft_from.index_select(0, rows),
        )

    def _own_taps(self, plan: StepPlan, index: StepIndex, name: str, taps: Tensor, layers: tuple[int, ...]) -> Tensor | None:
        """The columns and rows of the step's taps that one drafter asked for."""
        wanted = self._drafters[name].taps
        if not wanted:
            return None
        hidden = taps.shape[1] // len(layers)
        if wanted != layers:
            taps = torch.cat([taps[:, (at := layers.index(layer)) * hidden : (at + 1) * hidden] for layer in wanted], 1)
        own = [i for i, part in enumerate(plan.parts) if part.drafter == name]
        if len(own) == len(index.query_lens):
            return taps
        parts = torch.split(taps, list(index.query_lens))
        return torch.cat([parts[i] for i in own])


def _groups(parts: Sequence[Chunk | VerifyRow], also: Sequence[Chunk] = ()) -> dict[str, list[int]]:
    """Drafter -> places of its rows in `parts`; drafters that only have a chunk in `also` get an empty list."""
    groups: dict[str, list[int]] = {}
    for place, part in enumerate(parts):
        groups.setdefault(part.drafter, []).append(place)
    for chunk in also:
        groups.setdefault(chunk.drafter, [])
    return groups


def _own_chunk_tokens(plan: StepPlan, name: str) -> list[int]:
    """Places, among the step's chunk tokens, of those in this drafter's chunks."""
    places: list[int] = []
    at = 0
    for chunk in plan.chunks:
        if chunk.drafter == name:
            places.extend(range(at, at + chunk.num_tokens))
        at += chunk.num_tokens
    return places


def _padded(draft: Draft, width: int) -> Draft:
    """The draft with exactly `width` columns of nodes."""
    missing = width - draft.tokens.shape[1]
    if missing == 0:
        return draft
    pad = torch.nn.functional.pad
    return Draft(
        tokens=pad(draft.tokens, (0, missing)),
        num_nodes=draft.num_nodes,
        parents=None if draft.parents is None else pad(draft.parents, (0, missing)),
        probs=None if draft.probs is None else pad(draft.probs, (0, 0, 0, missing)),
    )


def _merged(groups: list[tuple[Tensor, Tensor, Draft]], num_rows: int, width: int) -> tuple[Tensor, Draft]:
    """One draft of all groups' rows; chains become trees where any group has a tree."""
    chosen = torch.cat([group[0] for group in groups])
    order = torch.argsort(chosen)
    drafts = [_padded(group[2], width) for group in groups]
    roots = torch.cat([group[1] for group in groups]).index_select(0, order)
    parents = None
    if any(draft.parents is not None for draft in drafts):
        chain = torch.arange(width, device=roots.device)
        each = [chain.expand_as(d.tokens) if d.parents is None else d.parents for d in drafts]
        parents = torch.cat(each).index_select(0, order)
    given = [draft.probs for draft in drafts if draft.probs is not None]
    probs = None
    if given:
        # What another drafter proposes was certain, and its q says so.
        each = [one_hot(d.tokens, given[0].shape[2]) if d.probs is None else d.probs for d in drafts]
        probs = torch.cat(each).index_select(0, order)
    return roots, Draft(
        tokens=torch.cat([draft.tokens for draft in drafts]).index_select(0, order),
        num_nodes=torch.cat([draft.num_nodes for draft in drafts]).index_select(0, order),
        parents=parents,
        probs=probs,
    )


def _select_verdict(verdict: Verdict, rows: Tensor) -> Verdict:
    return Verdict(
        tokens=verdict.tokens.index_select(0, rows),
        accept_lens=verdict.accept_lens.index_select(0, rows),
        path=verdict.path.index_select(0, rows),
        bonus_tokens=verdict.bonus_tokens.index_select(0, rows),
        new_lengths=verdict.new_lengths.index_select(0, rows),
        non_finite=verdict.non_finite.index_select(0, rows),
    )
