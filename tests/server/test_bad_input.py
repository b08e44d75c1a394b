"""Bad input is refused by name, in OpenAI's error shape, before anything is started; neighbours do not notice."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.events import complete_events, cut_events, texts
from tests.server.fake_engine import VOCAB_SIZE
from tests.server.live import LiveServer

BAD_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e308", '"0.5"', "true", "[]", "{}", "1e999"]
SAMPLING = ["temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty"]


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The error of a response, which must be one in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.text, parse_constant=pytest.fail)
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    error: dict[str, Any] = body["error"]
    assert error["message"] and error["type"] in ("invalid_request_error", "authentication_error", "server_error")
    if param is not None:
        assert error["param"] == param, error
        assert param.partition(".")[0].partition("[")[0] in error["message"]
    return error


def post(
    server: LiveServer, body: str | bytes, path: str = "/v1/completions", content_type: str = "application/json"
) -> httpx.Response:
    return server.http.post(path, content=body, headers={"Content-Type": content_type})


@pytest.fixture(autouse=True)
def _stays_alive(server: LiveServer) -> Any:
    yield
    assert server.is_alive()


@pytest.mark.parametrize("value", BAD_NUMBERS)
@pytest.mark.parametrize("field", SAMPLING)
def test_sampling_numbers(server: LiveServer, field: str, value: str) -> None:
    """A01."""
    for path, prompt in (
        ("/v1/completions", '"prompt": "x"'),
        ("/v1/chat/completions", '"messages": [{"role": "user", "content": "x"}]'),
    ):
        refused(post(server, f'{{"model": "fake", {prompt}, "{field}": {value}}}', path), param=field)


@pytest.mark.parametrize(
    "field, value, is_fine",
    [
        ("temperature", 0, True), ("temperature", -1, False), ("top_p", 0, False), ("top_p", -1, False), ("min_p", 0, True),
        ("min_p", -1, False), ("top_k", 0, True), ("top_k", -1, True), ("top_k", -2, False), ("repetition_penalty", 0, False),
        ("repetition_penalty", -1, False), ("presence_penalty", 0, True), ("frequency_penalty", -1, True),
        ("frequency_penalty", -2.1, False),
    ],
)  # fmt: skip
def test_edges_of_sampling_numbers(server: LiveServer, field: str, value: float, is_fine: bool) -> None:
    """A01."""
    response = server.complete(**{field: value})
    if is_fine:
        assert response.status_code == 200, response.text
    else:
        refused(response, param=field)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e39}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stop_token_ids": [None]}, "stop_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1], "min_tokens": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["5"], "min_tokens": 5}, "stop_token_ids"),
    ],
)
def test_token_ids(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    """A02."""
    refused(server.complete(**fields), param=param)
    refused(server.chat(**fields), param=param)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 5_000_000}, "n"), ({"n": 65}, "n"), ({"n": "2"}, "n"), ({"n": True}, "n"),
        ({"logprobs": -1}, "logprobs"), ({"logprobs": 21}, "logprobs"), ({"logprobs": 1_000_000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [10**12]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"stop": ["x"] * 10_000}, "stop"), ({"stop": "x" * 2**20}, "stop"), ({"stop": ""}, "stop"), ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"prompt": ["x"] * 65}, "prompt"), ({"prompt": ["x"] * 10, "n": 7}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"), ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": False, "echo": True}, "max_tokens"), ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"echo": 1}, "echo"), ({"echo": "true"}, "echo"), ({"echo": True, "logprobs": "1"}, "logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"), ({"echo": True, "logprobs": 3, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"seed": 2**64}, "seed"), ({"seed": 1.5}, "seed"), ({"min_tokens": -1}, "min_tokens"),
        ({"prompt": ""}, "prompt"), ({"prompt": [""]}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": None}, "prompt"),
        ({"prompt": ["say(ok)", ""]}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"), ({"stop": ["\udfff"]}, "stop"),
        ({"model": "\ud800"}, None), ({"model": 7}, "model"), ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_completion_fields(server: LiveServer, fields: dict[str, Any], param: str | None) -> None:
    """A03, A07, K08."""
    body = json.dumps({"model": "fake", "prompt": "x", **fields})
    refused(post(server, body), 404 if param is None else 400, param)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"top_logprobs": 5}, "top_logprobs"), ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"), ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "nope"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}}, "response_format"),
        ({"guided_regex": "(ab"}, "guided_regex"), ({"guided_json": {"type": "banana"}}, "guided_json"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"structured_outputs": {"regex": "^(a|)$"}}, "structured_outputs"),
        ({"best_of": 2}, "best_of"), ({"prompt_logprobs": "1"}, "prompt_logprobs"), ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"), ({"logits_processors": ["x"]}, "logits_processors"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream": "yes"}, "stream"),
    ],
)  # fmt: skip
def test_chat_fields(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    """A03, A07, A08, A16, K08."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], **fields}
    refused(post(server, json.dumps(body), "/v1/chat/completions"), param=param)


