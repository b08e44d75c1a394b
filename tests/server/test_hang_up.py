"""S27: a client that hangs up aborts its own requests, at every stage, and nobody else's."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.server.events import complete_events, texts
from tests.server.live import DEADLINE_S, LiveServer

LONG = "say(" + "x" * 300 + ") [delay=0.02]"


class Call:
    """A POST over a socket of our own, which can be dropped at any moment."""

    def __init__(self, server: LiveServer, path: str, **body: Any) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        data = json.dumps({"model": "fake", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)
        self.received = b""

    def until(self, what: bytes, count: int = 1) -> None:
        """Read until `what` has come `count` times."""
        while self.received.count(what) < count:
            data = self.socket.recv(65536)
            assert data, f"{what!r} must come {count} times, but got only {self.received!r}"
            self.received += data

    def hang_up(self) -> None:
        self.socket.close()


def busy(server: LiveServer, running: int, waiting: int = 0) -> None:
    server.until(
        lambda: (server.gauge("num_requests_running"), server.gauge("num_requests_waiting")) == (running, waiting),
        f"{running} running and {waiting} waiting",
    )


def aborts(server: LiveServer) -> float:
    text, name = server.http.get("/metrics").text, "slipstream:request_failure_total{"
    lines = [line for line in text.splitlines() if line.startswith(name) and 'reason="abort"' in line]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.fixture(autouse=True)
def _ends_idle(server: LiveServer) -> Any:
    server.until_idle()
    yield
    server.until_idle()
    assert server.is_alive()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(server: LiveServer, stream: bool, n: int) -> None:
    before = aborts(server)
    call = Call(server, "/v1/completions", prompt="[hang]", stream=stream, n=n)
    busy(server, n)
    call.hang_up()
    server.until_idle()
    assert aborts(server) == before + n
    server.until(lambda: "status=499" in server.lines[-1], "logging that the client has gone")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_in_mid_run(server: LiveServer, stream: bool, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": LONG} if path == "/v1/completions" else {"messages": [{"role": "user", "content": LONG}]}
    call = Call(server, path, **prompt, stream=stream, max_tokens=150, n=2)
    busy(server, 2)
    if stream:
        call.until(b'"index":0,', 3)
        call.until(b'"index":1,', 3)
    call.hang_up()
    server.until_idle()
    assert b'finish_reason":"' not in call.received


def test_while_queued(server: LiveServer) -> None:
    ahead = Call(server, "/v1/completions", prompt="[hang]", n=8)
    busy(server, 8)
    queued = Call(server, "/v1/completions", prompt="say(never seen)", stream=True)
    busy(server, 8, 1)
    queued.hang_up()
    busy(server, 8, 0)
    ahead.hang_up()


def test_in_the_middle_of_the_body(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")


def test_in_the_last_moment(server: LiveServer) -> None:
    call = Call(server, "/v1/completions", prompt="say(ab)", stream=True)
    call.until(b"[DONE]")
    call.hang_up()


def test_neighbours_and_followers_do_not_notice(server: LiveServer) -> None:
    body = {"model": "fake", "prompt": "say(still here) [delay=0.03]", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as mine:
        for _ in range(3):
            call = Call(server, "/v1/completions", prompt=LONG, stream=True)
            call.until(b"data: ")
            call.hang_up()
        assert server.complete("say(follower)").json()["choices"][0]["text"] == "follower"
        mine.read()
        assert texts(complete_events(mine)) == {0: "still here"}
