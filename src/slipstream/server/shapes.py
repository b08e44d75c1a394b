"""Answers as the two OpenAI routes write them, whole and in pieces.

    completions   {"text": ..., "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}}
    chat          {"message" or "delta": ..., "logprobs": {"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}}

Logprobs have one entry for each generated token, the one that ended the answer included, as usage counts them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from slipstream.frontend.assemble import Delta
from slipstream.text.detokenize import IncrementalDecoder
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import SamplingParams, TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own stand-in

Json = dict[str, Any]


def token_name(data: bytes) -> str:
    """A token's bytes as text; where they are no whole characters, spelled out as OpenAI does (`bytes:\\xe2\\x82`)."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def usage_object(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Json:
    """OpenAI's usage."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


class Shape(ABC):
    """Writes one response.

    Args:
        response_id: its id.
        model: the model's name.
        params: sampling parameters of its answers.
        tokenizer: spells tokens.
    """

    whole_kind: str
    piece_kind: str

    def __init__(self, response_id: str, model: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.response_id = response_id
        self._model = model
        self._params = params
        self._tokenizer = tokenizer
        self._created = int(time.time())

    @abstractmethod
    def choices(self, delta: Delta) -> list[Json]:
        """What a delta adds to a stream: one choice object an event, or nothing yet. `delta.index` is the choice's."""

    @abstractmethod
    def whole_choice(self, delta: Delta) -> Json:
        """A whole answer, given as one delta."""

    def event(self, choices: list[Json]) -> Json:
        """One event of a stream."""
        return {
            "id": self.response_id,
            "object": self.piece_kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def whole(self, answers: Sequence[Delta], usage: Json) -> Json:
        """The response to a call that did not ask for a stream."""
        return {
            "id": self.response_id,
            "object": self.whole_kind,
            "created": self._created,
            "model": self._model,
            "choices": [self.whole_choice(answer) for answer in answers],
            "usage": usage,
        }

    def _name(self, token_id: int) -> str:
        return token_name(self._tokenizer.token_bytes(token_id))


class CompletionShape(Shape):
    """/v1/completions. `text_offset` counts characters of the answer's text, as if nothing were cut off it."""

    whole_kind = piece_kind = "text_completion"

    def __init__(self, response_id: str, model: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        super().__init__(response_id, model, params, tokenizer)
        self._offsets: dict[int, _Offsets] = {}

    def choices(self, delta: Delta) -> list[Json]:
        """See `Shape`."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return []
        return [self.whole_choice(delta)]

    def whole_choice(self, delta: Delta) -> Json:
        """See `Shape`."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None if delta.logprobs is None else self._logprobs(delta.index, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> Json:
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = _Offsets(self._tokenizer, self._params.skip_special_tokens)
        return {
            "tokens": [self._name(one.token_id) for one in logprobs],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": [offsets.next(one.token_id) for one in logprobs],
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Best first, and the chosen token in any case. Of two tokens that are spelled alike the better one counts."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
            top.setdefault(self._name(token_id), _finite(logprob))
        top.setdefault(self._name(one.token_id), _finite(one.logprob))
        return top


class ChatShape(Shape):
    """/v1/chat/completions."""

    whole_kind = "chat.completion"
    piece_kind = "chat.completion.chunk"

    def __init__(self, response_id: str, model: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        super().__init__(response_id, model, params, tokenizer)
        self._opened: set[int] = set()

    def choices(self, delta: Delta) -> list[Json]:
        """See `Shape`. The first event of an answer has the role, the last one the finish reason."""
        out: list[Json] = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            out.append(self._piece(delta.index, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            out.append(self._piece(delta.index, {"content": delta.text}, delta.logprobs))
        if delta.finish_reason is not None:
            out.append({**self._piece(delta.index, {}), "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})
        return out

    def whole_choice(self, delta: Delta) -> Json:
        """See `Shape`."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _piece(self, index: int, delta: Json, logprobs: Sequence[TokenLogprobs] | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._token(one.token_id, one.logprob),
                    "top_logprobs": [self._token(*pair) for pair in zip(one.top_ids, one.top_logprobs, strict=True)],
                }
                for one in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": token_name(data), "logprob": _finite(logprob), "bytes": list(data)}


class _Offsets:
    """Where in the text each token begins. A token that begins inside a character has the place of that character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._at = 0

    def next(self, token_id: int) -> int:
        at = self._at
        self._at += len(self._decoder.push((token_id,)))
        return at


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # also for NaN
