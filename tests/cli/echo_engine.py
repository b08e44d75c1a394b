"""An engine without a model: it answers each prompt with its own bytes, one a step, and then ends."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import EngineConfig
from slipstream.frontend.model_info import ModelInfo
from slipstream.testing.byte_tokenizer import EOS_ID, ByteTokenizer
from slipstream.types import EngineOutput, EngineRequest, FinishReason

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


def byte_info(chat_template: str | None = TEMPLATE) -> ModelInfo:
    """The byte tokenizer as a model that chats."""
    return ModelInfo("echo", ByteTokenizer(), chat_template, ByteTokenizer.vocab_size, 256, (EOS_ID,), {"temperature": 0.5})


class EchoEngine:
    """As much of `Engine` as the command line uses. `on_step` is called before each step with the number of steps so far."""

    def __init__(self, on_step: Callable[[int], None] = lambda steps: None) -> None:
        self.requests: list[EngineRequest] = []
        self.config: EngineConfig | None = None
        self.aborted: list[str] = []
        self.is_closed = False
        self._on_step = on_step
        self._steps = 0
        self._running: dict[str, list[int]] = {}
        self._news: list[EngineOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._news)

    def add(self, request: EngineRequest) -> None:
        self.requests.append(request)
        params = request.params
        answer = list(request.prompt_token_ids[: params.max_tokens])
        if not params.ignore_eos:
            answer = [*answer[: None if params.max_tokens is None else params.max_tokens - 1], EOS_ID]
        self._running[request.request_id] = answer

    def abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._news.append(EngineOutput(request_id, finish_reason=FinishReason.ABORT))

    def step(self) -> list[EngineOutput]:
        self._on_step(self._steps)
        self._steps += 1
        news, self._news = self._news, []
        for request_id, left in list(self._running.items()):
            token = left.pop(0)
            reason = None if left else FinishReason.STOP if token == EOS_ID else FinishReason.LENGTH
            news.append(EngineOutput(request_id, (token,), finish_reason=reason))
            if not left:
                del self._running[request_id]
        return news

    def close(self) -> None:
        self.is_closed = True
