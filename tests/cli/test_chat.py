"""`chat`: its commands, a terminal's keys, and servers behind --url."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slipstream.cli.main import main
from tests.cli.conftest import Install
from tests.cli.echo_engine import EchoEngine


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def prompts(engine: EchoEngine) -> list[str]:
    return [bytes(request.prompt_token_ids).decode() for request in engine.requests]


def test_set_changes_what_is_sampled_and_back(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    type_in(monkeypatch, "/set temperature 0", "/set stop ab c", "a", "/set", "/set temperature", "/set ignore_eos on", "b")
    assert main(["chat", "m", "--top-k", "7"]) == 0
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.top_k, first.stop, first.ignore_eos) == (0.0, 7, ("ab c",), False)
    assert (second.temperature, second.top_k, second.ignore_eos) == (0.5, 7, True)  # the model's own again
    assert "top_k 7\ntemperature 0.0\nstop ['ab c']\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/set temperature -1", "temperature must be a number from 0 to 100, but got -1.0"),
        ("/set temperature warm", "temperature must be a number, but got 'warm'"),
        ("/set ignore_eos yes", "ignore_eos must be on or off, but got 'yes'"),
        ("/set temprature 1", "a sampling parameter must be one of"),
        ("/set temprature", "a sampling parameter must be one of"),
        ("/sytem be kind", "a command must be one of"),
        ("/foo", "a command must be one of"),
        ("/reset now", "a command must be one of"),
    ],
)
def test_a_wrong_command_is_told_at_once_and_changes_nothing(
    line: str, error: str, install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    type_in(monkeypatch, line, "a")
    assert main(["chat", "m"]) == 1
    assert prompts(engine) == ["u:a;"]
    assert engine.requests[0].params.temperature == 0.5
    assert f"error: {error}" in capsys.readouterr().err


def test_the_system_message_can_be_changed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = install()
    type_in(monkeypatch, "a", "/system two words", "/reset", "b", "/system", "/reset", "c")
    assert main(["chat", "m", "--system", "x"]) == 0
    assert prompts(engine) == ["s:x;u:a;", "s:two words;u:b;", "u:c;"]


def test_stats_of_the_last_reply(install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    type_in(monkeypatch, "/stats", "hey", "/stats")
    assert main(["chat", "m"]) == 0
    before, after = capsys.readouterr().err.splitlines()
    assert before == "no reply yet"
    # "u:hey;" and its own bytes as the answer, then EOS; one token a step.
    assert after.startswith("6 prompt tokens (0 cached), 7 tokens, TTFT ")
    assert after.endswith("tok/s, accept length 1.00")


def test_a_terminals_keys(install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C at the prompt clears the line, Ctrl-D leaves; the prompt does not mix with replies that go to a file."""
    engine = install()
    typed: list[str | BaseException] = [KeyboardInterrupt(), "a", "/set top_k x", EOFError()]

    def read(prompt: str) -> str:
        assert prompt == ""
        line = typed.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "m"]) == 0  # somebody who sits there has seen the error
    assert prompts(engine) == ["u:a;"]
    out, err = capsys.readouterr()
    assert out.split() == ["u:a;"]
    assert err.startswith("/help lists the commands")
    assert err.count("> ") == 4


class Server(ThreadingHTTPServer):
    """Answers each conversation with the number of its messages, or with `status` and `events`."""

    daemon_threads = True
    status = 200
    events: list[Any] | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        assert self.path == "/v1/models"
        self._send(200 if self.server.status == 200 else 401, json.dumps({"data": [{"id": "first"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.status != 200:
            self._send(self.server.status, json.dumps({"error": {"message": "top_k must be known\nhint: leave it out"}}))
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        events = self.server.events or [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": f"{len(body['messages'])} "}}]},
            {"choices": [{"delta": {"content": "é"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
            "[DONE]",
        ]
        self._send(200, "".join(f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_server_answers(
    ending: str, server: Server, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "a", "/set top_k 3", "b", "/stats")
    assert main(["chat", "--url", url + ending, "--api-key", "k", "--system", "x", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == "2 é\n4 é\n"
    first, second = server.bodies
    assert server.keys == ["Bearer k"]
    assert first["messages"] == [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}]
    assert second["messages"][2:] == [{"role": "assistant", "content": "2 é"}, {"role": "user", "content": "b"}]
    assert (first["model"], first["temperature"], first["stream"], "top_k" in first) == ("first", 0.0, True, False)
    assert second["top_k"] == 3
    assert "talking to first" in err
    assert "9 prompt tokens (4 cached), 2 tokens, TTFT " in err


@pytest.mark.parametrize("how", [["other"], ["--model", "other"]])
def test_the_model_to_ask_for(how: list[str], server: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    type_in(monkeypatch, "a")
    assert main(["chat", *how, "--url", url]) == 0
    assert server.bodies[0]["model"] == "other"
    assert server.keys == []  # nobody had to ask for a name


def test_a_refused_message_is_taken_back(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 400
    type_in(monkeypatch, "a", "b")
    assert main(["chat", "m", "--url", url]) == 1
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": text}] for text in "ab"]
    err = capsys.readouterr().err
    assert "error: the server must accept the request, but got HTTP 400: top_k must be known\nhint: leave it out\n" in err


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([{"choices": [{"delta": {"content": "x"}}]}], "the server must end its stream with [DONE], but cut it off"),
        ([{"error": {"message": "out of memory"}}], "the server must finish its answer, but got: out of memory"),
        (["no json"], "the server must stream OpenAI's events, but got JSONDecodeError"),
        ([[1]], "the server must stream OpenAI's events, but got AttributeError"),
    ],
)
def test_a_stream_that_breaks(
    events: list[Any], error: str, server: Server, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = events
    type_in(monkeypatch, "a")
    assert main(["chat", "m", "--url", url]) == 1
    assert f"error: {error}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (["--url", "http://127.0.0.1:9"], "a server must answer at http://127.0.0.1:9", "--url names the server"),
        (["--url", "127.0.0.1:9"], "--url must be an http address", "--url http://127.0.0.1:9"),
        (["--url", "http://x", "--lag", "0"], "--lag must not be given with --url", "settings of its own"),
        (["--url", "http://x", "--config", "f"], "--config must not be given with --url", "settings of its own"),
        (["--api-key", "k"], "--api-key must be given with --url", "asks for no key"),
        (["--url", "http://x", "--top-p", "2"], "top_p must be a number from 0 to 1", None),
    ],
)
def test_wrong_ways_to_ask_a_server(
    argv: list[str], error: str, hint: str | None, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    assert main(["chat", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {error}")
    assert hint is None or hint in err
    assert engine.config is None


def test_a_server_that_asks_for_a_key(server: Server, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 401
    assert main(["chat", "--url", url]) == 2
    assert "hint: --api-key KEY or OPENAI_API_KEY" in capsys.readouterr().err
