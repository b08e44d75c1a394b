"""Reads server-sent events."""

from __future__ import annotations

import json
from typing import Any

import httpx

DONE = "[DONE]"


def data_lines(text: str) -> list[str]:
    """The data of each event; anything else in a stream is a mistake."""
    events = text.split("\n\n")
    assert events.pop() == "", "the last event must end, too"
    assert all(event.startswith("data: ") and "\n" not in event for event in events), text
    return [event.removeprefix("data: ") for event in events]


def complete_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = data_lines(response.text)
    assert lines.pop() == DONE and DONE not in lines
    events = [json.loads(line) for line in lines]
    assert not any("error" in event for event in events), events
    return events


def cut_events(response: httpx.Response) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream that was cut off, and its error."""
    assert response.status_code == 200
    events = [json.loads(line) for line in data_lines(response.text)]  # [DONE] would not parse
    error = events.pop()
    assert set(error) == {"error"} and not any("error" in event for event in events)
    assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])
    return events, error["error"]


def texts(events: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice."""
    out: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            out[choice["index"]] = out.get(choice["index"], "") + piece
    return out


def finish_reasons(events: list[dict[str, Any]]) -> dict[int, str]:
    """The finish reason of each choice, which must come once and last."""
    out: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in out, "nothing may follow a finish reason"
            if choice["finish_reason"] is not None:
                out[choice["index"]] = choice["finish_reason"]
    return out
