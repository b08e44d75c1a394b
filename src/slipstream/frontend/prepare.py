"""From what a client sent to what the engine takes: tokens, checks that need the model, seeds, one request an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from slipstream.errors import ContextLengthExceeded, InvalidParameter, InvalidRequest
from slipstream.frontend.model_info import ModelInfo
from slipstream.seeds import draw_seed, seed_i
from slipstream.text.messages import normalised_messages
from slipstream.text.template import ChatTemplate
from slipstream.types import EngineRequest, SamplingParams, valid_text

MAX_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked prompt, ready for the engine.

    Attributes:
        request_id: the front's id.
        prompt: the text, where text was given.
        prompt_token_ids: what the model reads, truncated where the request asks for it.
        params: what the client asked for; max_tokens None means as much as context and KV pool leave, which the engine knows.
        requests: `params.n` of them, with ids `{request_id}#{index}`. The first one has the prompt's logprobs computed for all.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    requests: tuple[EngineRequest, ...]


class Frontend:
    """Prepares requests for one model. Every error it raises is an `InvalidRequest`, before anything has started.

    Args:
        info: the model.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def sampling_params(self, fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Parameters from JSON fields; what is absent or null takes `defaults`, then the model's own defaults, then ours."""
        return SamplingParams.from_json_fields(fields, {**self.info.generation_defaults, **(defaults or {})})

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Prepared:
        """Check one prompt against the model and expand it into engine requests.

        A prompt that begins with the BOS token itself does not get a second one.

        Args:
            request_id: the front's id.
            prompt: text or token ids.
            params: how it is answered.
            priority: lower runs earlier, -2**31 to 2**31 - 1.
            cache_salt: 1 to 256 characters; only prompts with the same salt share cached pages. None: all without one share.

        Raises `InvalidParameter` naming the field, or `ContextLengthExceeded`.
        """
        _check_priority(priority)
        _check_salt(cache_salt)
        text, ids = (prompt, self._encoded(prompt)) if isinstance(prompt, str) else (None, self._checked_ids(prompt))
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        self._check_fit(params, len(ids))
        self._check_ids(params)
        bad_words = tuple(variant for word in params.bad_words for variant in self._word_ids(word))
        self._check_something_is_allowed(params, bad_words)
        seed = draw_seed() if params.seed is None else params.seed
        first = replace(params, n=1)
        other = first if params.max_tokens == 0 else replace(first, prompt_logprobs=None)
        requests = tuple(
            EngineRequest(
                f"{request_id}#{index}",
                tuple(ids),
                other if index else first,
                seed_i(seed, index),
                bad_words,
                priority=priority,
                cache_salt=cache_salt or "",
                parent_id=f"{request_id}#0" if index else None,
            )
            for index in range(params.n)
        )
        return Prepared(request_id, text, tuple(ids), params, requests)

    def chat_prompt(
        self,
        messages: Any,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, as text for `prepare`.

        Args:
            messages: OpenAI's messages: role, content (text, or a list of text parts), tool_calls.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: tool descriptions, handed to the template.
            template_kwargs: further variables of the template.

        Raises `InvalidParameter` naming the wrong message, or `InvalidRequest` where the model has no template or the template
        refuses the conversation.
        """
        return self._template.render(
            normalised_messages(messages), add_generation_prompt, tools=tools, variables=template_kwargs or {}
        )

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.info.chat_template is None:
            raise InvalidRequest(
                f"the model must have a chat template to chat, but {self.info.name} has none",
                hint="a base model has none; use completions with the prompt written out",
            )
        tokenizer = self.info.tokenizer
        special = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        texts = {name: tokenizer.token_text(token) for name, token in special.items() if token is not None}
        return ChatTemplate(self.info.chat_template, texts)

    def _encoded(self, text: str) -> list[int]:
        if not text:
            raise InvalidParameter("prompt", "hold at least one character", text)
        valid_text("prompt", text)
        tokenizer = self.info.tokenizer
        ids = tokenizer.encode(text)
        # A template, or the client, wrote BOS itself: the tokenizer must not add its own.
        if ids and ids[0] == tokenizer.bos_token_id and ids[1:2] == ids[:1]:
            ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidParameter("prompt", "encode to at least one token", text)
        return ids

    def _checked_ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise InvalidParameter("prompt", "be text or a list of token ids", prompt)
        ids = list(prompt)
        if not ids:
            raise InvalidParameter("prompt", "hold at least one token id", ids)
        self._in_vocabulary("prompt", ids)
        return ids

    def _check_fit(self, params: SamplingParams, prompt_len: int) -> None:
        """Raises where prompt and answer do not fit the context."""
        context_len = self.info.context_len
        room = context_len - prompt_len
        asked = 1 if params.max_tokens is None else params.max_tokens
        if asked > room:
            answer = "an answer" if params.max_tokens is None else f"max_tokens {asked}"
            raise ContextLengthExceeded(
                f"prompt and answer must fit the maximum context length of {context_len} tokens, "
                f"but got {prompt_len} prompt tokens and {answer}",
                hint="shorten the prompt, lower max_tokens or set truncate_prompt_tokens",
            )
        if params.min_tokens > room:
            raise InvalidParameter("min_tokens", f"be at most {room}, what the context leaves", params.min_tokens)

    def _check_ids(self, params: SamplingParams) -> None:
        self._in_vocabulary("logit_bias", params.logit_bias)
        self._in_vocabulary("stop_token_ids", params.stop_token_ids)
        self._in_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if asked is not None and asked > self.info.vocab_size:
                raise InvalidParameter(name, f"be at most the vocabulary of {self.info.vocab_size} tokens", asked)

    def _in_vocabulary(self, param: str, ids: Iterable[int]) -> None:
        size = self.info.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < size:  # a bool is no id
                raise InvalidParameter(param, f"hold token ids from 0 to {size - 1}", token)

    def _word_ids(self, word: str) -> list[tuple[int, ...]]:
        """Token sequences of a bad word: as a word of its own and behind a space, which vocabularies spell differently."""
        bare = word.lstrip() or word
        encode = self.info.tokenizer.encode
        variants = [tuple(encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
        if not variants[0]:
            raise InvalidParameter("bad_words", "hold words that encode to at least one token", word)
        return list(dict.fromkeys(variants))

    def _check_something_is_allowed(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> None:
        """At every position at least one token must be left to sample, whatever came before."""
        barred = {word[-1] for word in bad_words}
        if params.min_tokens:
            barred.update(params.stop_token_ids)
            if not params.ignore_eos:
                barred.update(self.info.eos_token_ids)
        allowed = params.allowed_token_ids
        if len(barred) >= self.info.vocab_size or (allowed is not None and barred.issuperset(allowed)):
            raise InvalidParameter(
                "allowed_token_ids",
                "leave a token that bad_words and min_tokens never forbid",
                "the whole vocabulary" if allowed is None else list(allowed),
            )


def _check_priority(priority: Any) -> None:
    if type(priority) is not int or not -(2**31) <= priority < 2**31:  # a bool is no count
        raise InvalidParameter("priority", f"be an integer from {-(2**31)} to {2**31 - 1}", priority)


def _check_salt(cache_salt: Any) -> None:
    if cache_salt is None:
        return
    # An empty one would share with everybody, which is not what it was sent for.
    if len(valid_text("cache_salt", cache_salt)) not in range(1, MAX_SALT_CHARS + 1):
        raise InvalidParameter("cache_salt", f"be text of 1 to {MAX_SALT_CHARS} characters", cache_salt)
