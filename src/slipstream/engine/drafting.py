"""Runs the drafters of a step. Rows are grouped by the drafters their plan names: one proposes, and one (the same, or another)
observes; what it relays is found by the next step.

    resolve what relayed_by stashed ─► propose: drafter ─► ... verify ... ─► observe: observer (and fills) ─► stash

The engine never asks which drafter it has: plain decoding is a group whose drafter proposes nothing and relays nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.kv import KVCache
from slipstream.engine.device_state import DeviceState
from slipstream.engine.parts import Parts
from slipstream.engine.plan import Chunk, Fill, StepPlan, VerifyRow
from slipstream.engine.step_index import StepIndex
from slipstream.errors import InvariantBroken
from slipstream.relay import FutureMap, RelayPayload
from slipstream.sampling.state import RowSampling, SamplingState
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
        # Those that have no state, as `Shape.has_state` says it on the host.
        self._light = {name for name, drafter in drafters.items() if not (drafter.kv_layers or drafter.relay.fields)}
        self._propose_s: dict[str, float] = {}
        self._observe_s: dict[str, float] = {}

    def take_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds each drafter took to propose, and to observe, since this was asked last."""
        seconds = self._propose_s, self._observe_s
        self._propose_s, self._observe_s = {}, {}
        return seconds

    def depth(self, plan: StepPlan) -> int:
        """Longest path this step's drafts can have."""
        return max((min(self._drafters[row.drafter].depth, row.num_nodes) for row in plan.rows), default=0)

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """Target layers the drafters of this step want to see, ascending."""
        names = {part.observer for part in plan.parts}
        return tuple(sorted({layer for name in names for layer in self._drafters[name].taps}))

    def propose(self, plan: StepPlan, parts: Parts, computes: Callable[[], None]) -> tuple[Tensor, Draft]:
        """Roots [R] and drafts of the verify rows `parts`, clamped to what the plan and each row's limit allow.

        `computes` is called before drafters that are not light: they have passes of their own, and those take long.
        """
        width = plan.verify_width
        proposing = self._proposing(plan.rows)
        groups = [(picked, *self._propose_group(plan, *key, picked, parts, computes)) for key, picked in proposing.items()]
        if len(groups) == 1:
            roots, draft = groups[0][1:]
            draft = _padded(draft, width)
        else:
            roots, draft = _merged(groups, width)
        if width == 0:
            return roots, draft
        planned = self._state.upload([row.num_nodes for row in plan.rows])
        # As at lag 0, where the plan knows it: what nodes there are decides under --accept rejection what is said.
        room = (parts.limits - parts.lengths - 2).clamp(min=0)  # the bonus comes on top
        return roots, replace(draft, num_nodes=torch.minimum(torch.minimum(draft.num_nodes, planned), room))

    def observe(
        self, plan: StepPlan, index: StepIndex, parts: Parts, sampling: RowSampling, verdict: Verdict, taps: Tensor | None
    ) -> None:
        """Show each observer its tokens and verdicts, and stash the payload of every row that sampled.

        Args:
            plan, index: of the step.
            parts: those that sampled, each at its root.
            sampling: their parameters.
            verdict: what was decided about them.
            taps: states of the target at all of the step's tokens.
        """
        layers = self.taps(plan)
        sampled = plan.sampled
        for name, picked in _observing(plan).items():
            drafter = self._drafters[name]
            planned = [sampled[i] for i in picked]
            group, own, rows = parts, verdict, sampling
            if len(picked) < len(sampled):
                chosen = self._state.upload(picked)
                group, own, rows = parts.at(chosen), _select_verdict(verdict, chosen), self._rows_of(planned)
            self._begin(drafter, planned, group)
            ctx = replace(self._context(drafter, planned, group, rows), chunks=self._chunks(plan, index, name))
            seen = None if taps is None else self._own_taps(plan, index, name, taps, layers)
            with _timed(name, self._observe_s):
                extras = drafter.observe(ctx, own, seen)
            if picked:
                self._relay.stash(group.rows, RelayPayload.from_draft_input(own.bonus_tokens, extras), name)

    def _proposing(self, rows: Sequence[VerifyRow]) -> dict[tuple[str, str], list[int]]:
        """(relayed_by, drafter) -> places of its rows.

        A row without nodes stays with who watched it where that one is light: one group more would cost more than its nodes,
        which are cut off again.
        """
        groups: dict[tuple[str, str], list[int]] = {}
        for place, row in enumerate(rows):
            stays = row.num_nodes == 0 and row.relayed_by in self._light
            groups.setdefault((row.relayed_by, row.relayed_by if stays else row.drafter), []).append(place)
        return groups

    def _propose_group(
        self, plan: StepPlan, relayed_by: str, name: str, picked: list[int], parts: Parts, computes: Callable[[], None]
    ) -> tuple[Tensor, Draft]:
        planned = [plan.rows[i] for i in picked]
        group = parts if len(picked) == len(parts) else parts.at(self._state.upload(picked))
        payload = self._relay.resolve(group.rows, relayed_by)
        if relayed_by != name:
            payload = RelayPayload(payload.bonus_tokens)
        width = max(row.num_nodes for row in planned)
        if width == 0:
            bonus = payload.bonus_tokens
            return bonus, Draft(bonus.new_empty((len(picked), 0)), torch.zeros_like(bonus))
        drafter = self._drafters[name]
        ctx = self._context(drafter, planned, group, self._rows_of(planned))
        if name not in self._light:
            computes()
        with _timed(name, self._propose_s):
            draft = drafter.propose(ctx, payload, width)
        _check_probs(name, draft)
        return payload.bonus_tokens, draft

    def _rows_of(self, planned: Sequence[Chunk | VerifyRow]) -> RowSampling:
        return self._sampling.rows([part.slot for part in planned])

    def _begin(self, drafter: Drafter, planned: Sequence[Chunk | VerifyRow], group: Parts) -> None:
        """Where a drafter that cannot catch up begins to watch a row, its KV is whole from there on."""
        new = [i for i, part in enumerate(planned) if isinstance(part, VerifyRow) and part.observer != part.relayed_by]
        if new and drafter.kv_layers and not drafter.catches_up:
            chosen = self._state.upload(new)
            begun = group.rows.slots.index_select(0, chosen)
            self._state.draft_from.index_copy_(0, begun, group.lengths.index_select(0, chosen))

    def _draft_from(self, drafter: Drafter, slots: Tensor) -> Tensor:
        return torch.zeros_like(slots) if drafter.catches_up else self._state.draft_from.index_select(0, slots)

    def _context(
        self, drafter: Drafter, planned: Sequence[Chunk | VerifyRow], group: Parts, sampling: RowSampling
    ) -> StepContext:
        return StepContext(
            slots=group.rows.slots,
            epochs=group.rows.epochs,
            lengths=group.lengths,
            limits=group.limits,
            max_lens=tuple(part.max_len for part in planned),
            num_nodes=tuple(part.num_nodes for part in planned),
            page_tables=group.page_tables,
            history=self._state.history,
            sampling=sampling,
            kv=self._kv,
            draft_from=self._draft_from(drafter, group.rows.slots),
        )

    def _chunks(self, plan: StepPlan, index: StepIndex, name: str) -> ChunkTokens | None:
        """The prompt chunks a drafter watches, and behind them what it has to fill in."""
        chunks = [chunk for chunk in plan.chunks if chunk.observer == name]
        own: list[Chunk | Fill] = [*chunks, *(fill for fill in plan.fills if fill.drafter == name)]
        if not own:
            return None
        if len(own) == len(plan.chunks) == len(chunks):
            slots, positions = index.chunk_slots, index.chunk_positions
        else:
            lens = self._state.upload([each.num_tokens for each in own])
            slots = self._state.upload([each.slot for each in own])
            slots = slots.repeat_interleave(lens, output_size=sum(each.num_tokens for each in own))
            positions = self._state.upload([at for each in own for at in range(each.start, each.start + each.num_tokens)])
        rows = self._state.upload([each.slot for each in own])
        return ChunkTokens(
            slots=rows,
            starts=self._state.upload([each.start for each in own]),
            lens=tuple(each.num_tokens for each in own),
            tokens=self._state.history[slots, positions],
            next_tokens=self._state.history[slots, positions + 1],
            is_last=tuple(isinstance(each, Chunk) and each.is_last for each in own),
            ends=tuple(each.start + each.num_tokens for each in own),
            page_tables=self._state.page_tables.index_select(0, rows),
            draft_from=self._draft_from(self._drafters[name], rows),
        )

    def _own_taps(self, plan: StepPlan, index: StepIndex, name: str, taps: Tensor, layers: tuple[int, ...]) -> Tensor | None:
        """The columns and rows of the step's taps that one drafter asked for."""
        wanted = self._drafters[name].taps
        if not wanted:
            return None
        hidden = taps.shape[1] // len(layers)
        if wanted != layers:
            taps = torch.cat([taps[:, (at := layers.index(layer)) * hidden : (at + 1) * hidden] for layer in wanted], 1)
        own = [i for i, part in enumerate(plan.parts) if part.observer == name]
        if len(own) == len(index.query_lens):
            return taps
        parts = torch.split(taps, list(index.query_lens))
        return torch.cat([parts[i] for i in own])


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


