"""A model with its engine in this process, answering one prompt at a time as a stream: what `run` and `chat` talk to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from slipstream.cli.progress import progress
from slipstream.cli.tally import Tally
from slipstream.frontend.assemble import Assembler
from slipstream.frontend.model_info import ModelInfo, model_info
from slipstream.frontend.prepare import Frontend
from slipstream.terminal import deferred_interrupts
from slipstream.types import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.engine.loop import Engine


class LocalModel:
    """An engine and the text side of its model. Also a context manager, which closes the engine."""

    def __init__(self, engine: Engine, info: ModelInfo) -> None:
        self.engine = engine
        self.frontend = Frontend(info)
        self._num_prompts = 0

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Load the configured model, with progress on stderr."""
        from slipstream.engine.build import build_engine  # imports torch

        with progress() as on_progress:
            engine, loaded = build_engine(config, on_progress)
        return cls(engine, model_info(loaded.text, config))

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.frontend.info.chat_template is not None

    def sampling_params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Parameters from flags, then the model's defaults. Without max_tokens an answer may fill the context."""
        return self.frontend.sampling_params(fields, {"max_tokens": None})

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation."""
        return self.frontend.chat_prompt(messages)

    def reply(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any], tally: Tally) -> Iterator[str]:
        """The reply to a conversation, see `stream`."""
        return self.stream(self.chat_prompt(messages), self.sampling_params(fields), tally)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams, tally: Tally | None = None) -> Iterator[str]:
        """Answer a prompt, text as it becomes certain; `tally` is told what it takes.

        Ctrl-C stops the answer at the next step, as `KeyboardInterrupt`, and leaves the model usable. Raises `InvalidRequest`
        before anything runs, and what the engine answers with.
        """
        self._num_prompts += 1
        prepared = self.frontend.prepare(f"cli-{self._num_prompts}", prompt, params)
        tally = tally or Tally()
        tally.num_prompt_tokens, tally.num_cached_tokens = len(prepared.prompt_token_ids), 0
        tally.num_tokens = tally.num_steps = 0
        return self._stream(Assembler(prepared, self.frontend.info), prepared.requests, tally)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stream(self, assembler: Assembler, requests: Sequence[EngineRequest], tally: Tally) -> Iterator[str]:
        try:
            with deferred_interrupts() as interrupted:
                for request in requests:
                    self.engine.add(request)
                while not assembler.is_finished:
                    for output in self.engine.step():
                        delta = assembler.push(output)
                        _count(tally, assembler, bool(delta.token_ids))
                        yield delta.text
                    if interrupted.is_set():
                        raise KeyboardInterrupt
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
            while self.engine.has_work:
                self.engine.step()


def _count(tally: Tally, assembler: Assembler, has_tokens: bool) -> None:
    tally.num_cached_tokens, tally.num_tokens = assembler.num_cached_tokens, assembler.num_output_tokens
    if has_tokens:
        tally.num_steps = (tally.num_steps or 0) + 1
        tally.arrived()
