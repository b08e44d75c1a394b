"""Answers as the two OpenAI routes write them, whole and in pieces.

    completions   {"text": ..., "logprobs": {...}}
    chat          {"message" or "delta": ..., "logprobs": {"content": [...]}}

Logprobs have one entry for each generated token, the one that ended the answer included, as usage counts them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from slipstream.frontend.assemble import Assembler, Delta
from slipstream.server.echo import Echo
from slipstream.server.logprobs import Json, chat_logprobs, completion_logprobs, joined, prompt_logprobs
from slipstream.text.detokenize import IncrementalDecoder
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import DraftCounts, SamplingParams, TokenLogprobs


def usage_object(
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int,
    drafting: Mapping[str, DraftCounts] | None = None,
    with_draft_details: bool = False,
) -> Json:
    """OpenAI's usage, and by drafter what drafts came to, where the client asked. `drafting` is None without a drafter."""
    usage: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if drafting is not None:
        num_accepted = sum(one.num_accepted for one in drafting.values())
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(one.num_drafted for one in drafting.values()) - num_accepted,
        }
    if with_draft_details:
        usage["draft_details"] = {
            name: {"drafted": one.num_drafted, "accepted": one.num_accepted, "accepted_by_position": one.accepted_at}
            for name, one in (drafting or {}).items()
        }
    return usage


class Shape(ABC):
    """Writes one response.

    Args:
        response_id: its id.
        model: the model's name.
        params: sampling parameters of its answers.
        tokenizer: spells tokens.
        prompts: in the order of the choices, each with `params.n` of them.
        num_prompt_logprobs: None, or what the client asked for as `prompt_logprobs`.
    """

    whole_kind: str
    piece_kind: str

    def __init__(
        self,
        response_id: str,
        model: str,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompts: Sequence[Assembler] = (),
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self.response_id = response_id
        self._model = model
        self._params = params
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._num_prompt_logprobs = num_prompt_logprobs
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

    def _prompt_logprobs(self, place: int) -> Json:
        """The field `prompt_logprobs` of the prompt at `place`, where it was asked for."""
        if self._num_prompt_logprobs is None:
            return {}
        entries = self._prompts[place].prompt_logprobs
        assert entries is not None, "they come before the end of the first answer"
        return {"prompt_logprobs": prompt_logprobs(entries, self._num_prompt_logprobs, self._tokenizer)}


class CompletionShape(Shape):
    """/v1/completions. `text_offset` counts characters of the text as if nothing were cut off it.

    Args:
        echo: each choice begins with its prompt; in a stream it is an event of its own.
    """

    whole_kind = piece_kind = "text_completion"

    def __init__(
        self,
        response_id: str,
        model: str,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompts: Sequence[Assembler] = (),
        num_prompt_logprobs: int | None = None,
        echo: bool = False,
    ) -> None:
        super().__init__(response_id, model, params, tokenizer, prompts, num_prompt_logprobs)
        self._echo = echo
        self._echoes: dict[int, Echo] = {}
        self._echoed: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}

    def choices(self, delta: Delta) -> list[Json]:
        """See `Shape`."""
        out: list[Json] = []
        if self._echo and delta.index not in self._echoed:
            self._echoed.add(delta.index)
            echo = self._echo_of(delta.index)
            out.append({**self._choice(Delta(delta.index, echo.text, (), None, None, None)), "logprobs": echo.logprobs})
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            out.append(self._choice(delta))
        return out

    def whole_choice(self, delta: Delta) -> Json:
        """See `Shape`."""
        choice = {**self._choice(delta), **self._prompt_logprobs(delta.index // self._params.n)}
        if not self._echo:
            return choice
        echo = self._echo_of(delta.index)
        logprobs = None if echo.logprobs is None else joined(echo.logprobs, choice["logprobs"])
        return {**choice, "text": echo.text + delta.text, "logprobs": logprobs}

    def _echo_of(self, index: int) -> Echo:
        place = index // self._params.n
        if place not in self._echoes:
            self._echoes[place] = Echo(self._prompts[place], self._params.logprobs, self._tokenizer)
        return self._echoes[place]

    def _choice(self, delta: Delta) -> Json:
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
            start = len(self._echo_of(index).text) if self._echo else 0
            offsets = self._offsets[index] = _Offsets(self._tokenizer, self._params.skip_special_tokens, start)
        return completion_logprobs(logprobs, self._tokenizer, [offsets.next(one.token_id) for one in logprobs])


class ChatShape(Shape):
    """/v1/chat/completions."""

    whole_kind = "chat.completion"
    piece_kind = "chat.completion.chunk"

    def __init__(
        self,
        response_id: str,
        model: str,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompts: Sequence[Assembler] = (),
        num_prompt_logprobs: int | None = None,
    ) -> None:
        super().__init__(response_id, model, params, tokenizer, prompts, num_prompt_logprobs)
        self._opened: set[int] = set()

    def whole(self, answers: Sequence[Delta], usage: Json) -> Json:
        """See `Shape`. A chat has one prompt: its logprobs stand beside the choices."""
        return {**super().whole(answers, usage), **self._prompt_logprobs(0)}

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
        return None if logprobs is None else {"content": chat_logprobs(logprobs, self._tokenizer), "refusal": None}


class _Offsets:
    """Where in the text each token begins. A token that begins inside a character has the place of that character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._at = start

    def next(self, token_id: int) -> int:
        at = self._at
        self._at += len(self._decoder.push((token_id,)))
        return at
