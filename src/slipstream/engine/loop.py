"""THE loop. One for every path: plain or speculative, synchronous or overlapped.

    lag 0    plan N ─ submit N ─ settle N
    lag 1    plan N ─ submit N ─ settle N-1           the device runs N while the host settles N-1 and plans N+1

    host     │plan 1│plan 2│settle 1│plan 3│settle 2│plan 4│settle 3
    device          │──── step 1 ───│──── step 2 ───│──── step 3 ───│

The lag is the number of unsettled steps the loop leaves behind; nothing else depends on it.
"""

from __future__ import annotations

import time
from collections import deque

from slipstream.engine.compat import check_request
from slipstream.engine.executor import Executor, StepHandle
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Launched, Scheduler
from slipstream.engine.settle import Settler, StopTextFactory
from slipstream.engine.stats import EngineStats
from slipstream.errors import InvalidParameter, NeverFits, SlipstreamError
from slipstream.types import EngineOutput, EngineRequest, FinishReason


class Engine:
    """Requests in, tokens out. Not thread-safe: one thread, the scheduler thread, calls it.

    Args:
        scheduler: queues and policy.
        executor: where steps run.
        lag: unsettled steps to leave behind, 0 or 1.
        context_len: most tokens, prompt and output, of a request.
        vocab_size: ids at or above it are refused.
        eos_token_ids: ids that end an answer.
        stop_text: makes the stop string finder of a request.
        debug: check that nothing is held whenever nothing runs.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        lag: int,
        context_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        stop_text: StopTextFactory,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.lag = lag
        self.context_len = context_len
        self.vocab_size = vocab_size
        self._executor = executor
        self._debug = debug
        self._stats = EngineStats(num_pages=scheduler.ledger.num_pages, last_progress_s=time.monotonic())
        self._settler = Settler(scheduler, self._stats, eos_token_ids, stop_text)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[Launched, StepHandle]] = deque()
        self._outputs: list[EngineOutput] = []
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._requests or self._in_flight or self._outputs)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and have not ended."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. A bad one is answered with an error output and never reaches the device.

        Raises `InvalidParameter` for an id that is still running: an output under it would end the wrong request.
        """
        if request.request_id in self._requests:
            raise InvalidParameter("request_id", "be unique among unfinished requests", request.request_id)
        try:
            limit = self._checked_limit(request)
        except SlipstreamError as error:
            self._outputs.append(_refused(request, error))
            return
        self._arrivals += 1
        queued = Request(request, limit, list(request.prompt_token_ids), self._arrivals, time.monotonic())
        self._requests[request.request_id] = queued
        self.scheduler.enqueue(queued)

    def abort(self, request_id: str) -> None:
        """End a request, at any stage, with one ABORT output; an unknown or finished id is ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._outputs.append(self._settler.end(request, FinishReason.ABORT))

    def step(self) -> list[EngineOutput]:
        """Launch the next step if there is one, settle what is older than the lag, and return the news."""
        started = time.perf_counter()
        launched = self.scheduler.plan()
        if launched is not None:
            self._in_flight.append((launched, self._executor.submit(launched.plan)))
        self._stats.host_s += time.perf_counter() - started
        keep = self.lag if launched is not None else max(0, len(self._in_flight) - 1)
        while len(self._in_flight) > keep:
            self._settle_oldest()
        if self._debug and not self._in_flight and not self._requests:
            self.scheduler.ledger.check_balanced()
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """Counters, brought up to date."""
        stats, scheduler = self._stats, self.scheduler
        stats.num_running = self.num_running
        stats.num_waiting = self.num_waiting
        stats.num_paused = scheduler.num_paused
        stats.num_retractions = scheduler.num_retractions
        stats.num_cached_tokens = scheduler.num_cached_tokens
        stats.num_free_pages = scheduler.ledger.num_free_pages
        stats.num_evictable_pages = scheduler.ledger.num_evictable_pages
        return stats

    def reset_prefix_cache(self) -> None:
        """Forget all cached work; running requests go on and share nothing more."""
        self.scheduler.ledger.reset_cache()

    def close(self) -> None:
        """Stop the executor; unfinished requests are lost."""
        self._executor.close()

    def _settle_oldest(self) -> None:
        # A step that fails stays the oldest one: the device is lost, and every later step says so again.
        launched, handle = self._in_flight[0]
        started = time.perf_counter()
        result = handle.result()
        settling = time.perf_counter()
        news = self._settler.settle(launched, result)
        self._in_flight.popleft()
        for output in news:
            if output.finish_reason is not None:
                del self._requests[output.request_id]
        self._outputs.extend(news)
        stats = self._stats
        stats.wait_s += settling - started
        stats.host_s += time.perf_counter() - settling
        stats.device_s += result.device_s
        for name, seconds in result.propose_s.items():
            stats.drafter(name).propose_s += seconds
        for name, seconds in result.observe_s.items():
            stats.drafter(name).observe_s += seconds
        stats.num_steps += 1
        stats.num_prompt_tokens += sum(chunk.num_tokens for chunk in launched.plan.chunks)
        stats.last_progress_s = time.monotonic()

    def _checked_limit(self, request: EngineRequest) -> int:
        """Check what the front has checked once more, where a bad value would hurt; returns the request's limit."""
        check_request(request, self.vocab_size)
        prompt_len, room = len(request.prompt_token_ids), self.context_len - len(request.prompt_token_ids)
        max_tokens = request.params.max_tokens
        if prompt_len < 1 or room < (0 if max_tokens == 0 else 1):
            raise InvalidParameter("prompt", f"have 1 to {self.context_len - 1} tokens", f"{prompt_len} tokens")
        ledger = self.scheduler.ledger
        pool = ledger.num_pages * ledger.page_size
        if max_tokens is None:
            max_tokens = max(1, pool - prompt_len)  # an answer without a bound of its own ends where the pool ends
        limit = prompt_len + min(max_tokens, room)
        if not ledger.fits_ever(limit):
            raise NeverFits(
                f"a request must fit the KV pool of {pool} tokens, but prompt and max_tokens need {limit}",
                hint="lower max_tokens, or give the server more pages (--num-pages or --kv-cache-memory-bytes)",
            )
        return limit


def _refused(request: EngineRequest, error: SlipstreamError) -> EngineOutput:
    return EngineOutput(
        request.request_id,
        finish_reason=FinishReason.ERROR,
        error=(type(error).__name__, str(error)),
        num_prompt_tokens=len(request.prompt_token_ids),
    )
