"""What surrounds every request: an id, a line in the log, a count, a key, and an answer whatever happens.

Plain ASGI: nothing here buffers a stream or stands between a route and the client's hanging up.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.errors import SlipstreamError, Unauthorized
from slipstream.observe import log
from slipstream.observe.metrics import Metrics
from slipstream.server.answers import Answers
from slipstream.server.errors import error_response
from slipstream.server.serving import new_id

# Open without a key: what says nothing of what is asked or answered.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
CLIENT_GONE = 499  # nobody sees it; for log and metrics

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NOTES = "slipstream.notes"

access = logging.getLogger("slipstream.access")
logger = logging.getLogger("slipstream.server")


def note(scope: Scope, **notes: object) -> None:
    """Tell the log of this request: `response` (id), `answers`, `hung_up`, `error`."""
    scope[_NOTES].update(notes)


class Surround:
    """Gives each request an id (the client's X-Request-Id, where it is decent), answers errors, logs and counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        given = _header(scope, b"x-request-id")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_id("req")
        scope[_NOTES] = {}
        status, is_complete = 0, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except SlipstreamError as error:
            note(scope, error=error)
            await error_response(error)(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed")
            if not is_complete:
                raise  # the server closes the connection
        finally:
            hung_up = "hung_up" in scope[_NOTES] or not status
            self._record(scope, request_id, CLIENT_GONE if hung_up else status, time.monotonic() - began)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        path = scope["path"]
        route = scope.get("route")
        self._metrics.http_request(getattr(route, "path", "other"), status)
        notes: dict[str, Any] = scope[_NOTES]
        answers: Answers | None = notes.get("answers")
        error: SlipstreamError | None = notes.get("error")
        log.event(
            access,
            logging.DEBUG if path in QUIET_PATHS and status == 200 else logging.INFO,
            f"{scope['method']} {path[:200] if path.isprintable() else repr(path)[:200]}",
            status=status,
            seconds=round(seconds, 4),
            id=request_id,
            response=notes.get("response"),
            error=None if error is None else error.code or error.kind,  # not its message: that quotes what the client sent
            param=None if error is None else error.param,
            **(answers.log_fields() if answers else {}),
        )


class RequireKey:
    """Asks for `Authorization: Bearer KEY` everywhere but on OPEN_PATHS."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = _digest(api_key.encode("utf-8", "surrogateescape"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. Raises `Unauthorized`."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, key = _header(scope, b"authorization").partition(" ")
            # Digests are of one length, and compared in constant time: neither tells how much of a guess was right.
            is_right = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._wanted)
            if scheme.lower() != "bearer" or not is_right:
                raise Unauthorized("the API key must be the server's own, but got " + ("another" if key else "none"))
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""