@pytest.mark.parametrize("times", [1, 10])
def test_prompts_as_long_as_the_context_and_longer(server: LiveServer, times: int) -> None:
    """K08."""
    assert refused(server.complete("x" * 512 * times))["code"] == "context_length_exceeded"
    assert refused(server.chat("x" * 512 * times))["code"] == "context_length_exceeded"
    assert refused(server.complete("x" * 500, max_tokens=13))["code"] == "context_length_exceeded"
    assert server.complete("x" * 500, max_tokens=12).status_code == 200


@pytest.mark.parametrize(
    "body, status",
    [
        (b"{", 400), (b"[]", 400), (b"", 400), (b"null", 400), (b'{"model": "\xff"}', 400), (b"[" * 50_000, 400),
        (b'{"prompt": "x"}', 400), (b'{"model": "nope", "prompt": "x"}', 404), (b'{"model": "", "prompt": "x"}', 404),
        (b'{"model": "FAKE", "prompt": "x"}', 404),
    ],
)  # fmt: skip
def test_broken_bodies(server: LiveServer, body: bytes, status: int) -> None:
    """A06."""
    refused(post(server, body), status)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_wrong_content_types(server: LiveServer, content_type: str) -> None:
    """A06."""
    refused(post(server, b'{"model": "fake", "prompt": "x"}', content_type=content_type), 415)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"])
def test_content_types_of_json(server: LiveServer, content_type: str) -> None:
    assert post(server, b'{"model": "fake", "prompt": "x"}', content_type=content_type).status_code == 200


def test_bodies_that_are_too_large(server: LiveServer) -> None:
    """A06."""
    refused(post(server, b" " * 50_000_000), 413)
    refused(server.http.post("/v1/completions", content=(b" " * 2**20 for _ in range(20))), 413)  # says no length before


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("POST", "/v1/nope", 404), ("GET", "/", 404), ("POST", "/v1/completions/", 404), ("GET", "/v1/%ff%0a", 404),
        ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/health", 405), ("GET", "/v1/models/nope", 404),
    ],
)  # fmt: skip
def test_paths_and_methods(server: LiveServer, method: str, path: str, status: int) -> None:
    """A06."""
    refused(server.http.request(method, path), status)


def test_what_the_engine_refuses_is_a_status_and_no_stream(server: LiveServer) -> None:
    for stream in (False, True):
        error = refused(server.complete("[refuse]", stream=stream))
        assert error["code"] == "kv_pool_too_small" and "hint: lower max_tokens" in error["message"]


@pytest.mark.parametrize("call, code", [("[abort=3]", None), ("[nan=3]", "non_finite_logits")])
def test_a_stream_that_the_engine_cuts_off_does_not_look_complete(server: LiveServer, call: str, code: str | None) -> None:
    """A12."""
    for route in (server.complete, server.chat):
        events, error = cut_events(route(f"say(hello) {call}", stream=True, stream_options={"include_usage": True}))
        assert texts(events) == {0: "he"} and error["code"] == code and error["type"] == "server_error"
        assert all(event["usage"] is None for event in events)
        assert refused(route(f"say(hello) {call}"), 500)["code"] == code
    cut_events(server.complete([f"say(hello) {call}", "[random] [delay=0.01]"], max_tokens=400, stream=True))
    server.until_idle()  # the other answer of the call is not computed on


def test_good_neighbours_are_answered(server: LiveServer) -> None:
    with server.http.stream("POST", "/v1/completions", json={
        "model": "fake", "prompt": "say(slow) [delay=0.05]", "stream": True}) as stream:  # fmt: skip
        refused(server.complete(stop_token_ids=[VOCAB_SIZE]))
        refused(server.complete("[nan=1]"), 500)
        refused(server.complete("[refuse]"))
        stream.read()
        assert texts(complete_events(stream)) == {0: "slow"}
