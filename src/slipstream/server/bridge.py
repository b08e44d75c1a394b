"""The front's end of the engine process: starts it, sends requests, hands each answer's news to whoever waits for it.

    EngineClient ── Add, Abort ──►  PAIR socket in a private folder  ──►  engine process
         ▲                                                                     │
         └── one reader task: news by request id ──► OutputStream per prompt ◄─┘

The folder of the socket is removed as soon as both ends are connected: nothing is left behind, however either ends. When the
engine process ends, every stream fails with `EngineDead`, and `died` returns, for whoever runs the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from slipstream.config import EngineConfig
from slipstream.engine.stats import EngineStats
from slipstream.errors import ConfigError, EngineBusy, EngineDead, SlipstreamError, error_from
from slipstream.server import wire
from slipstream.server.engine_process import Start
from slipstream.types import EngineOutput, EngineRequest

ENGINE_FACTORY = "slipstream.engine.build:build_engine"
MAX_SOCKET_PATH = 100  # the system's limit is 104 to 108 bytes
LAST_WORDS_S = 0.3  # how long messages of a process that has ended are waited for
STOP_S = 2.0  # how long the process may take to stop
PING_S = 1.0
RESET_S = 10.0  # a step of a long prompt may come first
MAX_PINGS = 10  # without an answer: a loop that was stuck need not find thousands of them


class OutputStream:
    """News of some engine requests, in order; an asynchronous iterator over what has come in since it was last asked.

    Ends when each request has had its last news. Raises `EngineDead` where the engine process ends first. `close` aborts what is
    still running, at any time and more than once; the iterator then ends.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[set[str]], None]) -> None:
        self._open = set(request_ids)
        self._abort = abort
        self._pending: list[EngineOutput] = []
        self._error: SlipstreamError | None = None
        self._is_closed = False
        self._woken = asyncio.Event()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[EngineOutput]:
        while True:
            if self._is_closed:
                raise StopAsyncIteration
            if self._pending:
                news, self._pending = self._pending, []
                return news
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._woken.clear()
            await self._woken.wait()

    def close(self) -> None:
        """Abort what is still running. Nothing that comes in later is handed out."""
        self._is_closed = True
        if self._open:
            self._abort(self._open)
            self._open = set()
        self._woken.set()

    def fail(self, error: SlipstreamError) -> None:
        """Abort what is still running; the iterator raises `error` after the news that has come in."""
        self._error = self._error or error
        if self._open:
            self._abort(self._open)
            self._open = set()
        self._woken.set()

    def put(self, output: EngineOutput) -> bool:
        """Take news; true where it is the last of its request."""
        self._pending.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._woken.set()
        return output.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Liveness:
    """Whether the engine process is there, and for how long (seconds) its loop has made no progress although it should have."""

    is_alive: bool
    stalled_s: float


