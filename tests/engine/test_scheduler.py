"""Scheduling policy, without a device: budgets, order, admission, bounds under lag."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from slipstream.cache.ledger import NO_MATCH, Ledger
from slipstream.engine.plan import StepPlan
from slipstream.engine.policy import MAX_OVERTAKEN, Policy
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Launched, Scheduler
from slipstream.speculate.choice import OFF, Shape, Widest
from slipstream.types import EngineRequest, FinishReason, SamplingParams

ARRIVALS = itertools.count()


def request(name: str, prompt_len: int, max_tokens: int = 8, shared: int = 0, **how: Any) -> Request:
    """A request whose first `shared` prompt tokens are those of any other, the rest its own."""
    params = SamplingParams(max_tokens=max_tokens)
    arrival = next(ARRIVALS)
    prompt = tuple(i if i < shared else 1000 * (arrival + 1) + i for i in range(prompt_len))
    return Request(EngineRequest(name, prompt, params, seed=0, **how), prompt_len + max_tokens, list(prompt), arrival)


def scheduler(
    *,
    num_slots: int = 4,
    num_pages: int = 64,
    page_size: int = 4,
    budget: int = 16,
    depth: int = 0,
    num_nodes: int = 0,
    policy: Policy | None = None,
) -> Scheduler:
    shapes = {"d": Shape(depth, num_nodes, 1 + num_nodes), OFF: Shape(0, 0, 1)}
    return Scheduler(Ledger(num_slots, num_pages, page_size, first_page=2), shapes, Widest(shapes, "d"), budget, policy)


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
    sched.enqueue(request("large", 36, max_tokens=4))  # 9 pages at once: must wait for the pool to be empty
    sched.enqueue(request("small", 1, max_tokens=1))
    admitted: list[str] = []
    while sched.waiting or sched.running:
        launched, plan = next_plan(sched)
        admitted.extend(admit.request.request_id for admit in plan.admits)
        settle(sched, launched)
    assert admitted == ["large", "small"]


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
    assert not sched.ledger.has_free_slot, "the slot is still named by a step in flight"
    settle(sched, launched)
    sched.ledger.check_balanced()


# -- the prefix cache -------------------------------------------------------------------------------------------------------


def run_out(sched: Scheduler) -> list[StepPlan]:
    """Step, one in flight, until nothing is left; the plans."""
    plans: list[StepPlan] = []
    before: Launched | None = None
    for _ in range(1000):
        launched = sched.plan()
        if before is not None:
            settle(sched, before)
        before = launched
        if launched is not None:
            plans.append(launched.plan)
        elif not sched.running and not sched.waiting:
            sched.ledger.check_balanced()
            return plans
    raise AssertionError("the scheduler must come to an end")


def test_a_cached_prefix_is_not_computed_again() -> None:
    sched = scheduler(budget=64)
    sched.enqueue(request("a", 22, shared=20))
    run_out(sched)
    sched.enqueue(request("b", 30, shared=20))
    (first, *_) = run_out(sched)
    assert [(c.start, c.num_tokens) for c in first.chunks] == [(20, 10)] and first.admits[0].computed_len == 20
    assert sched.num_cached_tokens == 20


def test_samples_of_a_prompt_wait_for_the_first_and_compute_one_token_each() -> None:
    sched = scheduler(budget=64)
    first = request("p#0", 22)
    sched.enqueue(first)
    for index in (1, 2):
        again = EngineRequest(f"p#{index}", first.request.prompt_token_ids, first.request.params, index, parent_id="p#0")
        sched.enqueue(Request(again, first.limit, list(again.prompt_token_ids), next(ARRIVALS)))
    one, two, *_ = run_out(sched)
    assert [(c.start, c.num_tokens) for c in one.chunks] == [(0, 22)]
    assert [(c.start, c.num_tokens) for c in two.chunks] == [(21, 1), (21, 1)] and len(two.page_copies) == 2
    pages = {delta.pages[:5] for delta in two.page_deltas if delta.start == 0}
    assert len(pages) == 1, "the full pages of the prompt are one copy"


def test_a_cache_aware_order_prefers_what_is_cached_but_starves_nobody() -> None:
    sched = scheduler(num_slots=1, budget=64, policy=Policy("cache-aware"))
    sched.enqueue(request("warm", 22, shared=20, max_tokens=1))
    run_out(sched)
    sched.enqueue(request("cold", 22, max_tokens=1))
    for number in range(MAX_OVERTAKEN + 4):
        sched.enqueue(request(f"like {number}", 22, shared=20, max_tokens=1))
    order = [admit.request.request_id for plan in run_out(sched) for admit in plan.admits]
    assert order.index("cold") == MAX_OVERTAKEN


# -- pressure ---------------------------------------------------------------------------------------------------------------


def under_pressure(**how: Any) -> Scheduler:
    return scheduler(budget=64, policy=Policy(headroom_tokens=0), **how)


def test_the_last_in_rank_is_retracted_for_a_row_that_outranks_it() -> None:
    sched = under_pressure(num_pages=6, page_size=4)
    old, young = request("old", 4, max_tokens=18), request("young", 4, max_tokens=18)  # 6 pages each
    sched.enqueue(old)
    sched.enqueue(young)
    left = None
    for _ in range(40):
        launched = sched.plan()
        if launched is None:
            break
        settle(sched, launched)
        if young.num_retractions and left is None:
            left = len(young.tokens)
            assert young.holding is None and old.holding is not None, "the oldest stays"
    assert sched.num_retractions == 1
    assert left is not None and left > 4, "what was settled is kept"
    assert len(old.tokens) == len(young.tokens) == 22
    sched.ledger.check_balanced()


def test_what_is_retracted_is_found_again_in_the_cache() -> None:
    sched = under_pressure(num_pages=8, page_size=4)
    for name in ("old", "young"):
        sched.enqueue(request(name, 4, max_tokens=20))
    plans = run_out(sched)
    resumed = [admit for plan in plans for admit in plan.admits if len(admit.tokens) > admit.prompt_len]
    assert len(resumed) == sched.num_retractions >= 1
    assert resumed[0].prompt_len == 4 and resumed[0].limit == 24


def test_a_retraction_waits_until_the_victims_last_step_is_settled() -> None:
    sched = under_pressure(num_pages=4, page_size=4)
    for name in ("old", "young"):
        sched.enqueue(request(name, 4, max_tokens=8))
    before, launched = None, sched.plan()
    leaving = []
    while launched is not None or before is not None:
        if before is not None:
            settle(sched, before)
        before, launched = launched, sched.plan()
        for each in sched.running:
            if each.is_leaving:
                assert launched is None or each not in launched.named, "nothing more is launched for it"
                leaving.append(each.num_in_flight)
    assert leaving and max(leaving) == 1 and sched.num_retractions == 1


def test_nobody_is_retracted_while_a_row_is_about_to_end_by_length() -> None:
    """Both need a third page at once and one is left; the younger one ends with the steps in flight, so the older just waits."""
    sched = under_pressure(num_pages=4, page_size=4)
    long, short = request("long", 4, max_tokens=12), request("short", 4, max_tokens=5)
    sched.enqueue(long)
    sched.enqueue(short)
    before, paused = None, []
    while sched.running or sched.waiting or before is not None:
        launched = sched.plan()
        paused.append(sched.num_paused)
        if before is not None:
            settle(sched, before)
        before = launched
    assert max(paused) == 1 and sched.num_retractions == 0
    assert len(short.tokens) == 9 and len(long.tokens) == 16


def test_draft_nodes_give_way_before_anybody_pauses() -> None:
    sched = under_pressure(num_pages=3, page_size=4, depth=3, num_nodes=3)
    sched.enqueue(request("a", 5, max_tokens=9))
    settle(sched, next_plan(sched)[0])
    launched, plan = next_plan(sched)
    assert [row.num_nodes for row in plan.rows] == [3], "positions 5 to 8: the third page"
    settle(sched, launched)
    sched = under_pressure(num_pages=3, page_size=4, depth=3, num_nodes=3)
    sched.enqueue(request("a", 5, max_tokens=9))
    settle(sched, next_plan(sched)[0])
    sched.ledger.admit(NO_MATCH, 1, "", "")  # somebody else has the third page
    _, plan = next_plan(sched)
    assert [row.num_nodes for row in plan.rows] == [0] and sched.num_paused == 0


def test_priorities_decide_who_is_admitted_and_who_gives_way() -> None:
    sched = under_pressure(num_slots=1)
    sched.enqueue(request("first", 4, max_tokens=30))
    settle(sched, next_plan(sched)[0])
    sched.enqueue(request("late", 4, max_tokens=2))
    sched.enqueue(request("urgent", 4, max_tokens=2, priority=-1))
    order = [admit.request.request_id for plan in run_out(sched) for admit in plan.admits]
    assert order == ["urgent", "first", "late"], "the running one gives way, resumes by its rank, and the late one comes last"


def test_admission_leaves_the_running_ones_room_to_grow() -> None:
    sched = scheduler(num_pages=8, page_size=4, policy=Policy(headroom_tokens=8))
    sched.enqueue(request("a", 4, max_tokens=28))
    settle(sched, next_plan(sched)[0])
    sched.enqueue(request("b", 8, max_tokens=20))
    _, plan = next_plan(sched)
    assert [admit.request.request_id for admit in plan.admits] == ["b"]  # a: 1 + 2 more, b: 2 + 2 more, of 8
    sched.enqueue(request("c", 4, max_tokens=4))
    _, plan = next_plan(sched)
    assert not plan.admits


def test_a_request_can_cap_its_drafts() -> None:
    sched = scheduler(budget=64, depth=7, num_nodes=7)
    for cap in (None, 0, 2):
        one = request(str(cap), 4, max_tokens=40)
        one.request = replace(one.request, params=replace(one.request.params, speculate=cap))
        sched.enqueue(one)
    settle(sched, next_plan(sched)[0])
    _, plan = next_plan(sched)
    assert [row.num_nodes for row in plan.rows] == [7, 0, 2]
