"""What clients may say: the fields of a completion and of a chat completion, checked one by one.

A field that is absent or null has its default. One that no table here knows is ignored. One that we know and do not run is
refused by name, unless its value changes nothing. Sampling fields are checked by `SamplingParams`, whatever way they come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import InvalidParameter, Unsupported, shown
from slipstream.types import MAX_LOGPROBS

# Fields that do not run here -> values that change nothing and are accepted (null always is). types.UNSUPPORTED_PARAMS has the
# sampling ones.
UNSUPPORTED_ANYWHERE: Mapping[str, tuple[object, ...]] = {
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logit_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "kv_transfer_params": (),
    "lora_path": (),
    "session_params": (),
    "return_hidden_states": (False,),
}
UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    **UNSUPPORTED_ANYWHERE,
    "suffix": ("",),
    "prompt_embeds": (),
}
UNSUPPORTED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    **{name: values for name, values in UNSUPPORTED_ANYWHERE.items() if name != "add_special_tokens"},
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools there is nothing to choose
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Call:
    """What both routes have in common.

    Attributes:
        model: the name asked for.
        sampling: fields for `Frontend.sampling_params`.
        stream: answer with events.
        include_usage: end the stream with one event of usage.
        include_draft_details: usage says how each drafter has fared.
        num_prompt_logprobs: None, or how many to list as `prompt_logprobs`; checked with the sampling fields.
        priority, cache_salt: checked by `Frontend.prepare`.
    """

    model: str
    sampling: Mapping[str, Any]
    stream: bool
    include_usage: bool
    include_draft_details: bool
    num_prompt_logprobs: int | None
    priority: int
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class CompletionCall(Call):
    """POST /v1/completions. `prompts`: texts or lists of token ids, at least one. `echo`: repeat them before the answers."""

    prompts: tuple[Prompt, ...] = ()
    echo: bool = False


@dataclass(frozen=True, slots=True)
class ChatCall(Call):
    """POST /v1/chat/completions. Messages are checked by text/messages.py, template variables by the template."""

    messages: Any = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def completion_call(body: Mapping[str, Any]) -> CompletionCall:
    """Check the body of a completion. Raises `InvalidParameter` or `Unsupported` naming the field."""
    _refuse(body, UNSUPPORTED_IN_COMPLETIONS)
    stream, include_usage = _stream(body)
    prompt = _required(body, "prompt", "be text, a list of token ids, or a list of such prompts")
    echo = _flag(body, "echo", default=False)
    return CompletionCall(
        _model(body),
        {**body, "prompt_logprobs": _scored(body, echo)},
        stream,
        include_usage,
        _draft_details(body, stream, include_usage),
        _prompt_logprobs(body, stream),
        *_queueing(body),
        prompts=_prompts(prompt),
        echo=echo,
    )


def chat_call(body: Mapping[str, Any]) -> ChatCall:
    """Check the body of a chat completion, messages excepted. Raises `InvalidParameter` or `Unsupported` naming the field."""
    _refuse(body, UNSUPPORTED_IN_CHAT)
    stream, include_usage = _stream(body)
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidParameter("chat_template_kwargs", "be an object", kwargs)
    return ChatCall(
        _model(body),
        {**body, "logprobs": _chat_logprobs(body)},
        stream,
        include_usage,
        _draft_details(body, stream, include_usage),
        _prompt_logprobs(body, stream),
        *_queueing(body),
        messages=_required(body, "messages", "be a list of messages"),
        add_generation_prompt=_flag(body, "add_generation_prompt", default=True),
        template_kwargs=kwargs or {},
    )


def _refuse(body: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    for name, neutral in table.items():
        value = body.get(name)
        if value is not None and (isinstance(value, bool), value) not in [(isinstance(one, bool), one) for one in neutral]:
            raise Unsupported(f"{name} must be left out, it is not supported here, but got {shown(value)}", param=name)


def _required(body: Mapping[str, Any], name: str, must: str) -> Any:
    value = body.get(name)
    if value is None:
        raise InvalidParameter(name, must, value)
    return value


def _model(body: Mapping[str, Any]) -> str:
    model = _required(body, "model", "name the served model")
    if not isinstance(model, str):
        raise InvalidParameter("model", "be a string", model)
    return model


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidParameter(name, "be true or false", value)
    return value


def _stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    stream = _flag(body, "stream", default=False)
    options = body.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise InvalidParameter("stream_options", "be an object", options)
    if not stream:
        raise InvalidParameter("stream_options", "be given with stream: true alone", options)
    include_usage = options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise InvalidParameter("stream_options.include_usage", "be true or false", include_usage)
    if options.get("continuous_usage_stats") not in (None, False):
        raise Unsupported(
            "stream_options.continuous_usage_stats must be left out, it is not supported here",
            param="stream_options.continuous_usage_stats",
        )
    return stream, bool(include_usage)


def _draft_details(body: Mapping[str, Any], stream: bool, include_usage: bool) -> bool:
    wanted = _flag(body, "include_draft_details", default=False)
    if wanted and stream and not include_usage:
        raise InvalidParameter(
            "include_draft_details", "be given with stream_options.include_usage in a stream: it is a part of usage", wanted
        )
    return wanted


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidParameter("prompt", "be text, a list of token ids, or a list of at least one such prompt", prompt)
    if _is_id(prompt[0]):
        return (prompt,)
    for index, one in enumerate(prompt):
        if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_id, one))):
            raise InvalidParameter(f"prompt[{index}]", "be text or a list of token ids, as all prompts of a list", one)
    return tuple(prompt)


def _is_id(value: Any) -> bool:
    return type(value) is int


def _queueing(body: Mapping[str, Any]) -> tuple[Any, Any]:
    priority = body.get("priority")
    return (0 if priority is None else priority), body.get("cache_salt")


def _prompt_logprobs(body: Mapping[str, Any], stream: bool) -> Any:
    value = body.get("prompt_logprobs")
    if stream and value is not None:
        raise Unsupported(
            f"prompt_logprobs must be asked for without stream: true, but got {shown(value)} with it",
            param="prompt_logprobs",
            hint="echo and logprobs can be streamed",
        )
    return value


def _scored(body: Mapping[str, Any], echo: bool) -> Any:
    """Prompt logprobs to compute: what `prompt_logprobs` and, with echo, `logprobs` ask for. `SamplingParams` checks both."""
    own, echoed = body.get("prompt_logprobs"), body.get("logprobs") if echo else None
    if own is None and echoed is None:
        only_echo = echo and 0 in (body.get("max_tokens"), body.get("max_completion_tokens"))
        return 0 if only_echo else None
    if own is None:
        return echoed
    return max(own, echoed) if _is_id(own) and own >= 0 and _is_id(echoed) else own


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """`logprobs: true, top_logprobs: k` in the sense of `SamplingParams.logprobs`."""
    logprobs = _flag(body, "logprobs", default=False)
    top = body.get("top_logprobs")
    if top is None:
        return 0 if logprobs else None
    if not logprobs:
        raise InvalidParameter("top_logprobs", "be given with logprobs: true alone", top)
    if not _is_id(top) or not 0 <= top <= MAX_LOGPROBS:
        raise InvalidParameter("top_logprobs", f"be an integer from 0 to {MAX_LOGPROBS}", top)
    return int(top)
