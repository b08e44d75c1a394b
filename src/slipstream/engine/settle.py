"""Settle: the only writer of results. Takes what a step committed, cuts it once, and tells the front.

Text, ids, logprobs, usage and counts all follow from the one cut (engine/cut.py). A row whose request has ended meanwhile (it was
found to have ended one step late, or was aborted) is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slipstream.engine.cut import Cut, cut
from slipstream.engine.plan import StepLogprobs, StepResult, VerifyRow
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Launched, Scheduler
from slipstream.engine.stats import EngineStats
from slipstream.types import EngineOutput, EngineRequest, FinishReason, TokenLogprobs


class StopText(Protocol):
    """Finds stop strings token by token; text/detokenize.py has the one implementation."""

    def push(self, token_id: int) -> str | None:
        """Feed the next output token; returns the stop string it completes, if any."""
        ...


StopTextFactory = Callable[[EngineRequest], StopText]


class Settler:
    """Applies step results to requests.

    Args:
        scheduler: told of every request that ends.
        stats: counters to advance.
        eos_token_ids: ids that end an answer unless it ignores them.
        stop_text: makes the stop string finder of a request that has stop strings.
    """

    def __init__(
        self, scheduler: Scheduler, stats: EngineStats, eos_token_ids: tuple[int, ...], stop_text: StopTextFactory
    ) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._eos = frozenset(eos_token_ids)
        self._stop_text = stop_text
        self._finders: dict[str, StopText] = {}

    def settle(self, launched: Launched, result: StepResult) -> list[EngineOutput]:
        """Take one step's result; returns the news of each request that is still there."""
        self._scheduler.settled(launched)
        outputs: list[EngineOutput] = []
        for row, request in enumerate(launched.sampled):
            request.steps_in_flight.popleft()
            if request.finish_reason is None:
                planned = launched.plan.sampled[row]
                drafted = planned.num_nodes if isinstance(planned, VerifyRow) else 0
                outputs.append(self._settle_row(request, row, result, drafted))
        return outputs

    def end(self, request: Request, reason: FinishReason, error: tuple[str, str] | None = None) -> EngineOutput:
        """End a request from outside a step (abort, error); its rows in flight will be dropped."""
        request.finish_reason = reason
        self._finders.pop(request.request_id, None)
        self._scheduler.retire(request)
        return EngineOutput(
            request.request_id, finish_reason=reason, error=error, num_prompt_tokens=request.prompt_len
        )
