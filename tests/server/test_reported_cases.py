"""Reported failures of other servers, through ours with the real engine and a tiny model (A10, A12, A13, A14, A16)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import serve_real
from tests.server.events import complete_events, cut_events, finish_reasons, texts
from tests.server.live import DEADLINE_S, LiveServer, in_thread
from tests.server.test_hang_up import Call

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def said(server: LiveServer, **fields: Any) -> tuple[str, str]:
    choice = server.complete("hello", temperature=0, max_tokens=40, ignore_eos=True, **fields).json()["choices"][0]
    return choice["text"], choice["finish_reason"]


# A10


def test_a10_stop_strings_in_all_spellings(real_server: LiveServer) -> None:
    whole, _ = said(real_server)
    # Long enough for several tokens, and there for the first time.
    pieces = ((at, whole[at : at + 6]) for at in range(3, len(whole) - 6))
    start, stop = next((at, piece) for at, piece in pieces if whole.find(piece) == at and "\ufffd" not in piece)
    for spelled in (stop, [stop], ["never there", stop], [stop, stop]):
        assert said(real_server, stop=spelled) == (whole[:start], "stop")
        events = complete_events(
            real_server.complete(
                "hello", temperature=0, max_tokens=40, ignore_eos=True, stop=spelled, n=2, logprobs=0, **USAGE
            )
        )
        assert texts(events) == {0: whole[:start], 1: whole[:start]} and finish_reasons(events) == {0: "stop", 1: "stop"}
    for none in (None, [], stop[:-1] + "\x00", ["never there"]):
        assert said(real_server, stop=none) == (whole, "length")
    for wrong in ("", ["", stop], [None], 5, {"a": 1}):
        assert real_server.complete("hello", stop=wrong).status_code == 400


# K05


def test_k05_the_prefix_cache_does_not_show_in_prompt_logprobs(real_server: LiveServer) -> None:
    """Cached prompts say so in usage; prompts that are scored are computed whole, and their values never change."""
    prompt = "a prompt of its own, longer than a page or two, " * 2

    def cached(**fields: Any) -> int:
        usage = real_server.complete(prompt, max_tokens=1, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def scored() -> Any:
        body = real_server.complete(prompt, max_tokens=0, echo=True, logprobs=2).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        return body["choices"][0]["logprobs"]["token_logprobs"][1:]

    assert real_server.http.post("/reset_prefix_cache").json() == {"success": True}
    first = scored()
    assert cached() > 0, "what scoring has computed is there for others"
    assert scored() == pytest.approx(first, abs=1e-9)
    assert cached(cache_salt="mine") == 0 and cached(cache_salt="mine") > 0 and cached(cache_salt="yours") == 0
    assert real_server.http.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0
    events = complete_events(real_server.complete(prompt, max_tokens=1, **USAGE))
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert scored() == pytest.approx(first, abs=1e-9)


# A12


@pytest.mark.parametrize("how", ["killed", "drained"])
def test_a12_a_stream_that_is_cut_off_does_not_look_complete(real_folder: Path, how: str) -> None:
    """Streams end once, with an error, no reason and no end marker; what is not streamed is a 5xx; the connections close."""
    with serve_real(real_folder, "--drain-timeout-s", 0.3) as server:
        call = {"model": "fake", "max_tokens": 150, "ignore_eos": True, "n": 8, "logprobs": 1}
        with server.http.stream("POST", "/v1/completions", json={**call, "prompt": "x" * 90, "stream": True}) as stream:
            chunks = stream.iter_bytes()
            begun = next(chunks)
            os.kill(server.engine_pid, signal.SIGSTOP)  # what has begun cannot end by itself any more
            chat, chat_results = in_thread(lambda: server.chat("hello", max_tokens=9, stream=True))
            whole, whole_results = in_thread(lambda: server.complete("hello", max_tokens=9))
            server.until(lambda: server.gauge("request_prompt_tokens_count") == 3, "taking both calls")
            if how == "killed":
                os.kill(server.engine_pid, signal.SIGKILL)
            else:
                server.signal(signal.SIGTERM)
            text = (begun + b"".join(chunks)).decode()
        for thread in (chat, whole):
            thread.join(DEADLINE_S)
        server.wait()
    assert "[DONE]" not in text and text.count('"error"') == 1
    *events, error, end = text.split("\n\n")
    assert end == "" and '"error"' in error and all('"finish_reason":null' in event for event in events)
    for result in (chat_results[0], whole_results[0]):
        assert result.status_code == 503 and result.json()["error"]["message"], "nothing had begun: an HTTP status can say it"


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a12_an_engine_that_aborts_or_fails(server: LiveServer, route: str) -> None:
    """With another engine, which can be told to: of two answers one goes wrong, and the call ends as a whole, once."""
    call = getattr(server, route)
    for wrong in ("[abort=3]", "[nan=3]"):
        events, error = cut_events(call(f"say(hello) {wrong}", n=2, stream=True))
        assert events and error["message"] and error["type"] == "server_error"
        assert call(f"say(hello) {wrong}", n=2).status_code == 500
    server.until_idle()
    assert server.is_alive()


# A13


def test_a13_ignore_eos_on_chat(real_server: LiveServer) -> None:
    """Exactly max_tokens tokens, whatever ends the template's turns."""
    for seed in range(6):
        whole = real_server.chat("hello", seed=seed, ignore_eos=True, max_tokens=50).json()
        assert whole["usage"]["completion_tokens"] == 50 and whole["choices"][0]["finish_reason"] == "length"
        events = complete_events(real_server.chat("hello", seed=seed, ignore_eos=True, max_tokens=50, **USAGE))
        assert events[-1]["usage"] == whole["usage"] and finish_reasons(events) == {0: "length"}


