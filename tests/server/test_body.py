"""JSON in the strict sense, and messages that say what was wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.errors import InvalidParameter, InvalidRequest
from slipstream.server.body import parse_json


@pytest.mark.parametrize(
    "data, value",
    [
        (b'{"a": [1, 2.5, null, "\\u00e9"]}', {"a": [1, 2.5, None, "é"]}),
        (b"1e308", 1e308),
        (b'"\\ud800"', "\ud800"),
        (b"9" * 30, int("9" * 30)),
    ],
)
def test_json(data: bytes, value: Any) -> None:
    assert parse_json(data) == value


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{'a': 1}", b'{"a": 1}x', b'"\xff"', '{"a": 1}'.encode("utf-16"), b"[" * 100_000, b"9" * 5000]
)
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the body must be JSON, but "):
        parse_json(data)


@pytest.mark.parametrize(
    "body, field",
    [
        ('{"temperature": NaN}', "temperature"),
        ('{"temperature": 1, "top_p": -Infinity}', "top_p"),
        ('{"min_p": 1e999}', "min_p"),
        ('{"logit_bias": {"5": Infinity}}', "logit_bias.5"),
        ('{"prompt": [1, NaN]}', "prompt[1]"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_name(body: str, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_json(body.encode())
    assert caught.value.param == field
    json.loads(json.dumps(str(caught.value)), parse_constant=pytest.fail)
