"""The scheduler: decides who runs in a step, with how many prompt tokens, how many draft nodes and which pages.

It imports no torch and never waits: what the device has not told yet it bounds from above. Who comes first is policy.py's.

A step's token budget is dealt out in this order:
    1. a root for each decoding row (round-robin where the budget is smaller than the rows),
    2. prompts: all but what the rows could draft at most, or a share, so that a long one goes on however wide the drafts are,
    3. draft nodes, at most evenly, from what is left after the prompts; whose and how many, speculate/choice.py says,
    4. what drafters' own KV must catch up with.
Pages likewise: the next page of each decoding row, by rank; all pages of a newly admitted prompt; pages for draft nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.cache.ledger import NO_MATCH, Holding, Ledger, Match
from slipstream.cache.prefix import NOBODY
from slipstream.engine.observers import Observers
from slipstream.engine.plan import Admit, Chunk, Fill, PageDelta, Retire, StepPlan, StepResult, VerifyRow
from slipstream.engine.policy import Policy, RankedList, victim_of_pressure, victim_of_priority
from slipstream.engine.request import Request
from slipstream.errors import InvariantBroken
from slipstream.speculate.choice import OFF, Chooser, Shape

PROMPT_SHARE = 4  # a quarter of the budget, at least, goes to waiting prompts before any draft node


@dataclass(frozen=True, slots=True)
class Launched:
    """A submitted plan with the requests its sampled rows belong to (in order) and everyone it names."""

    plan: StepPlan
    sampled: tuple[Request, ...]
    named: tuple[Request, ...]


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    admits: list[Admit] = field(default_factory=list)
    deltas: list[PageDelta] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompts: list[Request] = field(default_factory=list)  # whose the chunks are
    fills: list[Fill] = field(default_factory=list)


class Scheduler:
    """Queues, admission and the plan of each step.

    Args:
        ledger: slots and pages.
        shapes: of every drafter, by name.
        chooser: who drafts, and how far.
        max_num_batched_tokens: most tokens the target computes in a step, at least 2.
        policy: who comes first.
    """

    def __init__(
        self,
        ledger: Ledger,
        shapes: Mapping[str, Shape],
        chooser: Chooser,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
    ) -> None:
        self.ledger = ledger
        self.waiting = RankedList()
        self.running = RankedList()
        self.num_paused = 0
        self.num_retractions = 0
        self.num_cached_tokens = 0
        self._policy = policy or Policy()
        self._chooser = chooser
        self._shapes = shapes
        self._observers = Observers(ledger, shapes)
        # Of all of them: how much of an answer is found again must not depend on who watched its last step.
        self._kv_behind = max(shape.kv_behind for shape in shapes.values())
        self._max_nodes = max(shape.num_nodes for shape in shapes.values())
        self._budget = max_num_batched_tokens
        self._retires: list[Retire] = []
        self._replaced: list[tuple[Holding, PageDelta]] = []  # pages that the next step must find in tables in place of others
        self._step = 0
        self._turn = 0

    def enqueue(self, request: Request) -> None:
        """Put a new request into the queue, behind those of its priority."""
        self.waiting.add(request)

    def retire(self, request: Request) -> None:
        """A request has ended (finish_reason is set): out of the queues; slot and pages go back once nothing names them."""
        if request.holding is None:
            self.waiting.remove(request)
        else:
            self._give_back(request)

    def settled(self, launched: Launched) -> None:
        """A step's result has been taken: everything it named is in one step less."""
        for request in launched.named:
            self.ledger.settle(_holding(request))

    def learn(self, launched: Launched, result: StepResult) -> None:
        """Tell the chooser what a step took, and how the drafts of its rows fared."""
        plan = launched.plan
        num_nodes: Counter[str] = Counter()
        for row in plan.rows:
            if row.num_nodes:
                num_nodes[row.drafter] += row.num_nodes
        draft_s = dict(result.propose_s)
        if result.observe_s:
            self._learn_observing(plan, result, draft_s)
        num_prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        in_drafters = sum(result.propose_s.values()) + sum(result.observe_s.values())
        self._chooser.step_took(len(plan.rows), num_prompt_tokens, num_nodes, result.device_s - in_drafters, draft_s)
        if not num_nodes:
            return
        first = len(launched.sampled) - len(plan.rows)
        for request, row, accepted in zip(launched.sampled[first:], plan.rows, result.accept_lens[first:].tolist(), strict=True):
            if row.num_nodes and request.finish_reason is None:
                self._chooser.draft_was(request.drafting, row.drafter, max(accepted - 1, 0), row.num_nodes)

    def _learn_observing(self, plan: StepPlan, result: StepResult, draft_s: dict[str, float]) -> None:
        """What it takes to watch prompts and to catch up is not what drafts take; what it takes to see a draft's verdict is."""
        prompts = {chunk.observer for chunk in plan.chunks}
        filled: Counter[str] = Counter()
        for fill in plan.fills:
            filled[fill.drafter] += fill.num_tokens
        for name, seconds in result.observe_s.items():
            if name in filled and name not in prompts:
                self._chooser.filled(name, filled[name], seconds)
            elif name not in prompts and name in draft_s:
                draft_s[name] += seconds
            elif name not in prompts:
                self._chooser.watched(name, sum(row.observer == name for row in plan.rows), seconds)

    def plan(self) -> Launched | None:
        """The next step, or None when there is nothing to launch right now."""
        for request in [each for each in self.running if each.is_leaving and not each.num_in_flight]:
            self._retract(request)
        draft = _Draft()
        rows, paused = self._next_pages(draft)
        self.num_paused = len(paused)
        candidate = None if paused else self._admissible()
        roots = self._budget - (candidate is not None or any(r.is_prefilling and not r.is_leaving for r in self.running))
        rows = self._in_turn(rows, roots)  # a prompt always gets at least one token
        budget = self._budget - len(rows)
        self._plan_prompts(draft, candidate, budget, rows)
        num_prompt_tokens = sum(chunk.num_tokens for chunk in draft.chunks)
        verify_rows = self._verify_rows(rows, budget - num_prompt_tokens, num_prompt_tokens, draft)
        self._make_way(paused)
        if not draft.chunks and not verify_rows:
            return self._nothing_planned()
        replaced = [delta for holding, delta in self._replaced if not holding.released]
        self._replaced = []
        moves = self.ledger.take_moves()
        self._step += 1
        retires, self._retires = tuple(self._retires), []
        plan = StepPlan(
            step=self._step,
            retires=retires,
            admits=tuple(draft.admits),
            page_deltas=(*replaced, *draft.deltas),
            page_saves=moves.saves,
            page_loads=moves.loads,
            page_copies=moves.copies,
            chunks=tuple(draft.chunks),
            rows=tuple(verify_rows),
            fills=tuple(draft.fills),
        )
        return self._launch(plan, draft.prompts, rows)

    # -- rows -----------------------------------------------------------------------------------------------------------

    def _next_pages(self, draft: _Draft) -> tuple[list[Request], list[Request]]:
        """Reserve a page for the root of each decoding row, by rank. Returns those who have one and those who are paused."""
        rows: list[Request] = []
        paused: list[Request] = []
        for request in self.running:
            if request.is_prefilling or request.surely_done or request.is_leaving:
                continue
            (rows if self._reserve(request, 1, draft) else paused).append(request)
        return rows, paused

    def _in_turn(self, rows: list[Request], most: int) -> list[Request]:
        if len(rows) <= most:
            return rows
        start = self._turn % len(rows)
        self._turn += most
        return (rows[start:] + rows[:start])[:most]

    def _verify_rows(self, rows: list[Request], budget: int, num_prompt_tokens: int, draft: _Draft) -> list[VerifyRow]:
        """Deal draft nodes, at most evenly; a row never gets more than it may still commit (its bonus comes on top)."""
        if not rows:
            return []
        share = budget // len(rows)
        most = [min(share, r.max_nodes, r.limit - len(r.tokens) - len(r.steps_in_flight) - 1) for r in rows]
        for request in rows:
            request.drafting.missing = self._observers.missing(request, _holding(request))
        choices = self._chooser.choose([request.drafting for request in rows], most, num_prompt_tokens)
        left = budget - sum(choice.num_nodes for choice in choices)
        verify_rows: list[VerifyRow] = []
        for request, choice in zip(rows, choices, strict=True):
            num_nodes = choice.num_nodes
            if num_nodes and not self._reserve(request, max(1 + num_nodes, self._shapes[choice.drafter].max_writes), draft):
                num_nodes = 0
            relayed_by, holding = request.drafting.observer, _holding(request)
            fill = self._observers.change(request, holding, choice, num_nodes, left)
            if fill is not None:
                draft.fills.append(fill)
                left -= fill.num_tokens
            observer = request.drafting.observer
            max_len = request.max_committed_len
            verify_rows.append(VerifyRow(holding.slot, holding.epoch, relayed_by, choice.drafter, observer, num_nodes, max_len))
        return verify_rows

    def _reserve(self, request: Request, num_writes: int, draft: _Draft) -> bool:
        """Make the next `num_writes` positions of a row writable, as far as its limit; false: no pages."""
        holding = _holding(request)
        start = len(holding.table.pages)
        pages = self.ledger.reserve(holding, min(request.max_committed_len + num_writes, request.limit))
        if pages:
            draft.deltas.append(PageDelta(holding.slot, start, pages))
        return pages is not None

    # -- prompts --------------------------------------------------------------------------------------------------------

    def _plan_prompts(self, draft: _Draft, candidate: tuple[Request, Match] | None, budget: int, rows: list[Request]) -> None:
        """Chunks of admitted requests first, by rank, then of new ones."""
        if rows:
            most_nodes = sum(min(request.max_nodes, self._max_nodes) for request in rows)
            budget = min(budget, max(1, self._budget // PROMPT_SHARE, budget - most_nodes))
        for request in self.running:
            if request.is_prefilling and not request.is_leaving and budget > 0:
                budget -= self._chunk(request, budget, draft)
        while budget > 0 and candidate is not None:
            request = candidate[0]
            self._admit(*candidate, draft)
            budget -= self._chunk(request, budget, draft)
            candidate = self._admissible()

    def _admissible(self) -> tuple[Request, Match] | None:
        """The next request to admit, if there is one and it may be."""
        if not self.ledger.has_free_slot:
            return None
        found = self._policy.candidate(self.waiting, self._match)
        if found is None or self._must_wait(found[0]) or not self._policy.may_admit(*found, tuple(self.running), self.ledger):
            return None
        return found

    def _match(self, request: Request) -> Match:
        if request.num_prompt_logprobs is not None:  # logits at every position of its prompt are needed
            return NO_MATCH
        observer = self._first_observer(request)
        shape = self._shapes[observer]
        parent = self._parent(request)
        sibling = parent.holding if parent is not None and request.num_output == 0 and parent.has_launched_prompt else None
        drafter = observer if shape.has_kv else NOBODY
        return self.ledger.match(request.request.cache_salt, request.tokens, drafter, sibling)

    def _first_observer(self, request: Request) -> str:
        """Who watches a waiting request's prompt: beside those that run, others come in with it."""
        others = len(self.running) + len(self.waiting) - 1
        return self._chooser.first_observer(min(others, self.ledger.num_slots - 1)) if request.max_nodes else OFF

    def _must_wait(self, request: Request) -> bool:
        """A sample of a prompt that another sample is just computing waits for the pages instead of computing them again."""
        parent = self._parent(request)
        return self.ledger.caching and parent is not None and not parent.is_leaving and not parent.has_launched_prompt

    def _parent(self, request: Request) -> Request | None:
        wanted = request.request.parent_id
        return next((each for each in self.running if each.request_id == wanted), None) if wanted is not None else None

    def _admit(self, request: Request, match: Match, draft: _Draft) -> None:
        observer = self._first_observer(request)
        self.waiting.remove(request)
        self._policy.note_admitted(request, self.waiting)
        if match.draft_from and self._shapes[observer].catches_up:  # it comes in once it has filled its KV in
            observer = OFF
        drafter = observer if self._shapes[observer].has_kv else NOBODY
        holding = self.ledger.admit(match, len(request.tokens), request.request.cache_salt, drafter)
        request.drafting.observer, request.drafting.idle, request.drafting.on_trial = observer, 0, ""
        request.admitted(holding, match.computed_len, time.monotonic())
        self.num_cached_tokens += match.computed_len
        self.running.add(request)
        draft.deltas.append(PageDelta(holding.slot, 0, tuple(holding.table.pages)))
        draft.admits.append(
            Admit(
                slot=holding.slot,
                epoch=holding.epoch,
                request=request.request,
                tokens=np.asarray(request.tokens, dtype=np.int64),
                prompt_len=request.prompt_len,
                computed_len=match.computed_len,
                draft_from=match.draft_from,
                limit=request.limit,
            )
        )

    def _chunk(self, request: Request, budget: int, draft: _Draft) -> int:
        start = request.prefilled
        count = min(request.prefill_len - start, budget)
        request.prefilled += count
        holding = _holding(request)
        observer, is_last = request.drafting.observer, not request.is_prefilling
        draft.chunks.append(Chunk(holding.slot, holding.epoch, observer, start, count, is_last, request.num_prompt_logprobs))
        draft.prompts.append(request)
        return count

    # -- pressure -------------------------------------------------------------------------------------------------------

    def _make_way(self, paused: Sequence[Request]) -> None:
        """Name a victim where policy wants one. It leaves once its last step is settled; that step's tokens are kept."""
        victim = victim_of_pressure(self.running, paused, self.ledger)
        if victim is None and not paused and self.waiting and not self._must_wait(self.waiting[0]) and self._admissible() is None:
            victim = victim_of_priority(self.running, self.waiting)
        if victim is not None:
            victim.is_leaving = True

    def _nothing_planned(self) -> Launched | None:
        """A victim with nothing in flight leaves at once, and then there may be something to launch."""
        if any(each.is_leaving and not each.num_in_flight for each in self.running):
            return self.plan()
        return None

    def _retract(self, request: Request) -> None:
        self._give_back(request)
        request.retracted()
        self.num_retractions += 1
        self.waiting.add(request)

    def _give_back(self, request: Request) -> None:
        """Out of the running; what is settled of its work stays cached."""
        holding = _holding(request)
        self.running.remove(request)
        self._retires.append(Retire(holding.slot, holding.epoch))
        settled = request.prefilled if request.is_prefilling else len(request.tokens) - 1
        if settled > request.prefill_len:  # of what steps have decoded, what its drafter's own KV has for sure
            settled = max(request.prefill_len, settled - self._kv_behind)
        self.ledger.cache(holding, request.tokens, settled)
        self.ledger.release(holding)

    # -- launch ---------------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan, prompts: list[Request], rows: list[Request]) -> Launched:
        for request, row in zip(rows, plan.rows, strict=True):
            request.steps_in_flight.append(1 + min(row.num_nodes, self._shapes[row.drafter].depth))
        last = [request for request, chunk in zip(prompts, plan.chunks, strict=True) if chunk.is_last]
        for request in last:
            request.steps_in_flight.append(1)
        named = (*prompts, *rows)
        for request in named:
            self.ledger.launch(_holding(request))
        # From now on these pages may be shared: whoever reads them is in a later step.
        for request in prompts:
            holding = _holding(request)
            shared = self.ledger.cache(holding, request.tokens, request.prefilled)
            self._replaced.extend((holding, PageDelta(holding.slot, place, (page,))) for place, page in shared)
        return Launched(plan, (*last, *rows), named)


def _holding(request: Request) -> Holding:
    if request.holding is None:
        raise InvariantBroken(f"a planned request must hold a slot, but {request.request_id} does not")
    return request.holding
