"""Settle: the only writer of results. Takes what a step committed, cuts it once, and tells the front.

Text, ids, logprobs, usage and counts all follow from the one cut (engine/cut.py). A row whose request has ended meanwhile (it was
found to have ended one step late, or was aborted) is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from slipstream.engine.cut import Cut, cut
from slipstream.engine.plan import Chunk, ChunkLogprobs, StepLogprobs, StepResult
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Launched, Scheduler
from slipstream.engine.stats import EngineStats
from slipstream.errors import InvariantBroken
from slipstream.types import DraftCounts, EngineOutput, EngineRequest, FinishReason, TokenLogprobs


class StopText(Protocol):
    """Finds stop strings token by token; text/detokenize.py has the one implementation."""

    def push(self, token_id: int) -> str | None:
        """Feed the next output token; returns the stop string it completes, if any."""
        ...


StopTextFactory = Callable[[EngineRequest], StopText]

NOT_FINITE = (
    "the model's logits must be finite and leave a token that may come next, but got NaN or infinity (a wider --dtype, bfloat16 "
    "or float32, may help), or masks (allowed_token_ids, bad_words, min_tokens, a grammar) that together forbid every token"
)


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
        self._scheduler.learn(launched, result)
        outputs: list[EngineOutput] = []
        chunks = launched.plan.chunks
        for place, (request, chunk) in enumerate(zip(launched.named[: len(chunks)], chunks, strict=True)):
            if request.finish_reason is None and place in result.prompt_logprobs:
                outputs.extend(self._settle_prompt(request, chunk, result.prompt_logprobs[place]))
        first = len(launched.sampled) - len(launched.plan.rows)
        for row, request in enumerate(launched.sampled):
            request.steps_in_flight.popleft()
            if request.finish_reason is None:
                drafter = launched.plan.rows[row - first].drafter if row >= first else ""
                outputs.append(self._settle_row(request, row, drafter, result))
        return outputs

    def end(self, request: Request, reason: FinishReason, error: tuple[str, str] | None = None) -> EngineOutput:
        """End a request from outside a step (abort, error); its rows in flight will be dropped."""
        request.finish_reason = reason
        self._finders.pop(request.request_id, None)
        self._scheduler.retire(request)
        return _news(request, finish_reason=reason, error=error)

    def _settle_prompt(self, request: Request, chunk: Chunk, found: ChunkLogprobs) -> list[EngineOutput]:
        """Keep the logprobs of a chunk; a request whose prompt is computed anew overwrites what it had from there on."""
        if np.isnan(found.chosen).any():
            return [self.end(request, FinishReason.ERROR, ("NonFiniteLogits", NOT_FINITE))]
        if chunk.start > len(request.prompt_logprobs):
            raise InvariantBroken(
                f"chunks must be settled in order, but {request.request_id} got position {chunk.start} "
                f"behind {len(request.prompt_logprobs)}"
            )
        request.prompt_logprobs[chunk.start :] = _token_logprobs(found, chunk.num_prompt_logprobs or 0)
        return []

    def _settle_row(self, request: Request, row: int, drafter: str, result: StepResult) -> EngineOutput:
        accepted, sick = int(result.accept_lens[row]), int(result.non_finite[row])
        drafted = int(result.num_drafted[row])
        # What comes before the first token of sick logits is as good as ever, and may end the answer.
        run = result.tokens[row, : accepted if sick < 0 else sick].tolist()
        ended = self._cut(request, run, int(result.grammar_ends[row]))
        error = None
        if row in result.grammar_errors:  # its masks may have allowed anything: none of the run counts, however it ended
            ended = Cut(0, FinishReason.ERROR)
            error = ("EngineError", result.grammar_errors[row])
        elif sick >= 0 and ended.finish_reason is None:
            ended = Cut(len(run), FinishReason.ERROR)
            error = ("NonFiniteLogits", NOT_FINITE)
        kept = tuple(run[: ended.num_tokens])
        request.tokens.extend(kept)
        # The last kept token is the target's own, unless the cut fell inside the drafted part.
        agreed = min(len(kept), max(accepted - 1, 0))
        self._stats.num_output_tokens += len(kept)
        self._stats.num_drafts += drafted > 0
        self._stats.num_drafted += drafted
        self._stats.num_accepted += agreed
        if drafted:
            self._stats.drafter(drafter).add(drafted, agreed)
            request.draft_counts.setdefault(drafter, DraftCounts()).add(drafted, agreed)
        of_prompt = None
        if request.num_prompt_logprobs is not None:
            of_prompt, request.prompt_logprobs = tuple(request.prompt_logprobs), []
            request.has_prompt_logprobs = True
        if ended.finish_reason is not None:
            request.finish_reason = ended.finish_reason
            self._finders.pop(request.request_id, None)
            self._scheduler.retire(request)
        return _news(
            request,
            token_ids=kept,
            logprobs=_row_logprobs(result.logprobs, row, kept, request.request.params.logprobs or 0),
            finish_reason=ended.finish_reason,
            stop_reason=ended.stop_reason,
            error=error,
            prompt_logprobs=of_prompt,
        )

    def _cut(self, request: Request, run: list[int], grammar_end: int) -> Cut:
        params = request.request.params
        hits: list[tuple[int, str]] = []
        if params.stop:
            finder = self._finders.get(request.request_id)
            if finder is None:
                finder = self._finders[request.request_id] = self._stop_text(request.request)
            hits = [(index, stop) for index, token in enumerate(run) if (stop := finder.push(token)) is not None]
        return cut(
            run,
            num_before=request.num_output,
            max_output=request.limit - request.prompt_len,
            eos_token_ids=self._eos,
            stop_token_ids=params.stop_token_ids,
            stop_hits=hits,
            grammar_end=grammar_end,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
        )


def _news(request: Request, **news: Any) -> EngineOutput:
    """News of a request, with its counts so far."""
    return EngineOutput(
        request.request_id,
        num_prompt_tokens=request.prompt_len,
        num_cached_tokens=request.num_cached,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
        queue_s=request.queue_s or 0.0,
        num_retractions=request.num_retractions,
        drafting=request.draft_counts if request.finish_reason is not None else {},
        **news,
    )


def _row_logprobs(
    logprobs: StepLogprobs | None, row: int, kept: tuple[int, ...], num_top: int
) -> tuple[TokenLogprobs, ...] | None:
    if logprobs is None or row not in logprobs.rows:
        return None
    at = logprobs.rows[row]
    return tuple(
        TokenLogprobs(
            token,
            float(logprobs.chosen[at, place]),
            tuple(logprobs.top_ids[at, place, :num_top].tolist()),
            tuple(logprobs.top_logprobs[at, place, :num_top].tolist()),
            int(logprobs.ranks[at, place]),
        )
        for place, token in enumerate(kept)
    )


def _token_logprobs(found: ChunkLogprobs, num_top: int) -> list[TokenLogprobs]:
    columns = (found.tokens, found.chosen, found.top_ids[:, :num_top], found.top_logprobs[:, :num_top], found.ranks)
    return [
        TokenLogprobs(token, logprob, tuple(ids), tuple(logprobs), rank)
        for token, logprob, ids, logprobs, rank in zip(*(column.tolist() for column in columns), strict=True)
    ]
