"""Reads request bodies: bounded, JSON, an object, without NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from slipstream.errors import BodyTooLarge, InvalidParameter, InvalidRequest, shown
from slipstream.server.errors import ClientGone, WrongContentType

# A body over the limit is read to its end and dropped, so that the client sees the answer and not a broken pipe; up to this
# many times the limit.
MAX_DROPPED = 8


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises `BodyTooLarge`, `WrongContentType`, `InvalidRequest` or, for NaN, `InvalidParameter`."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise WrongContentType(
            f"the body must be application/json, but got {shown(media_type)}", hint="-H 'Content-Type: application/json'"
        )
    value = parse_json(await _read(request, max_bytes))
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, but got {shown(value)}")
    return value


def parse_json(data: bytes) -> Any:
    """JSON in the strict sense. A number that is not finite, spelled NaN or 1e999, is refused by the name of its field."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"got: {error}" if data else "it is empty"
    # Python's own reader knows more spellings, so that we can say which field is to blame.
    try:
        value = json.loads(data.decode("utf-8"))
        field = _non_finite_field(value)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"the body must be JSON, but {problem}") from None
    if field is not None:
        raise InvalidParameter(field[0], "be a finite number", field[1])
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isascii() and length.isdigit() else 0
    if announced > MAX_DROPPED * max_bytes:
        raise _too_large(max_bytes, announced)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= max_bytes:
                chunks.append(chunk)
            elif size > MAX_DROPPED * max_bytes:
                break
            else:
                chunks.clear()
    except ClientDisconnect:
        raise ClientGone from None
    if size > max_bytes:
        raise _too_large(max_bytes, size)
    return b"".join(chunks)


def _too_large(max_bytes: int, size: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body must have at most {max_bytes} bytes, but got {size}", hint="--max-body-bytes sets the limit")


def _non_finite_field(value: Any, path: str = "") -> tuple[str, float] | None:
    if isinstance(value, float) and not math.isfinite(value):
        return path or "the body", value
    children: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        children = [(f"{path}.{key}" if path else str(key), child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    for name, child in children:
        if (found := _non_finite_field(child, name)) is not None:
            return found
    return None
