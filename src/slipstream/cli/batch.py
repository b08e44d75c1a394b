"""`run --batch`: many requests from a file, without a server that listens. They go through the server's own application.

    in.jsonl ─► lines without an answer ─► up to W at once ─► application ─► engine process ─► out.jsonl, as they finish

What a request may say, and what comes back, is therefore what HTTP would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from slipstream.cli.batch_files import Line, Todo, read_lines
from slipstream.cli.progress import progress
from slipstream.cli.table import duration_text
from slipstream.config import EngineConfig
from slipstream.errors import EngineBusy, EngineDead, InvalidRequest
from slipstream.server.app import create_app
from slipstream.server.serving import CHECKPOINT, Backend, Serving, new_id

REPORT_EVERY_S = 5.0  # on a terminal ten times a second
RETRY_S = 0.05
LINE_ROOM = 4096  # what a line may be longer than its body


def run_batch(config: EngineConfig, source: Path, out: Path, backend: Backend | None = None) -> int:
    """Answer every request of `source` that `out` has no answer for; returns the exit code: 1 where a line of `out` is an error.

    Ctrl-C, as `KeyboardInterrupt`, keeps what has been answered. Raises `ConfigError` for files that cannot be used and
    `EngineDead` where the engine ends; running it again goes on.
    """
    config = config.model_copy(update={"api_key": None})  # nobody is let in who could need one
    max_bytes = config.max_body_bytes + LINE_ROOM
    todo = Todo(source, out, max_bytes)
    with todo.file:
        if todo.num_done:
            failed = f", {todo.num_failed} of them failed" if todo.num_failed else ""
            print(f"batch: {todo.num_done} of {todo.num_lines} are in {out} already{failed}", file=sys.stderr)
        if todo.num_done == todo.num_lines:
            return int(todo.num_failed > 0)
        meter = Meter(todo.num_lines, todo.num_done)
        lines = (line for line in read_lines(source, max_bytes) if line in todo)
        try:
            asyncio.run(_Batch(config, backend or CHECKPOINT, lines, todo, meter).run())
        finally:
            meter.say(last=True)
            if meter.num_done < todo.num_lines:
                print("hint: the same command goes on from there", file=sys.stderr)
    return int(meter.num_failed + todo.num_failed > 0)


class Meter:
    """How far it is, on stderr."""

    def __init__(self, num_lines: int, num_done: int) -> None:
        self.num_done = num_done
        self.num_failed = 0
        self._num_lines = num_lines
        self._num_before = num_done
        self._num_tokens = 0
        self._started = self._said = time.perf_counter()
        self._is_terminal = sys.stderr.isatty()

    def start(self) -> None:
        """The model is loaded: time counts from now."""
        self._started = self._said = time.perf_counter()

    def answered(self, num_tokens: int, failed: bool) -> None:
        """One more line is written."""
        self.num_done += 1
        self.num_failed += failed
        self._num_tokens += num_tokens
        if time.perf_counter() - self._said >= (0.1 if self._is_terminal else REPORT_EVERY_S):
            self.say()

    def say(self, last: bool = False) -> None:
        """Write it."""
        self._said = time.perf_counter()
        text = self.text(self._said - self._started)
        print(
            f"\r\x1b[K{text}" if self._is_terminal else text, end="" if self._is_terminal and not last else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def text(self, seconds: float) -> str:
        """In a line: counts, tokens a second, time left."""
        parts = [f"batch: {self.num_done} of {self._num_lines}"]
        if self.num_failed:
            parts.append(f"{self.num_failed} failed")
        parts.append(f"{self._num_tokens / max(seconds, 1e-9):.1f} tok/s")
        left = self._num_lines - self.num_done
        if left and self.num_done > self._num_before:
            parts.append(f"{duration_text(seconds * left / (self.num_done - self._num_before))} left")
        return ", ".join(parts)


class _Batch:
    def __init__(self, config: EngineConfig, backend: Backend, lines: Iterator[Line], todo: Todo, meter: Meter) -> None:
        self._config = config
        self._backend = backend
        self._lines = lines
        self._file = todo.file
        self._meter = meter

    async def run(self) -> None:
        serving = Serving(self._config, self._backend)
        try:
            await self._load(serving)
            self._meter.start()
            # Some more than run at once, so that the next ones are already tokenized.
            width = self._config.max_num_seqs + min(self._config.max_queue, max(4, self._config.max_num_seqs // 4))
            transport = httpx.ASGITransport(create_app(serving), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
                workers = [asyncio.create_task(self._work(client)) for _ in range(width)]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)
        finally:
            await serving.stop()

    async def _load(self, serving: Serving) -> None:
        loading = asyncio.create_task(serving.load())
        try:
            with progress() as on_progress:
                while not loading.done():
                    await asyncio.wait([loading], timeout=0.2)
                    phase = serving.phases.current
                    if phase not in (None, "starting"):
                        on_progress(phase, serving.progress)
            await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def _work(self, client: httpx.AsyncClient) -> None:
        for line in self._lines:
            answer, num_tokens, failed = await _answer(client, line)
            self._file.write(msgspec.json.encode(answer) + b"\n")
            self._file.flush()  # what is counted as done is with the system, whatever happens to us
            self._meter.answered(num_tokens, failed)


async def _answer(client: httpx.AsyncClient, line: Line) -> tuple[dict[str, object], int, bool]:
    """The line to write, the tokens it took, and whether it is an error."""
    answer: dict[str, object] = {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": None, "error": None}
    problem = line.problem or _streams(line)
    if problem is not None:
        return {**answer, "error": {"code": "invalid_line", "message": problem.message, "line": line.number}}, 0, True
    response = await _post(client, line)
    body = msgspec.json.decode(response.content)
    answer["response"] = {
        "status_code": response.status_code,
        "request_id": response.headers.get("X-Request-Id", ""),
        "body": body,
    }
    usage = body.get("usage") or {}
    return answer, usage.get("completion_tokens", 0), response.status_code != 200


async def _post(client: httpx.AsyncClient, line: Line) -> httpx.Response:
    """The application's response. A full queue is waited for; an engine that has ended is nothing a line can be blamed for."""
    while True:
        response = await client.post(line.url, content=line.body, headers={"Content-Type": "application/json"})
        if response.status_code != EngineBusy.status:
            return response
        error = response.json()["error"]
        if error["code"] != EngineBusy.code:
            text, _, hint = error["message"].partition("\nhint: ")
            raise EngineDead(text, hint=hint or None)
        await asyncio.sleep(RETRY_S)


def _streams(line: Line) -> InvalidRequest | None:
    with contextlib.suppress(msgspec.DecodeError, RecursionError):  # the application says what is wrong with the body
        body = msgspec.json.decode(line.body)
        if isinstance(body, dict) and body.get("stream") is True:
            return InvalidRequest(f"line {line.number}: stream must be left out of a batch, but got true")
    return None
