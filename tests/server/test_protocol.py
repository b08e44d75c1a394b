"""The fields of the two calls."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import InvalidParameter, Unsupported
from slipstream.server.protocol import UNSUPPORTED_IN_CHAT, UNSUPPORTED_IN_COMPLETIONS, chat_call, completion_call

COMPLETION = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": []}


@pytest.mark.parametrize("name, neutral", UNSUPPORTED_IN_COMPLETIONS.items())
def test_completions_refuse_what_does_not_run(name: str, neutral: tuple[object, ...]) -> None:
    for value in (None, *neutral):
        completion_call({**COMPLETION, name: value})
    with pytest.raises(Unsupported) as caught:
        completion_call({**COMPLETION, name: {"of": "another world"}})
    assert caught.value.param == name and name in caught.value.message


@pytest.mark.parametrize("name, neutral", UNSUPPORTED_IN_CHAT.items())
def test_chat_refuses_what_does_not_run(name: str, neutral: tuple[object, ...]) -> None:
    for value in (None, *neutral):
        chat_call({**CHAT, name: value})
    with pytest.raises(Unsupported) as caught:
        chat_call({**CHAT, name: {"of": "another world"}})
    assert caught.value.param == name and name in caught.value.message


def test_zero_is_not_false() -> None:
    with pytest.raises(Unsupported):
        completion_call({**COMPLETION, "return_token_ids": 0})


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("hi", ("hi",)),
        ("", ("",)),  # the frontend's to refuse
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        ([[1], "b"], ([1], "b")),
        ([[]], ([],)),
    ],
)
def test_prompts(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion_call({"model": "m", "prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("prompt", [None, [], {}, 5, True, [True], [1.5], [None], ["a", 1], [[1], [2.5]], [[True]], [["a"]]])
def test_prompts_of_no_known_form(prompt: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        completion_call({"model": "m", "prompt": prompt})
    assert (caught.value.param or "").startswith("prompt")


@pytest.mark.parametrize(
    "stream, options, wanted",
    [
        (True, {}, (True, False)),
        (True, {"include_usage": True, "x": 1}, (True, True)),
        (None, None, (False, False)),
        (True, None, (True, False)),
        (True, {"include_usage": None}, (True, False)),
    ],
)
def test_stream_options(stream: Any, options: Any, wanted: tuple[bool, bool]) -> None:
    call = chat_call({**CHAT, "stream": stream, "stream_options": options})
    assert (call.stream, call.include_usage, call.include_draft_details) == (*wanted, False)
    wants = chat_call({**CHAT, "stream": True, "stream_options": {"include_usage": True}, "include_draft_details": True})
    assert wants.include_draft_details and chat_call({**CHAT, "include_draft_details": True}).include_draft_details


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"include_draft_details": 1}, "include_draft_details"),
        ({"include_draft_details": True, "stream": True}, "include_draft_details"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 0}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "2"}, "top_logprobs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidParameter, Unsupported)) as caught:
        chat_call({**CHAT, **fields})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "logprobs, top, wanted", [(None, None, None), (False, None, None), (True, None, 0), (True, 0, 0), (True, 20, 20)]
)
def test_chat_logprobs(logprobs: Any, top: Any, wanted: int | None) -> None:
    assert chat_call({**CHAT, "logprobs": logprobs, "top_logprobs": top}).sampling["logprobs"] == wanted