class EngineClient:
    """Runs an engine process and talks to it. Belongs to one event loop.

    Args:
        config: the engine's settings.
        factory: `module:function` that builds the engine, imported in the engine process.
    """

    def __init__(self, config: EngineConfig, factory: str = ENGINE_FACTORY) -> None:
        self._config = config
        self._factory = factory
        self._streams: dict[str, OutputStream] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._dead: asyncio.Future[SlipstreamError] = asyncio.get_running_loop().create_future()
        self._fatal: wire.Fatal | None = None
        self._is_stopping = False
        self._stats = wire.Stats(0, EngineStats(), 0.0)
        self._asked: dict[int, float] = {}  # pings without an answer -> when they were sent
        self._next_ping = 1
        self._answered = asyncio.Event()
        self._on_progress: Callable[[str, float], None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine process."""
        return self._process.pid if self._process else None

    @property
    def num_open(self) -> int:
        """Requests that have been sent and have not ended."""
        return len(self._streams)

    async def start(self, on_progress: Callable[[str, float], None] | None = None) -> wire.Ready:
        """Start the process and wait until it has loaded.

        Raises what kept it from that: `ConfigError`, `ModelError` or `EngineDead`.
        """
        self._on_progress = on_progress
        self._folder = tempfile.mkdtemp(prefix="slipstream-")  # only this user may enter it
        path = Path(self._folder, "engine")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            self._remove_folder()
            raise ConfigError(
                f"the folder of temporary files must have a shorter name, but got {tempfile.gettempdir()}", hint="set TMPDIR"
            )
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{path}")
        # -P and the same path: the engine process imports exactly what this one would, never what lies in the current folder.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        # OpenMP's threads spin at barriers; beside a busy process a long spin burns the time slice the other thread needs.
        # It is read when torch is imported, so it can only be set from outside. Costs nothing on an idle machine.
        environment.setdefault("GOMP_SPINCOUNT", "1000")
        # oneDNN keeps a prepared product, scratch memory and all, for every number of rows that ever occurs, up to 1,024 of them
        # in each of two caches: half a gigabyte. A batch comes back to few.
        environment.setdefault("LRU_CACHE_CAPACITY", "64")
        environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "slipstream.server.engine_process", stdin=asyncio.subprocess.PIPE, env=environment
        )
        start = Start(f"ipc://{path}", self._factory, self._config.model_dump_json(exclude={"api_key"}), os.getpid())
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")  # and stays open: the lifeline
        self._tasks.append(asyncio.create_task(self._watch(self._process)))
        both: list[asyncio.Future[Any]] = [self._ready, self._dead]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise self._dead.result()
        self._tasks.append(asyncio.create_task(self._ping_for_ever()))
        return self._ready.result()

    def generate(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Send requests; their ids must be new. Close the stream when done with it, whatever happened."""
        stream = OutputStream([request.request_id for request in requests], self._abort)
        if self._dead.done():
            stream.fail(self._dead.result())
            return stream
        self._streams.update((request.request_id, stream) for request in requests)
        self._send(wire.Add(tuple(requests)))
        return stream

    async def stats(self, timeout_s: float = PING_S) -> EngineStats:
        """The engine's counters: of now, or the last known ones where the loop does not answer in time."""
        number = self._ping() if len(self._asked) < MAX_PINGS else max(self._asked)
        with contextlib.suppress(TimeoutError):
            await self._until_answered(number, timeout_s)
        return self._stats.stats

    async def reset_prefix_cache(self, timeout_s: float = RESET_S) -> None:
        """Make the engine forget all cached prompts; returns once it has.

        Raises `EngineDead`, or `EngineBusy` where the loop does not answer in time (it may still do it later).
        """
        if not self._dead.done():
            self._send(wire.ResetPrefixCache())
            try:
                await self._until_answered(self._ping(), timeout_s)
            except TimeoutError:
                raise EngineBusy(f"the engine must answer within {timeout_s:g} s, but has not") from None
        if self._dead.done():
            raise self._dead.result()

    def liveness(self) -> Liveness:
        """How the engine process is. Pings go out every second, so this is at most that old."""
        unanswered_s = time.monotonic() - min(self._asked.values()) if self._asked else 0.0
        return Liveness(not self._dead.done(), max(unanswered_s, self._stats.stalled_s))

    async def died(self) -> SlipstreamError:
        """Wait until the engine process has ended without being told to; returns why."""
        return await asyncio.shield(self._dead)

    async def stop(self) -> None:
        """End the process; what is still running is lost. Safe at any stage, and more than once."""
        self._is_stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            if self._ready.done():
                self._send(wire.Stop())
            else:
                _kill(process)  # it does not listen while it loads
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                _kill(process)
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._remove_folder()
        self._socket.close()
        self._context.term()

    def _abort(self, request_ids: set[str]) -> None:
        running = tuple(request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None)
        if running and not self._dead.done():
            self._send(wire.Abort(running))

    async def _until_answered(self, number: int, timeout_s: float) -> None:
        """Wait for the answer to a ping, or for the end of the process. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while number in self._asked and not self._dead.done():
                self._answered.clear()
                await self._answered.wait()

    def _ping(self) -> int:
        number = self._next_ping
        self._next_ping += 1
        if self._ready.done() and not self._dead.done():
            self._asked[number] = time.monotonic()
            self._send(wire.GetStats(number))
        return number

    async def _ping_for_ever(self) -> None:
        while True:
            if len(self._asked) < MAX_PINGS:
                self._ping()
            await asyncio.sleep(PING_S)

    def _send(self, message: wire.ToEngine) -> None:
        # Without a limit on the queue a send to a connected peer is done at once; the future has nothing to wait for.
        self._socket.send(wire.encode(message))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        reader = asyncio.create_task(self._read_for_ever())
        ended = asyncio.create_task(process.wait())
        await asyncio.wait([reader, ended], return_when=asyncio.FIRST_COMPLETED)
        if reader.done():  # it read what it could not understand: a bug of ours
            _kill(process)
        code = await ended
        while not reader.done() and await self._socket.poll(int(LAST_WORDS_S * 1000)):
            await asyncio.sleep(0)
        reader.cancel()
        outcome = (await asyncio.gather(reader, return_exceptions=True))[0]
        error = self._cause_of_death(code) if isinstance(outcome, asyncio.CancelledError) else _misunderstood(outcome)
        if not self._is_stopping:
            self._dead.set_result(error)
            self._answered.set()
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(error if isinstance(error, EngineDead) else EngineDead(error.message))

    def _cause_of_death(self, code: int) -> SlipstreamError:
        if self._fatal is not None:
            error = error_from(self._fatal.name, self._fatal.message)
            return EngineDead(error.message, hint=error.hint) if self._ready.done() else error
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = "the system may have run out of memory" if code == -signal.SIGKILL else None
        return EngineDead(f"the engine process must keep running, but it ended with {how}", hint=hint)

    async def _read_for_ever(self) -> None:
        while True:
            message = wire.decode_to_front(await self._socket.recv())
            self._remove_folder()
            match message:
                case wire.Outputs(outputs):
                    for output in outputs:
                        self._deliver(output)
                case wire.Stats(number):
                    self._stats = message
                    self._asked = {asked: at for asked, at in self._asked.items() if asked > number}
                    self._answered.set()
                case wire.Progress(phase, fraction):
                    if self._on_progress is not None:
                        self._on_progress(phase, fraction)
                case wire.Ready():
                    self._ready.set_result(message)
                case wire.Fatal():
                    self._fatal = message

    def _deliver(self, output: EngineOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None and stream.put(output):  # none: it was aborted, and this was on its way
            del self._streams[output.request_id]

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _misunderstood(error: BaseException | None) -> SlipstreamError:
    return EngineDead(f"the engine process must speak our language, but got {type(error).__name__}: {error}")


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
