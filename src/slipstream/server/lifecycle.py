"""From start to stop.

    bind the port ─► serve HTTP (503) ─► load ─► ready ──── SIGTERM, Ctrl-C ────► drain ─► stop        exit code 0
                                          │        └─ the engine process ends ──► fail what runs ─► raise why
                                          └─ it cannot be loaded ─────────────────────────────────► raise why

A second signal does not wait. No process is left behind in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, EngineBusy, SlipstreamError
from slipstream.observe import log
from slipstream.observe.throughput import throughput
from slipstream.server.app import create_app
from slipstream.server.serving import CHECKPOINT, Backend, Serving

LAST_WORDS_S = 3  # how long responses that have ended may take to reach their clients
KEEP_ALIVE_S = 75  # longer than clients and proxies keep idle connections, so that they close them, not we
STOPPED_AT_ONCE = 130

logger = logging.getLogger("slipstream.server")


def run(config: EngineConfig, backend: Backend = CHECKPOINT) -> int:
    """Serve until told to stop; returns the exit code: 0, or 130 where a second signal cut answers short.

    Raises `ConfigError` or `ModelError` where it cannot start, `EngineDead` where the engine process ends by itself.
    """
    log.configure(config.log_level, config.log_json)
    with _bind(config.host, config.port) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(_serve(config, listener, backend))
        logger.info("stopped")
        return code


async def _serve(config: EngineConfig, listener: socket.socket, backend: Backend) -> int:
    signals = _Signals()
    serving = Serving(config, backend)
    server = _Uvicorn(
        uvicorn.Config(
            create_app(serving),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
    )
    http = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(serving.load())
    logger.info("loading %s; %s/ready says how far it is", config.model, _url(config.host, listener))
    first, second = asyncio.create_task(signals.wait(1)), asyncio.create_task(signals.wait(2))
    try:
        await _any(loading, first, http)
        if loading.done():
            await loading
            _say_ready(serving, listener)
            died = asyncio.create_task(serving.client.died())
            async with _saying_throughput(serving):
                await _any(died, first, http)
                if not died.done():
                    await _drain(serving, died, second)
            if died.done():
                raise died.result()
        return STOPPED_AT_ONCE if second.done() else 0
    finally:
        serving.drain()
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await serving.stop()
        server.should_exit = True
        server.force_exit = second.done()
        await http
        signals.close()


async def _drain(serving: Serving, died: asyncio.Task[SlipstreamError], second: asyncio.Task[None]) -> None:
    """Let running calls finish, for a while; then fail them."""
    serving.drain()
    timeout_s = serving.config.drain_timeout_s
    if serving.num_active:
        calls = _calls(serving.num_active)
        logger.info("draining: %s to finish within %g s; a second signal stops at once", calls, timeout_s)
    idle = asyncio.create_task(serving.idle())
    await asyncio.wait([idle, died, second], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    if serving.num_active and not died.done():
        logger.warning("stopping with %s unfinished", _calls(serving.num_active))
        serving.fail_all(EngineBusy("the answer must be finished before the server stops, but it took too long"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving.idle(), LAST_WORDS_S)


@contextlib.asynccontextmanager
async def _saying_throughput(serving: Serving) -> AsyncIterator[None]:
    """Inside, a line every --log-interval-s says what the engine does; none while it is idle."""
    interval_s = serving.config.log_interval_s

    async def say() -> None:
        before, at = await serving.client.stats(), time.monotonic()
        while interval_s:
            await asyncio.sleep(interval_s)
            now, then, at = await serving.client.stats(), at, time.monotonic()
            if (fields := throughput(before, now, at - then)) is not None:
                log.event(logger, logging.INFO, "throughput", **fields)
            before = now

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await saying


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


async def _any(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _say_ready(serving: Serving, listener: socket.socket) -> None:
    info, ready = serving.frontend.info, serving.ready
    assert ready is not None
    now_s = time.monotonic()
    log.event(logger, logging.INFO, f"ready in {serving.phases.summary(now_s)}")
    log.event(
        logger,
        logging.INFO,
        f"serving {info.name}",
        architecture=ready.architecture,
        parameters=f"{ready.num_parameters / 1e6:.0f}M",
        dtype=ready.dtype,
        context=info.context_len,
        kv_pages=ready.num_pages,
    )
    if info.generation_defaults:
        defaults = " ".join(f"{name}={value}" for name, value in info.generation_defaults.items())
        logger.info("the model's own sampling defaults: %s (--generation-config none leaves them out)", defaults)
    url = _url(serving.config.host, listener)
    key = " -H 'Authorization: Bearer KEY'" if serving.config.api_key else ""
    body = f'{{"model": "{info.name}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
    if info.chat_template is None:
        body = f'{{"model": "{info.name}", "prompt": "Hello", "max_tokens": 32}}'
    route = "completions" if info.chat_template is None else "chat/completions"
    logger.info("listening on %s; try:\ncurl %s/v1/%s%s -H 'Content-Type: application/json' -d '%s'", url, url, route, key, body)


def _url(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket. Before anything is loaded: a taken port should not cost a minute."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        problem = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(
            f"host and port must be free to listen on, but got {host}:{port}: {problem}",
            hint="--port takes another one, 0 a free one",
        ) from None
    with listener:
        yield listener


def _loop_factory() -> Any:
    """uvloop's where it is installed."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn would close the listener at the first one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


class _Signals:
    """Counts SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._changed = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._count_one)

    async def wait(self, count: int) -> None:
        """Wait until there have been `count` of them."""
        while self._count < count:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Back to the defaults."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _count_one(self) -> None:
        self._count += 1
        self._changed.set()
