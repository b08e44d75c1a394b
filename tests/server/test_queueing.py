"""What a request says of its place in the queue and of the prefix cache, and what it is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.events import complete_events, texts
from tests.server.live import LiveServer


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_priority_salt_and_parent_reach_the_engine(server: LiveServer, route: str) -> None:
    call = getattr(server, route)

    def told(**fields: Any) -> list[str]:
        choices = call("[tell]", max_tokens=64, **fields).json()["choices"]
        return [choice["text"] if route == "complete" else choice["message"]["content"] for choice in choices]

    assert told() == ["0 '' None"]
    assert told(priority=None, cache_salt=None) == ["0 '' None"]
    assert told(priority=-5, cache_salt="user 7", n=3) == ["-5 'user 7' None", "-5 'user 7' 0", "-5 'user 7' 0"]
    assert texts(complete_events(call("[tell]", max_tokens=64, priority=2**31 - 1, stream=True))) == {0: "2147483647 '' None"}


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize(
    "field, value",
    [
        *[("priority", value) for value in (2**31, -(2**31) - 1, "1", 1.5, True)],
        *[("cache_salt", value) for value in ("", "x" * 257, 5, ["a"])],
    ],
)
def test_bad_ones_are_refused_by_name(server: LiveServer, route: str, field: str, value: Any) -> None:
    response = getattr(server, route)("say(ok)", **{field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


@pytest.fixture(scope="module")
def own() -> Iterator[LiveServer]:
    with LiveServer(api_key="secret") as live:
        yield live


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_was_cached(server: LiveServer, route: str, stream: bool) -> None:
    """Of each prompt once, however many answers share it."""
    fields = {"n": 2, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    response = getattr(server, route)("say(ok) [cached=5]", **fields)
    usage = complete_events(response)[-1]["usage"] if stream else response.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}


def test_the_prefix_cache_is_reset(own: LiveServer) -> None:
    assert own.http.post("/reset_prefix_cache").status_code == 401, "not for everybody"
    own.http.headers["Authorization"] = "Bearer secret"

    def cached() -> int:
        return int(own.complete("say(ok) [cached=5]").json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 5
    response = own.http.post("/reset_prefix_cache")
    assert response.status_code == 200 and response.json() == {"success": True}
    assert cached() == 0
    assert own.http.get("/reset_prefix_cache").status_code == 405
