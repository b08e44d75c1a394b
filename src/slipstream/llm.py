"""The offline way in: `LLM.generate` and `LLM.chat`, with the engine in this process.

    prompts ── Frontend ──► engine requests ──► Engine.step() ... ──► Assembler ──► RequestOutput, in the order of the prompts
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from slipstream.config import DEFAULT_MODEL, EngineConfig
from slipstream.errors import EngineDead, InvalidParameter, SlipstreamError
from slipstream.frontend.assemble import Assembler
from slipstream.frontend.model_info import ModelInfo, model_info
from slipstream.frontend.prepare import Frontend, Prepared
from slipstream.terminal import deferred_interrupts, loading_bar
from slipstream.types import EngineRequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.loop import Engine

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model with its engine. Not thread-safe. Also a context manager; `close` gives the memory back.

    Args:
        model: alias, hub id, folder of safetensors, or .gguf file.
        config: fields of `EngineConfig`. One that does not exist raises `ConfigError`.

    Raises `ConfigError` for a wrong setting and `ModelError` for a model that cannot be used.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **config: Any) -> None:
        settings = EngineConfig(model=model, **config)
        from slipstream.engine.build import build_engine  # imports torch; not before the settings are known to be right

        with loading_bar() if sys.stderr.isatty() else nullcontext() as on_progress:
            engine, loaded = build_engine(settings, on_progress)
        self._start(engine, model_info(loaded.text, settings), settings.max_num_seqs)

    @classmethod
    def around(cls, engine: Engine, info: ModelInfo, max_num_seqs: int) -> Self:
        """An LLM around an engine that is already there; `close` closes that engine."""
        llm = cls.__new__(cls)
        llm._start(engine, info, max_num_seqs)
        return llm

    def _start(self, engine: Engine, info: ModelInfo, max_num_seqs: int) -> None:
        self.info = info
        self._engine: Engine | None = engine
        self._frontend = Frontend(info)
        self._max_waiting = max_num_seqs
        self._num_prompts = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; the results are in their order.

        Args:
            prompts: one prompt or a list of them. A prompt is text, a list of token ids, {"prompt": text} or
                {"prompt_token_ids": ids}; an object may also have a "cache_salt": only equal salts share cached pages.
            sampling_params: for all prompts, or one for each. None: the model's own defaults.
            priority: of all prompts, or one for each; lower runs earlier.
            use_tqdm: show a progress bar on stderr; None: only where stderr is a terminal.

        Raises `InvalidRequest` for a bad prompt or parameter before anything runs. If a request fails while running, the others
        are finished first, and then its error is raised. Ctrl-C aborts what runs and leaves the LLM usable.
        """
        listed = _listed(prompts)
        params = self._per_prompt(sampling_params, len(listed), SamplingParams().max_tokens)
        given = [_Given(*_text_or_ids(prompt), one) for prompt, one in zip(listed, _each(priority, len(listed)), strict=True)]
        return self._answer(given, params, "prompts", use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations, through the model's chat template.

        Args and errors are those of `generate`; without sampling_params an answer may fill the context. A model without a chat
        template raises `InvalidRequest`.
        """
        given: object = messages
        if isinstance(given, str):  # a sequence too, of what would be taken for conversations
            raise InvalidParameter("messages", 'be a list like [{"role": "user", "content": "..."}]', given)
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single or not messages else messages
        params = self._per_prompt(sampling_params, len(conversations), None)
        prompts: list[_Given] = []
        for index, conversation in enumerate(conversations):
            with _noting(f"in conversation {index}", len(conversations)):
                prompts.append(_Given(self._frontend.chat_prompt(conversation, add_generation_prompt)))
        return self._answer(prompts, params, "conversations", use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts."""
        self._opened().reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and let go of the model. May be called more than once."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _per_prompt(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int, max_tokens: int | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self._frontend.sampling_params({}, {"max_tokens": max_tokens})
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
            raise InvalidParameter("sampling_params", "be SamplingParams or a list of them", given)
        if len(given) != count:
            raise InvalidParameter("sampling_params", f"hold {count} entries, one for each prompt", len(given))
        return list(given)

    def _opened(self) -> Engine:
        if self._engine is None:
            raise EngineDead("the LLM must be open, but it has been closed")
        return self._engine

    def _answer(
        self, prompts: Sequence[_Given], params: Sequence[SamplingParams], noun: str, use_tqdm: bool | None
    ) -> list[RequestOutput]:
        engine = self._opened()
        prepared: list[Prepared] = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            with _noting(f"in {noun}[{index}]", len(prompts)):
                prepared.append(
                    self._frontend.prepare(
                        f"llm-{self._num_prompts + index}",
                        prompt.text_or_ids,
                        one,
                        priority=prompt.priority,
                        cache_salt=prompt.cache_salt,
                    )
                )
        self._num_prompts += len(prompts)
        try:
            return _Run(engine, self.info, prepared, self._max_waiting).outputs(_shown(use_tqdm))
        except BaseException:
            if engine.has_work:  # what ran could not be aborted: nothing may run behind it
                self.close()
            raise


@dataclass(frozen=True, slots=True)
class _Given:
    """A prompt as it was given, and how it is to be queued and cached."""

    text_or_ids: str | Sequence[int]
    cache_salt: str | None = None
    priority: int = 0


class _Run:
    """One call's prompts on their way through the engine."""

    def __init__(self, engine: Engine, info: ModelInfo, prepared: Sequence[Prepared], max_waiting: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._assemblers = [Assembler(one, info) for one in prepared]
        self._owner = {
            request.request_id: assembler
            for one, assembler in zip(prepared, self._assemblers, strict=True)
            for request in one.requests
        }
        self._to_add: deque[EngineRequest] = deque(request for one in prepared for request in one.requests)
        self._running: set[str] = set()
        self._errors: list[SlipstreamError] = []

    def outputs(self, bar_shown: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        with (
            tqdm(total=len(self._assemblers), desc="Generating", unit="prompt", file=sys.stderr, disable=not bar_shown) as bar,
            deferred_interrupts() as interrupted,
        ):
            try:
                while self._to_add or self._running:
                    bar.update(self._step())
                    if interrupted.is_set():
                        raise KeyboardInterrupt
            except BaseException:
                with suppress(Exception):  # the first error is the one to tell
                    self._abort()
                raise
        if self._errors:
            raise self._errors[0]
        return [assembler.request_output() for assembler in self._assemblers]

    def _step(self) -> int:
        """One engine step; returns how many prompts it finished."""
        engine, finished = self._engine, 0
        while self._to_add and engine.num_waiting < self._max_waiting:  # the queue stays short however many prompts there are
            request = self._to_add.popleft()
            self._running.add(request.request_id)
            engine.add(request)
        for output in engine.step():
            assembler = self._owner[output.request_id]
            if output.finish_reason is not None:
                self._running.discard(output.request_id)
            try:
                assembler.push(output)
            except SlipstreamError as error:
                error.add_note(f"in request {output.request_id}, prompt {self._assemblers.index(assembler)}")
                self._errors.append(error)
            finished += output.finish_reason is not None and assembler.is_finished
        return finished

    def _abort(self) -> None:
        for request_id in self._running:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()


def _listed(prompts: Any) -> list[Any]:
    """`prompts` as a list: text, an object and a list of token ids are one prompt each."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sequence):
        raise InvalidParameter("prompts", "be text, a list of token ids, or a list of such prompts", prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)


def _text_or_ids(prompt: Any) -> tuple[Any, Any]:
    """The text or ids of a prompt, and its cache salt; `Frontend.prepare` checks them."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    keys = set(prompt) - {"cache_salt"}
    if keys not in ({"prompt"}, {"prompt_token_ids"}):
        raise InvalidParameter("prompt", 'be {"prompt": text} or {"prompt_token_ids": ids}', dict(prompt))
    return prompt[keys.pop()], prompt.get("cache_salt")


def _each(priority: Any, count: int) -> list[Any]:
    """One priority for each prompt; `Frontend.prepare` checks them."""
    if isinstance(priority, int):
        return [priority] * count
    if not isinstance(priority, Sequence) or isinstance(priority, str) or len(priority) != count:
        raise InvalidParameter("priority", f"be an integer or a list of {count}, one for each prompt", priority)
    return list(priority)


def _shown(use_tqdm: bool | None) -> bool:
    return sys.stderr.isatty() if use_tqdm is None else use_tqdm


@contextmanager
def _noting(note: str, count: int) -> Iterator[None]:
    """Say which of several prompts an error is about."""
    try:
        yield
    except SlipstreamError as error:
        if count > 1:
            error.add_note(note)
        raise
