"""The answers to one call: several prompts, `n` answers each, as one stream of deltas.

choice index = prompt's place * n + answer's place
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.errors import EngineError, SlipstreamError
from slipstream.frontend.assemble import Assembler, Delta
from slipstream.frontend.model_info import ModelInfo
from slipstream.frontend.prepare import Prepared
from slipstream.observe.metrics import Metrics
from slipstream.observe.timing import AnswerTimes
from slipstream.server.bridge import OutputStream
from slipstream.server.errors import ClientGone
from slipstream.types import DraftCounts, EngineOutput, FinishReason

Receive = Callable[[], Awaitable[Mapping[str, Any]]]


class Answers:
    """Answers that are being computed. An asynchronous iterator over the deltas that have come in since it was last asked.

    Raises the error of the first answer that fails and aborts the others; `ClientGone` once the client has hung up. Close it
    whatever happens.

    Args:
        prompts: the prompts, checked.
        stream: news of all their requests.
        info: the model.
        metrics: told of every token.
        arrived: when the call came in, by `time.monotonic`.

    Attributes:
        prompts: the prompts with what is known of their answers.
    """

    def __init__(
        self, prompts: Sequence[Prepared], stream: OutputStream, info: ModelInfo, metrics: Metrics, arrived: float
    ) -> None:
        self._stream = stream
        self._metrics = metrics
        self._arrived_s = arrived
        self.prompts = [Assembler(prompt, info) for prompt in prompts]
        self._places = {
            request.request_id: (assembler, place * prompt.params.n)
            for place, (prompt, assembler) in enumerate(zip(prompts, self.prompts, strict=True))
            for request in prompt.requests
        }
        self._unfinished = set(self._places)
        self._times = {request_id: AnswerTimes(arrived) for request_id in self._places}
        self._held: dict[Assembler, list[Delta]] = {}  # news of later answers, while the prompt's logprobs are still to come
        self._first: list[Delta] | None = None
        self._error: SlipstreamError | None = None
        self._has_hung_up = False
        self._is_closed = False
        for prompt in prompts:
            metrics.started(len(prompt.prompt_token_ids))

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(assembler.num_prompt_tokens for assembler in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Of all answers so far."""
        return sum(assembler.num_output_tokens for assembler in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that needed no computation."""
        return sum(assembler.num_cached_tokens for assembler in self.prompts)

    def drafting(self) -> dict[str, DraftCounts]:
        """What drafts came to in the answers that have ended, by drafter."""
        found: dict[str, DraftCounts] = {}
        for assembler in self.prompts:
            for output in assembler.outputs:
                for name, counts in output.drafting.items():
                    found.setdefault(name, DraftCounts()).merge(counts)
        return found

    def log_fields(self) -> dict[str, object]:
        """What the log says of these answers together: the longest wait, the first token of any, tokens a second of all."""
        reasons = {output.finish_reason or "none" for assembler in self.prompts for output in assembler.outputs}
        begun = [times for times in self._times.values() if times.num_tokens]
        last_s = max((times.last_s for times in begun), default=self._arrived_s)
        num_retractions = sum(times.num_retractions for times in self._times.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "queue_s": round(max(times.queue_s for times in begun), 4) if begun else None,
            "ttft_s": round(min(times.first_s for times in begun) - self._arrived_s, 4) if begun else None,
            "tokens_per_s": round(self.num_output_tokens / (last_s - self._arrived_s), 2) if last_s > self._arrived_s else None,
            "finish": ",".join(sorted(reasons)),
            "retractions": num_retractions or None,
        }

    def whole(self) -> list[Delta]:
        """All answers as they are now, in order of choice index."""
        return [
            Delta(
                place,
                output.text,
                tuple(output.token_ids),
                None if output.logprobs is None else tuple(output.logprobs),
                output.finish_reason,
                output.stop_reason,
            )
            for place, output in enumerate(output for assembler in self.prompts for output in assembler.outputs)
        ]

    async def first(self) -> None:
        """Wait for the first news: what is refused by the engine is known then, and an HTTP status can still say so."""
        self._first = await self._next()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> list[Delta]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if not self._unfinished and self._error is None:
            raise StopAsyncIteration
        return await self._next()

    def close(self) -> None:
        """Abort what is still running."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stream.close()
        for _ in self._unfinished:
            self._metrics.failed("abort")

    def fail(self, error: SlipstreamError) -> None:
        """Abort what is still running; whoever iterates gets `error`."""
        self._stream.fail(error)

    @contextlib.asynccontextmanager
    async def until_hang_up(self, receive: Receive) -> AsyncIterator[None]:
        """Inside, a client that hangs up aborts the answers. `receive` is ASGI's, with the body already read."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._has_hung_up = True
            self.close()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()

    async def _next(self) -> list[Delta]:
        if self._error is not None:
            raise self._error
        deltas: list[Delta] = []
        while not deltas:
            deltas = self._taken(await self._news())
        return deltas

    async def _news(self) -> list[EngineOutput]:
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            if self._has_hung_up:
                raise ClientGone from None
            raise EngineError("every answer must end with a reason, but got none") from None

    def _taken(self, news: Sequence[EngineOutput]) -> list[Delta]:
        now = time.monotonic()
        deltas: list[Delta] = []
        for output in news:
            assembler, first_place = self._places[output.request_id]
            try:
                delta = assembler.push(output)
                if output.finish_reason is FinishReason.ABORT:
                    raise EngineError("an answer must not be cut off, but the engine aborted it")
            except SlipstreamError as error:
                self._unfinished.discard(output.request_id)
                self._metrics.failed(error.code or "error")
                if not deltas:
                    raise
                self._error = error  # what came before it is handed out first
                break
            self._measure(output, delta, now)
            delta = replace(delta, index=first_place + delta.index) if first_place else delta
            if assembler.awaits_prompt_logprobs:
                self._held.setdefault(assembler, []).append(delta)
            else:
                deltas += [delta, *self._held.pop(assembler, ())]
        return deltas

    def _measure(self, output: EngineOutput, delta: Delta, now_s: float) -> None:
        times = self._times[output.request_id]
        self._metrics.output(times, output, now_s)
        if delta.finish_reason is not None:
            self._unfinished.discard(output.request_id)
            self._metrics.finished(times, delta.finish_reason, now_s)
