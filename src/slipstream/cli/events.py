"""Takes a stream of server-sent events apart. Its lines end with \\n, \\r\\n or \\r alone: a U+2028 or U+0085 in a text is no end
of a line, as it would be for `str.splitlines` and the line iterators built on it.
"""

from __future__ import annotations


class EventData:
    """The `data` lines of a stream that arrives in pieces, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        """The data of the lines that are complete now, without blank ends; comments and other fields are left out."""
        text = self._rest + piece
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:]
        lines = (line.decode() for line in text[:end].splitlines())  # of bytes: at these ends alone
        return [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