def test_a13_min_tokens(real_server: LiveServer) -> None:
    """An answer that a stop string would end at once goes on for min_tokens; a contradiction is refused."""
    whole, _ = said(real_server)
    stop = sorted({char for char in whole if char.isprintable() and char != "\ufffd"})
    first = real_server.complete("hello", temperature=0, max_tokens=40, ignore_eos=True, stop=stop).json()["usage"]
    held = real_server.complete("hello", temperature=0, max_tokens=40, ignore_eos=True, stop=stop, min_tokens=20).json()
    assert first["completion_tokens"] < 20 < held["usage"]["completion_tokens"]
    for route in (real_server.complete, real_server.chat):
        for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": None}):
            refused = route("hello", min_tokens=300, **fields)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"


# A14


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a14_several_answers(real_server: LiveServer, route: str) -> None:
    call = getattr(real_server, route)

    def said(body: Any) -> dict[int, str]:
        return {one["index"]: one["text"] if route == "complete" else one["message"]["content"] for one in body["choices"]}

    fields = {"n": 4, "seed": 1, "temperature": 1, "max_tokens": 30}
    first = call("hello", **fields).json()
    assert len(set(said(first).values())) == 4 and list(said(first)) == [0, 1, 2, 3]
    assert said(call("hello", **fields).json()) == said(first)
    assert len(set(said(call("hello", n=4, temperature=0, max_tokens=30).json()).values())) == 1
    events = complete_events(call("hello", **{**fields, "n": 2}, **USAGE))
    assert texts(events) == {index: text for index, text in said(first).items() if index < 2}
    assert sorted(finish_reasons(events)) == [0, 1]
    one = call("hello", **{**fields, "n": 1}).json()["usage"]
    assert first["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert first["usage"]["completion_tokens"] > one["completion_tokens"]


def test_a14_hang_up_in_the_middle_of_several_answers(real_server: LiveServer) -> None:
    """More answers than run at once; nothing of them is left."""
    for stream in (True, False):
        call = Call(real_server, "/v1/completions", prompt="x" * 50, n=32, max_tokens=200, ignore_eos=True, stream=stream)
        real_server.until(lambda: real_server.gauge("num_requests_running") > 0, "running")
        call.hang_up()
        real_server.until_idle()
        assert real_server.gauge("kv_cache_usage_perc") == 0
    assert said(real_server)[1] == "length"


# A16


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_a16_two_spellings_of_a_message(real_server: LiveServer, role: str) -> None:
    """The same prompt, and so the same answer, whether content is text or a list of parts."""

    def answer(content: Any) -> tuple[Any, str]:
        messages = [{"role": "user", "content": "x"}, {"role": role, "content": content, "tool_call_id": "c1"}]
        body = {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 12}
        response = real_server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens"], response.json()["choices"][0]["message"]["content"]

    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "ho"}]
    assert answer("hi") == answer(parts[:1])
    assert answer("hi\nho") == answer(parts) != answer("hi")
    assert answer("") == answer([{"type": "text", "text": ""}])


def test_a16_content_that_is_absent_beside_tool_calls(real_server: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def answer(**content: Any) -> Any:
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ]
        body = {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 12}
        response = real_server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens"], response.json()["choices"][0]["message"]["content"]

    assert answer() == answer(content=None) == answer(content="") == answer(content=[])


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        5,
        {"type": "text", "text": "hi"},
        ["hi"],
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        [{"type": "file", "file": {"file_id": "f"}}],
        [{"type": "refusal", "refusal": "no"}],
    ],
)
def test_a16_what_this_model_cannot_read(real_server: LiveServer, content: Any) -> None:
    response = real_server.chat(content)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("messages[0].content")
