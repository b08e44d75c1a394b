"""What is served, and whether it takes work: the state behind every route.

LOADING ──► READY ──► DRAINING
    └─────────┴───────────┴────► (the engine process has gone: the server prints why and exits)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar, cast

from slipstream.config import EngineConfig
from slipstream.errors import EngineBusy, EngineDead, EngineError, InvalidParameter, SlipstreamError, UnknownModel, shown
from slipstream.frontend.model_info import ModelInfo, model_info
from slipstream.frontend.prepare import Frontend, Prepared
from slipstream.observe import log
from slipstream.observe.metrics import Metrics
from slipstream.observe.phases import LEAST_S, Phases
from slipstream.server import wire
from slipstream.server.answers import Answers
from slipstream.server.bridge import ENGINE_FACTORY, EngineClient
from slipstream.server.protocol import Prompt
from slipstream.types import SamplingParams

logger = logging.getLogger("slipstream.server")

LONG_PROMPT = 2000  # characters; tokenizing more than this is done beside the event loop

T = TypeVar("T")
OnProgress = Callable[[str, float], None]


class Phase(str, Enum):
    """What the server is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a server gets its two halves from; tests put others here.

    Attributes:
        fetch: makes sure that the checkpoint is on this machine, before either half is loaded.
        load_info: the text half, loaded in this process.
        engine_factory: `module:function`, imported in the engine process.
    """

    fetch: Callable[[EngineConfig, OnProgress], object]
    load_info: Callable[[EngineConfig], ModelInfo]
    engine_factory: str = ENGINE_FACTORY


def _fetch(config: EngineConfig, on_progress: OnProgress) -> object:
    from slipstream.weights.source import resolve

    return resolve(config.model, on_progress)


def _load_info(config: EngineConfig) -> ModelInfo:
    from slipstream.weights import load_text

    return model_info(load_text(config.model, max_context=config.max_model_len), config)


CHECKPOINT = Backend(_fetch, _load_info)


class Serving:
    """The served model and its engine. Belongs to one event loop.

    Args:
        config: engine and server settings.
        backend: where model and engine come from.
    """

    def __init__(self, config: EngineConfig, backend: Backend = CHECKPOINT) -> None:
        self.config = config
        self.metrics = Metrics(config.served_model_name or config.model)
        self.client = EngineClient(config, backend.engine_factory)
        self.phase = Phase.LOADING
        self.phases = Phases("starting", time.monotonic())
        self.progress = 0.0  # of the phase, 0 to 1
        self.ready: wire.Ready | None = None
        self.started = int(time.time())
        self._backend = backend
        self._frontend: Frontend | None = None
        self._active: set[Answers] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def load(self) -> None:
        """Load both halves at once. Raises `ConfigError`, `ModelError` or `EngineDead`; call `stop` in any case."""
        loop = asyncio.get_running_loop()

        def on_progress(phase: str, fraction: float) -> None:
            loop.call_soon_threadsafe(self._note_progress, phase, fraction)

        await _beside(lambda: self._backend.fetch(self.config, on_progress))
        self._note_progress("starting engine", 0.0)
        starting = asyncio.create_task(self.client.start(self._note_progress))
        try:
            info, self.ready = await asyncio.gather(_beside(lambda: self._backend.load_info(self.config)), starting)
        finally:
            starting.cancel()
        self._frontend = Frontend(info)
        self._note_progress(None, 1.0)
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    async def stop(self) -> None:
        """Fail what is still running and end the engine process."""
        self.fail_all(EngineBusy("the server must be running, but it is stopping"))
        await self.client.stop()

    @property
    def frontend(self) -> Frontend:
        """Checks prompts. Raises `EngineBusy` while the server takes no work."""
        self.check_open()
        assert self._frontend is not None
        return self._frontend

    @property
    def num_active(self) -> int:
        """Calls being answered."""
        return len(self._active)

    def check_open(self) -> None:
        """Raises `EngineBusy` or `EngineDead` while the server takes no work."""
        if self.phase is Phase.LOADING:
            at = f"{self.phases.current}, {self.progress:.0%}"
            raise EngineBusy(f"the model must be loaded first, but the server is at {at}", hint="GET /ready")
        if self.phase is Phase.DRAINING:
            raise EngineBusy("the server must be taking work, but it is draining and will stop")
        if (problem := self.problem()) is not None:
            raise problem

    def problem(self) -> EngineError | None:
        """What is wrong with the engine process, if anything."""
        liveness = self.client.liveness()
        if not liveness.is_alive:
            return EngineDead("the engine process must be running, but it has ended")
        if liveness.stalled_s > self.config.stall_timeout_s:
            return EngineDead(
                f"the engine must make progress, but has made none for {liveness.stalled_s:.0f} s",
                hint="restart the server; a longer --stall-timeout-s if a step may take that long",
            )
        return None

    def check_model(self, name: str) -> None:
        """Raises `UnknownModel` unless `name` is the served model."""
        served = self.frontend.info.name
        if name != served:
            raise UnknownModel(f"model must be {served}, but got {shown(name)}", param="model", hint="GET /v1/models lists it")

    async def prepare(
        self,
        response_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Prepared]:
        """Check all prompts of a call, before anything is started. Raises an `InvalidRequest` for the first that is wrong."""
        most = self.config.max_num_seqs + self.config.max_queue
        if len(prompts) * params.n > most:
            raise InvalidParameter(
                "prompt" if len(prompts) > 1 else "n",
                f"ask for at most {most} answers at once",
                len(prompts) * params.n,
                hint="send fewer prompts a call, or raise --max-queue",
            )
        frontend = self.frontend

        def work() -> list[Prepared]:
            return [
                frontend.prepare(f"{response_id}-{place}", prompt, params, priority=priority, cache_salt=cache_salt)
                for place, prompt in enumerate(prompts)
            ]

        if sum(map(len, prompts)) > LONG_PROMPT:
            return await _beside(work)
        return work()

    def submit(self, prompts: Sequence[Prepared], arrived: float) -> Answers:
        """Start. Raises `EngineBusy` where the queue is full. Hand the answers to `release` when done with them."""
        self.check_open()
        requests = [request for prompt in prompts for request in prompt.requests]
        most = self.config.max_num_seqs + self.config.max_queue
        if self.client.num_open + len(requests) > most:
            raise EngineBusy(
                f"the queue must have room for {len(requests)} answers, but {self.client.num_open} of {most} places are taken"
            )
        answers = Answers(prompts, self.client.generate(requests), self.frontend.info, self.metrics, arrived)
        self._active.add(answers)
        self._idle.clear()
        return answers

    def release(self, answers: Answers) -> None:
        """A call is over, however it ended: abort what still runs."""
        answers.close()
        self._active.discard(answers)
        if not self._active:
            self._idle.set()

    def drain(self) -> None:
        """Take no more work."""
        self.phase = Phase.DRAINING

    async def idle(self) -> None:
        """Wait until no call is being answered."""
        await self._idle.wait()

    def fail_all(self, error: SlipstreamError) -> None:
        """Abort every call; their clients get `error`."""
        for answers in self._active:
            answers.fail(error)

    def _note_progress(self, phase: str | None, fraction: float) -> None:
        self.progress = fraction
        if (ended := self.phases.enter(phase, time.monotonic())) is not None and ended[1] >= LEAST_S:
            log.event(logger, logging.INFO, "start-up", phase=ended[0], seconds=round(ended[1], 2))


def new_id(prefix: str) -> str:
    """A fresh id of a response or request."""
    return f"{prefix}-{secrets.token_hex(12)}"


async def _beside(work: Callable[[], T]) -> T:
    """Run `work` in a thread. Unlike a pool's, it does not keep the program from ending: a download can be left alone."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = work(), None
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return await done
