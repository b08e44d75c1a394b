"""Server-sent events: one event a choice's delta, all that is there in one write.

    data: {...}                       as often as there is news
    data: {..., "usage": {...}}       with include_usage: once, with no choices
    data: [DONE]                      only behind answers that all ended as they should

A stream that is cut off ends with `data: {"error": {...}}` instead, and without [DONE]: it cannot be taken for a complete one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.frontend.assemble import Delta
from slipstream.server.answers import Answers
from slipstream.server.errors import ClientGone, error_body, internal_error
from slipstream.server.logprobs import Json
from slipstream.server.middleware import note
from slipstream.server.shapes import Shape

DONE = b"data: [DONE]\n\n"

logger = logging.getLogger("slipstream.server")
# Events end at \n alone, but many clients cut lines where `str.splitlines` does. JSON spells control characters below U+0020 as
# escapes; these may be escaped too.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in ("\x85", "\u2028", "\u2029")}
_to_json = msgspec.json.Encoder().encode


def _encode(event: object) -> bytes:
    data = _to_json(event)
    for end, escaped in _LINE_ENDS.items():
        data = data.replace(end, escaped)
    return data


class EventStream(Response):
    """The response to a call with `stream: true`. `answers.first()` has been awaited.

    Args:
        answers: what to stream.
        shape: how to write it.
        usage: what the answers took, asked once they have ended: an event of its own; the others then have `"usage": null`. None:
            there is no such event.
        release: called once the stream is over, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self, answers: Answers, shape: Shape, usage: Callable[[], Json] | None, release: Callable[[Answers], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answers = answers
        self._shape = shape
        self._usage = usage
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with self._answers.until_hang_up(receive):
                try:
                    async for deltas in self._answers:
                        data = b"".join(map(self._events, deltas))
                        if data:
                            await send({"type": "http.response.body", "body": data, "more_body": True})
                    ending = self._usage_event() + DONE
                except ClientGone:
                    note(scope, hung_up=True)
                    return
                except SlipstreamError as error:
                    ending = b"data: " + error_body(error) + b"\n\n"
                except Exception as error:
                    logger.exception("a stream failed")
                    ending = b"data: " + error_body(internal_error(error)) + b"\n\n"
                self._release(self._answers)
                await send({"type": "http.response.body", "body": ending, "more_body": False})
        finally:
            self._release(self._answers)

    def _events(self, delta: Delta) -> bytes:
        return b"".join(map(self._event, self._shape.choices(delta)))

    def _event(self, choice: Json) -> bytes:
        event = self._shape.event([choice])
        if self._usage is not None:
            event["usage"] = None
        return b"data: " + _encode(event) + b"\n\n"

    def _usage_event(self) -> bytes:
        if self._usage is None:
            return b""
        return b"data: " + _encode({**self._shape.event([]), "usage": self._usage()}) + b"\n\n"
