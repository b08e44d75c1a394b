"""The engine process: loads the model, then turns the loop. Started by bridge.py as `python -m slipstream.server.engine_process`.

    inbox ─► add, abort ─► engine.step() ─► outbox          nothing to do: blocks on the inbox

One line of JSON on stdin says what to run. stdin then stays open as a lifeline: when it closes the front has gone, and the
process ends at once, whatever it is doing. SIGTERM and SIGINT are ignored: a supervisor or a terminal sends them to both
processes, and it is the front that drains and then says `Stop`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from slipstream.config import EngineConfig
from slipstream.engine.stats import EngineStats
from slipstream.errors import InvalidParameter, SlipstreamError
from slipstream.observe import log
from slipstream.server import wire
from slipstream.types import EngineOutput, EngineRequest

PR_SET_PDEATHSIG = 1
# A step that brings nothing is normal at lag 1 (the first one of a run); after this many in a row the loop pauses between them.
MAX_FRUITLESS_STEPS = 2
PAUSE_MS = 2
FLUSH_MS = 2000

logger = logging.getLogger("slipstream.engine")


class RunnableEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        ...

    def step(self) -> list[EngineOutput]:
        """One turn; returns the news."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts; what runs is not disturbed."""
        ...

    def stats(self) -> EngineStats:
        """Counters, brought up to date."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Start(msgspec.Struct, frozen=True):
    """The line on stdin. `factory` is `module:function` with the signature of engine/build.py's `build_engine`."""

    address: str
    factory: str
    config: str
    parent_pid: int


class Loop:
    """Turns the engine until told to stop.

    Args:
        engine: a loaded engine.
        socket: connected to the front.
    """

    def __init__(self, engine: RunnableEngine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._progress_at = time.monotonic()
        self._num_steps = engine.stats().num_steps
        self._fruitless = 0
        self._stopping = False

    def run(self) -> None:
        """Returns once stopped. What `engine.step` raises comes through: the engine's state is not to be trusted after it."""
        while True:
            wait_ms = None if not self._engine.has_work else PAUSE_MS if self._fruitless > MAX_FRUITLESS_STEPS else 0
            if not self._read_inbox(wait_ms):
                return
            if not self._engine.has_work:
                if self._stopping:
                    return
                self._progress_at, self._fruitless = time.monotonic(), 0
                continue
            outputs = self._engine.step()
            self._note_progress(bool(outputs))
            if outputs:
                self._send(wire.Outputs(tuple(outputs)))

    def _note_progress(self, has_news: bool) -> None:
        num_steps = self._engine.stats().num_steps
        if has_news or num_steps != self._num_steps:
            self._progress_at, self._num_steps, self._fruitless = time.monotonic(), num_steps, 0
        else:
            self._fruitless += 1

    def _read_inbox(self, wait_ms: int | None) -> bool:
        """Take every message that is there, waiting for the first up to `wait_ms` (None: for ever); False to stop at once."""
        was_idle = not self._engine.has_work
        if wait_ms != 0 and not self._stopping:
            self._socket.poll(wait_ms)
        while True:
            try:
                message = wire.decode_to_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            match message:
                case wire.Add(requests):
                    for request in requests:
                        self._add(request)
                case wire.Abort(request_ids):
                    for request_id in request_ids:
                        self._engine.abort(request_id)
                case wire.GetStats(number):
                    self._answer_stats(number)
                case wire.ResetPrefixCache():
                    self._engine.reset_prefix_cache()
                case wire.Stop(drain):
                    if not drain:
                        return False
                    self._stopping = True
        if was_idle:
            self._progress_at = time.monotonic()  # an idle hour is no stall of the request that ends it
        return True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except InvalidParameter:  # an id that is still running: the front's bug, and the running one must not suffer
            logger.exception("a request was refused")

    def _answer_stats(self, number: int) -> None:
        stalled_s = time.monotonic() - self._progress_at if self._engine.has_work else 0.0
        self._send(wire.Stats(number, self._engine.stats(), stalled_s))

    def _send(self, message: wire.ToFront) -> None:
        self._socket.send(wire.encode(message))


def main() -> int:
    """Run the engine process; returns its exit code: 0 when told to stop, 1 after `Fatal`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    _end_with_parent(start.parent_pid)
    config = EngineConfig.model_validate_json(start.config)
    log.configure(config.log_level, config.log_json)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = FLUSH_MS
    socket.connect(start.address)
    try:
        return _run(config, start.factory, socket)
    finally:
        socket.close()
        context.term()


def _run(config: EngineConfig, factory: str, socket: zmq.Socket[bytes]) -> int:
    report = _progress_reporter(socket)
    try:
        report("starting engine", 0.0)
        module, _, function = factory.partition(":")
        engine, loaded = getattr(importlib.import_module(module), function)(config, report)
        num_pages = engine.stats().num_pages
        socket.send(
            wire.encode(
                wire.Ready(
                    architecture=loaded.architecture,
                    dtype=str(loaded.dtype).removeprefix("torch."),
                    num_parameters=loaded.num_parameters,
                    context_len=loaded.context_len,
                    num_pages=num_pages,
                )
            )
        )
        Loop(engine, socket).run()
        engine.close()
    except Exception as error:  # whatever it is, the front has to hear of it
        if not isinstance(error, SlipstreamError):
            logger.exception("the engine failed")
        name, message = _described(error)
        socket.send(wire.encode(wire.Fatal(name, message)))
        return 1
    return 0


def _described(error: Exception) -> tuple[str, str]:
    if isinstance(error, SlipstreamError):
        return type(error).__name__, str(error)
    return "EngineError", f"the engine must not fail, but got {type(error).__name__}: {error}"


def _progress_reporter(socket: zmq.Socket[bytes]) -> Callable[[str, float], None]:
    last: tuple[str, int] | None = None

    def report(phase: str, fraction: float) -> None:
        nonlocal last
        if (phase, int(fraction * 100)) != last:  # loaders report every tensor
            last = (phase, int(fraction * 100))
            socket.send(wire.encode(wire.Progress(phase, fraction)))

    return report


def _end_with_parent(parent_pid: int) -> None:
    """End this process when the front ends, however it ends."""
    if sys.platform == "linux":
        # The kernel's own way: also works while this process is stopped, or stuck in native code.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)

    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin: a thread in there keeps the interpreter from ending
            pass
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
