"""What settings do: key, served name, log format; and models that lack a template or bring sampling defaults."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.live import LiveServer

KEY = {b"Authorization": "Bearer sésame".encode()}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(model="fake-base-greedy", api_key="sésame", served_model_name="mine/own", log_json=True) as live:
        yield live


def post(server: LiveServer, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json={"model": "mine/own", "prompt": "say(ok)", **fields}, headers=KEY)


@pytest.mark.parametrize(
    "headers",
    [{}, {b"Authorization": b"Bearer wrong"}, {b"Authorization": "sésame".encode()}, {b"Authorization": "Basic sésame".encode()}],
)
def test_without_the_key(server: LiveServer, headers: Any) -> None:
    for path in ("/v1/completions", "/v1/nope", "/v1/models"):
        response = server.http.post(path, json={"model": "mine/own", "prompt": "x"}, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert all(server.http.get(path).status_code == 200 for path in ("/health", "/ready", "/metrics", "/docs"))


def test_with_the_key_and_the_served_name(server: LiveServer) -> None:
    assert post(server).json()["model"] == "mine/own"
    assert server.http.get("/v1/models/mine/own", headers=KEY).json()["id"] == "mine/own"
    assert post(server, model="fake").status_code == 404
    assert "same" not in server.log


def test_a_base_model_has_no_chat(server: LiveServer) -> None:
    """L08."""
    call = {"model": "mine/own", "messages": [{"role": "user", "content": "hi"}]}
    response = server.http.post("/v1/chat/completions", json=call, headers=KEY)
    assert response.status_code == 400 and "chat template" in response.json()["error"]["message"]
    assert "/v1/completions" in server.log, "the example must be one that works"


def test_sampling_defaults_of_the_model(server: LiveServer) -> None:
    assert "temperature=0.0" in server.log
    for fields, num_different in (({}, 1), ({"temperature": 1}, 2), ({"temperature": None}, 1)):
        answers = post(server, prompt="[random]", n=2, seed=3, **fields).json()["choices"]
        assert len({choice["text"] for choice in answers}) == num_different


def test_json_logs() -> None:
    with LiveServer(log_json=True) as server:
        assert server.complete().status_code == 200
        assert server.complete(temperature="hot and secret").status_code == 400
        assert server.http.get("/nowhere").status_code == 404
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.lines[:-1]]
        line, refused, lost = [line for line in lines if line["logger"] == "slipstream.access"]
        assert line["status"] == 200 and line["output_tokens"] == 3 and line["finish"] == "stop" and line["id"].startswith("req-")
        assert (refused["status"], refused["error"], refused["param"]) == (400, "invalid_value", "temperature")
        assert (lost["status"], lost["error"]) == (404, "unknown_path") and "param" not in lost
        assert "error" not in line and "secret" not in json.dumps(refused), "what clients send is not logged"
