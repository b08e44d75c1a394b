"""Errors as OpenAI clients know them: {"error": {"message", "type", "param", "code"}}, whatever went wrong and wherever."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from slipstream.errors import EngineBusy, EngineDead, InvalidRequest, SlipstreamError, shown

RETRY_AFTER_S = 1


class ClientGone(Exception):
    """The client hung up; its requests have been aborted."""


class UnknownPath(InvalidRequest):
    """Nothing is served at this path."""

    status = 404
    code = "unknown_path"


class WrongMethod(InvalidRequest):
    """The path is served, with another method."""

    status = 405
    code = "method_not_allowed"


class WrongContentType(InvalidRequest):
    """The body is of another type than JSON."""

    status = 415
    code = "unsupported_media_type"


def error_object(error: SlipstreamError) -> dict[str, Any]:
    """The value of `error` in a body or an event."""
    return {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}


def error_body(error: SlipstreamError) -> bytes:
    """A JSON body. ASCII only: half a surrogate pair that a client sent must not break the answer that says so."""
    return json.dumps({"error": error_object(error)}, allow_nan=False).encode("ascii")


def error_response(error: SlipstreamError) -> Response:
    """A whole response."""
    headers = {}
    if isinstance(error, (EngineBusy, EngineDead)):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, media_type="application/json")


def from_http(error: HTTPException, method: str, path: str) -> SlipstreamError:
    """The framework's own errors (unknown path, wrong method) in our words."""
    if error.status_code == 404:
        return UnknownPath(f"the path must be one that is served here, but got {shown(path)}", hint="GET /docs lists them")
    if error.status_code == 405:
        return WrongMethod(f"{path} must be asked with another method, but got {method}", hint="GET /docs lists them")
    wrapped = InvalidRequest(f"the request must be well-formed, but got: {error.detail}")
    wrapped.status = error.status_code
    return wrapped


def internal_error(error: Exception) -> SlipstreamError:
    """A bug of ours, without its details: they are in the log."""
    return SlipstreamError(f"the server must not fail, but got {type(error).__name__}", hint="the server's log says more")
