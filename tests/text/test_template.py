"""Chat templates and the messages they get."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

import pytest

from slipstream.errors import InvalidParameter, InvalidRequest, Unsupported
from slipstream.text.messages import normalised_messages
from slipstream.text.template import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}


def render(source: str, messages: Any = HI, add: bool = True, **given: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(normalised_messages(messages), add, **given)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ pad_token }}x", "x"),  # undefined is nothing
        ("{% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),  # trim_blocks, lstrip_blocks
        ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{{ 1 }}{% endgeneration %}y", "x1y"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_what_model_authors_rely_on(source: str, wanted: str) -> None:
    assert render(source) == wanted


def test_dates_tools_and_variables() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}
    assert render("{{ tools[0].name }}{{ flag }}", tools=[{"name": "f"}], variables={"flag": 1, "messages": "no"}) == "f1"


def test_a_template_that_refuses_is_a_bad_request_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate") as caught:
        render("{{ raise_exception('Roles must alternate') }}")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",  # the sandbox is immutable
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template must render"):
        render(source)


def test_a_template_that_does_not_compile_says_so() -> None:
    with pytest.raises(InvalidRequest, match="must compile"):
        render("{% if %}")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "developer"])
def test_content_as_text_and_as_parts_mean_the_same(role: str) -> None:
    text = normalised_messages([{"role": role, "content": "hi"}])
    assert text == normalised_messages([{"role": role, "content": [{"type": "text", "text": "hi"}]}])
    assert text[0]["role"] == ("system" if role == "developer" else role)


def test_tool_messages_and_calls() -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}], "extra": 1}
    got = normalised_messages([{"role": "assistant", "tool_calls": [CALL]}, tool])
    function = {"name": "f", "arguments": {"x": "é"}}
    assert got == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, "id": "c1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]


def test_null_and_absent_content_next_to_tool_calls_are_equal() -> None:
    forms: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    rendered = {str(normalised_messages([{"role": "assistant", "tool_calls": [CALL], **form}])) for form in forms}
    assert len(rendered) == 1
    assert "tool_calls" in rendered.pop()


def test_two_text_parts_are_joined_by_a_newline() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalised_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_arguments_that_are_no_json_object_stay_text() -> None:
    for arguments, wanted in (
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        (None, {}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ("[" * 10**5, "[" * 10**5),
    ):
        call = {"function": {"name": "f", "arguments": arguments}}
        got = normalised_messages([{"role": "assistant", "tool_calls": [call]}])
        assert got[0]["tool_calls"][0]["function"]["arguments"] == wanted


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": math.nan}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[1].type",
        ),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].content"),
        ([{"role": "assistant", "content": "a", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "user", "content": "a", "name": 5}], "messages[0].name"),
    ],
)
def test_wrong_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        normalised_messages(messages)
    assert caught.value.param == param


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_unsupported_message_fields_are_refused(field: str) -> None:
    with pytest.raises(Unsupported, match=field):
        normalised_messages([{"role": "assistant", "content": "a", field: {"name": "f"}}])
    assert normalised_messages([{"role": "assistant", "content": "a", field: None}])