def _observing(plan: StepPlan) -> dict[str, list[int]]:
    """Observer -> places of its rows among those that sampled; who only has chunks that do not sample, or fills, gets none."""
    groups: dict[str, list[int]] = {}
    for place, part in enumerate(plan.sampled):
        groups.setdefault(part.observer, []).append(place)
    for chunk in plan.chunks:
        groups.setdefault(chunk.observer, [])
    for fill in plan.fills:
        groups.setdefault(fill.drafter, [])
    return groups


def _check_probs(name: str, draft: Draft) -> None:
    """Verification knows one way of refusing what was drawn at random: along a chain."""
    probs = draft.probs
    if probs is not None and (draft.parents is not None or probs.shape[:2] != draft.tokens.shape):
        kind = "a chain" if draft.parents is None else "a tree"
        raise InvariantBroken(
            f"what {name} draws at random must be a chain with a q for each node, but got {kind} of {tuple(draft.tokens.shape)} "
            f"tokens with q of {tuple(probs.shape)}"
        )


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


def _merged(groups: list[tuple[list[int], Tensor, Draft]], width: int) -> tuple[Tensor, Draft]:
    """One draft of all groups' rows; chains become trees where any group has a tree."""
    places = [place for picked, _, _ in groups for place in picked]
    order = torch.from_numpy(np.argsort(places)).to(groups[0][1].device)
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
