"""The scheduler: policy and nothing else. Decides who runs, with how many prompt tokens and how many draft nodes.

It imports no torch and never waits: what the device has not told yet it bounds from above.

A step's token budget is dealt out in this order:
    1. a root for each decoding row (round-robin where the budget is smaller than the rows),
    2. a share for prompts, so that a long prompt goes on however wide the drafts are,
    3. draft nodes, evenly, from what is left after the prompts.
Requests are admitted in order of arrival, each only when the ledger can promise all it may ever need: nobody overtakes, so nobody
starves, and a running request is never short of a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.cache.ledger import Ledger
from slipstream.engine.plan import Admit, Chunk, PageDelta, Retire, StepPlan, VerifyRow
from slipstream.engine.request import Request
from slipstream.errors import InvariantBroken

PROMPT_SHARE = 4  # a quarter of the budget goes to waiting prompts before any draft node


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What the scheduler must know of a drafter."""

    depth: int
    num_nodes: int
    max_writes: int


@dataclass(frozen=True, slots=True)
class Launched:
    """A submitted plan with the requests its sampled rows belong to (in order) and everyone it names."""

    plan: StepPlan
    sampled: tuple[Request, ...]
    named: tuple[Request, ...]


class Scheduler:
    """Queues, admission and the plan of each step.

    Args:
        ledger: slots and pages.
        drafters: name -> limits; must hold `drafter`.
        drafter: which one requests draft with.
        max_num_batched_tokens: most tokens the target computes in a step, at least 2.
    """

    def __init__(
        self, ledger: Ledger, drafters: Mapping[str, DraftLimits], drafter: str, max_num_batched_tokens: int
    ) -> None:
        self.ledger = ledger
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._drafter = drafter
        self._limits = drafters[drafter]
        self._budget = max_num_batched_tokens
        self._retires: list[Retire] = []
        self._step = 0
        self._turn = 0

    def enqueue(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.waiting.append(request)

    def retire(self, request: Request) -> None:
        """A request has ended (finish_reason is set): out of the queues; slot and pages go back once nothing names them."""
        holding = request.holding
        if holding is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._retires.append(Retire(holding.slot, holding.epoch))
        self.ledger.release(holding)

    def settled(self, launched: Launched) -> None:
        """A step's result has been taken: everything it named is in one step less."""
        for request in launched.named:
            if request.holding is None:
                raise InvariantBroken(f"a step must only name admitted requests, but {request.request_id} has no slot")
            self.ledger.settle(request.holding)

    def plan(self) -> Launched | None:
        """The next step, or None when there is nothing to launch right now."""
        decoding = [r for r in self.running if not r.is_prefilling and not r.surely_done]
        prompts_wait = any(r.is_prefilling for r in self.running) or self._can_admit()
        roots = self._budget - prompts_wait  # a prompt always gets at least one token
        if len(decoding) > roots:
            start = self._turn % len(decoding)
            decoding = (decoding[start:] + decoding[:start])[:roots]
            self._turn += roots
        budget = self._budget - len(decoding)

        admits, chunks, chunk_requests, deltas = self._plan_prompts(budget, bool(decoding))
        budget -= sum(chunk.num_tokens for chunk in chunks)
        nodes = self._nodes_per_row(decoding, budget)
        rows = [self._row(request, count, deltas) for request, count in zip(decoding, nodes, strict=True)]
        if not chunks and not rows:
            return None

        self._step += 1
        retires, self._retires = tuple(self._retires), []
        plan = StepPlan(
            step=self._step,
            retires=retires,
            admits=tuple(admits),
            page_deltas=tuple(deltas),
            chunks=tuple(chunks),
            rows=tuple(rows),
        )
        return self._launch(plan, chunk_requests, decoding)

    def _plan_prompts(
        self, budget: int, decoding: bool
    ) -> tuple[list[Admit], list[Chunk], list[Request], list[PageDelta]]:
        """Chunks of admitted requests first, then of new ones, in order of arrival."""
        if decoding and self._limits.num_nodes:
            budget = min(budget, max(1, self._budget // PROMPT_SHARE))
        admits: list[Admit] = []
        chunks: list[Chunk] = []
        requests: list[Request] = []
        deltas: list[PageDelta] = []
        for request in self.running:
            if request.is_prefilling and budget > 0:
                chunks.append(self._chunk(request, budget, deltas))
                requests.append(request)
                budget -= chunks[-1].num_tokens
        while budget > 0 and self._can_admit():
            request = self.waiting.popleft()
            admits.append(self._admit(request))
            chunks.append(self._chunk(request, budget, deltas))
            requests.append(request)
            budget -= chunks[-1].num_tokens
        return admits, chunks, requests, deltas

    def _can_admit(self) -> bool:
        return bool(self.waiting) and self.ledger.can_admit(self.waiting[0].limit)

    def _admit(self, request: Request) -> Admit:
        holding = request.holding = self.ledger.admit(request.limit)
        request.prefill_len = len(request.tokens)
        request.prefilled = 0
        self.running.append(request)
        return Admit(
            slot=holding.slot,
            epoch=holding.epoch,
            request=request.request,
            tokens=np.asarray(request.tokens, dtype=np.int64),
            prompt_len=request.prompt_len,
            computed_len=0,
            limit=request.limit,
        )

    def _chunk(self, request: Request, budget: int, deltas: list[PageDelta]) -> Chunk:
        start = request.prefilled
        count = min(request.prefill_len - start, budget)
        slot, epoch = self._reserve(request, start + count, deltas)
        request.prefilled += count
        return Chunk(slot, epoch, self._drafter, start, count, not request.is_prefilling, request.num_prompt_logprobs)

    def _row(self, request: Request, num_nodes: int, deltas: list[PageDelta]) -> VerifyRow:
        max_len = request.max_committed_len
        writes = max(1 + num_nodes, self._limits.max_writes if num_nodes else 1)
        slot, epoch = self._reserve(request, min(max_len + writes, request.limit), deltas)
        return VerifyRow(slot, epoch, self._drafter, num_nodes, max_len)

    def _reserve(self, request: Request, num_tokens: int, deltas: list[PageDelta]) -> tuple[int, int]:
        holding = request.holding
        if holding is None:
            raise InvariantBroken(f"a planned request must hold a slot, but {request.request_id} does not")
        start = len(holding.table.pages)
        if pages := self.ledger.reserve(holding, num_tokens):
            deltas.append(PageDelta(holding.slot, start, pages))
        return holding.slot, holding.epoch

    def _nodes_per_row(self, decoding: list[Request], budget: int) -> list[int]:
        """Deal draft nodes evenly; a row never gets more than it may still commit (its bonus comes on top)."""
        if not decoding:
            return []
        share = min(self._limits.num_nodes, budget // len(decoding))
        return [min(share, r.limit - len(r.tokens) - len(r.steps_in_flight) - 1) for r in decoding]

    def _launch(self, plan: StepPlan, chunk_requests: list[Request], decoding: list[Request]) -> Launched:
        for request, row in zip(decoding, plan.rows, strict=True):
            request.steps_in_flight.append(1 + min(row.num_nodes, self._limits.depth))
        last = [request for request, chunk in zip(chunk_requests, plan.chunks, strict=True) if chunk.is_last]
        for request in last:
            request.steps_in_flight.append(1)
        named = (*chunk_requests, *decoding)
        for request in named:
            if request.holding is not None:
                self.ledger.launch(request.holding)
        return Launched(plan, (*last, *decoding), named)
