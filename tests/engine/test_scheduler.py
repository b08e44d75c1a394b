"""Scheduling policy, without a device: budgets, order, admission, bounds under lag."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.cache.ledger import Ledger
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import Request
from slipstream.engine.scheduler import DraftLimits, Launched, Scheduler
from slipstream.types import EngineRequest, FinishReason, SamplingParams


def request(name: str, prompt_len: int, max_tokens: int = 8) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    prompt = tuple(range(1, prompt_len + 1))
    return Request(EngineRequest(name, prompt, params, seed=0), prompt_len + max_tokens, list(prompt), arrival=0)


def scheduler(
    *, num_slots: int = 4, num_pages: int = 64, page_size: int = 4, budget: int = 16, depth: int = 0, num_nodes: int = 0
) -> Scheduler:
    limits = DraftLimits(depth, num_nodes, 1 + num_nodes)
    return Scheduler(Ledger(num_slots, num_pages, page_size, first_page=2), {"d": limits}, "d", budget)


def settle(sched: Scheduler, launched: Launched, accepted: int = 1) -> None:
    """Pretend each sampled row committed `accepted` tokens (at most to its limit)."""
    sched.settled(launched)
    for req in launched.sampled:
        req.steps_in_flight.popleft()
        if req.finish_reason is None:
            req.tokens.extend([7] * min(accepted, req.limit - len(req.tokens)))
            if len(req.tokens) == req.limit:
                req.finish_reason = FinishReason.LENGTH
                sched.retire(req)


def next_plan(sched: Scheduler) -> tuple[Launched, StepPlan]:
    launched = sched.plan()
    assert launched is not None
    return launched, launched.plan


def test_the_scheduler_imports_no_torch() -> None:
    code = "import sys, slipstream.engine.scheduler as s; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    sched = scheduler(budget=16)
    sched.enqueue(request("a", 40))
    seen = []
    for _ in range(3):
        launched, plan = next_plan(sched)
        seen.append([(c.start, c.num_tokens, c.is_last) for c in plan.chunks])
        settle(sched, launched)
    assert seen == [[(0, 16, False)], [(16, 16, False)], [(32, 8, True)]]


def test_decode_rows_and_prompt_chunks_share_a_step() -> None:
    sched = scheduler(budget=16)
    sched.enqueue(request("a", 4))
    settle(sched, next_plan(sched)[0])
    sched.enqueue(request("b", 40))
    launched, plan = next_plan(sched)
    assert [row.slot for row in plan.rows] == [1] and [c.num_tokens for c in plan.chunks] == [15]
    assert plan.num_tokens == 16
    settle(sched, launched)


def test_draft_nodes_count_in_the_budget_and_leave_prompts_a_share() -> None:
    sched = scheduler(budget=16, depth=7, num_nodes=7)
    for name in "ab":
        sched.enqueue(request(name, 2, max_tokens=40))
    settle(sched, next_plan(sched)[0])
    sched.enqueue(request("long", 100))
    for _ in range(3):
        launched, plan = next_plan(sched)
        assert plan.num_tokens <= 16
        assert sum(c.num_tokens for c in plan.chunks) >= 4
        assert all(row.num_nodes == 5 for row in plan.rows)
        settle(sched, launched)


def test_with_fewer_tokens_than_rows_every_row_gets_its_turn() -> None:
    sched = scheduler(num_slots=5, budget=4)
    for name in "abcde":
        sched.enqueue(request(name, 1, max_tokens=20))
    for _ in range(3):
        settle(sched, next_plan(sched)[0])
    turns: dict[int, int] = {}
    for _ in range(10):
        launched, plan = next_plan(sched)
        for row in plan.rows:
            turns[row.slot] = turns.get(row.slot, 0) + 1
        settle(sched, launched)
    assert len(turns) == 5 and max(turns.values()) - min(turns.values()) <= 2


def test_nobody_overtakes_a_large_request() -> None:
    sched = scheduler(num_pages=10, page_size=4)
    sched.enqueue(request("running", 4, max_tokens=16))  # 5 pages
    settle(sched, next_plan(sched)[0])
    sched.enqueue(request("large", 20, max_tokens=20))  # 10 pages: must wait for the pool to be empty
    sched.enqueue(request("small", 1, max_tokens=1))
    while sched.waiting:
        launched, plan = next_plan(sched)
        admitted = [admit.request.request_id for admit in plan.admits]
        assert admitted in ([], ["large"]), "small must not overtake"
        settle(sched, launched)
        if admitted:
            break
    assert [r.request_id for r in sched.running] == ["large"]


def test_a_finish_by_length_is_foreseen() -> None:
    sched = scheduler()
    sched.enqueue(request("a", 4, max_tokens=2))
    first, _ = next_plan(sched)  # samples token 1, unsettled
    second, plan = next_plan(sched)  # samples token 2: the limit
    assert len(plan.rows) == 1
    assert sched.plan() is None, "no step is launched for a row that is surely done"
    settle(sched, first)
    settle(sched, second)
    sched.ledger.check_balanced()


@pytest.mark.parametrize("lag_steps", [0, 1, 2])
def test_reservations_cover_all_steps_in_flight(lag_steps: int) -> None:
    """From the settled length a row reserves f * (depth + 1) + max_writes, within its limit."""
    depth, page = 3, 1
    sched = scheduler(page_size=page, num_pages=200, budget=64, depth=depth, num_nodes=depth)
    sched.enqueue(request("a", 5, max_tokens=100))
    settle(sched, next_plan(sched)[0])
    (row_request,) = sched.running
    launched = [next_plan(sched)[0] for _ in range(lag_steps)]
    _, plan = next_plan(sched)
    settled_len = len(row_request.tokens) - 1
    assert plan.rows[0].max_len == settled_len + lag_steps * (depth + 1)
    assert row_request.holding is not None
    assert len(row_request.holding.table.pages) == plan.rows[0].max_len + 1 + depth
    assert len(launched) == lag_steps


def test_bounds_never_pass_the_limit() -> None:
    sched = scheduler(page_size=1, budget=64, depth=7, num_nodes=7)
    sched.enqueue(request("a", 5, max_tokens=6))
    launched = [next_plan(sched)[0] for _ in range(4)]
    (row_request,) = sched.running
    assert row_request.holding is not None
    assert all(row.max_len <= 10 for step in launched for row in step.plan.rows)
    assert len(row_request.holding.table.pages) <= 11
    assert all(row.max_len + row.num_nodes + 1 <= 11 + 7 for step in launched for row in step.plan.rows)


def test_an_abort_while_waiting_and_while_running() -> None:
    sched = scheduler(num_slots=1)
    first, second = request("a", 4), request("b", 4)
    sched.enqueue(first)
    sched.enqueue(second)
    launched, _ = next_plan(sched)
    for req in (second, first):
        req.finish_reason = FinishReason.ABORT
        sched.retire(req)
    assert not sched.running and not sched.waiting
    assert not sched.ledger.can_admit(1), "the slot is still named by a step in flight"
    settle(sched, launched)
    sched.ledger.check_balanced()
