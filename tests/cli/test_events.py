"""Streams of events, cut anywhere."""

from __future__ import annotations

import pytest

from slipstream.cli.events import EventData

STREAM = 'data: {"a": "x\u2028y\x85z"}\n\n: a comment\r\nevent: e\r\ndata:two\r\rdata: [DONE]\n\n'.encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_data_lines_whatever_the_pieces(size: int) -> None:
    events = EventData()
    found = [data for at in range(0, len(STREAM), size) for data in events.feed(STREAM[at : at + size])]
    assert found == ['{"a": "x\u2028y\x85z"}', "two", "[DONE]"]
