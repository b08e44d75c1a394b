"""Logs: one line an event (a table: one for each row) on stderr, or a JSON object each. Data goes to stdout, never logs.

log.configure("info", as_json=False)
log.event(logger, logging.INFO, "request", status=200, seconds=0.12)

12:00:01 INFO  request status=200 seconds=0.12
{"time": "...", "level": "info", "logger": "slipstream.access", "message": "request", "status": 200, "seconds": 0.12}
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any


def configure(level: str, as_json: bool) -> None:
    """Send this process's logs to stderr: ours from `level` on, libraries' warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("slipstream").setLevel(level.upper())


def event(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Log a message with named values; those that are None are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def table(
    logger: logging.Logger, level: int, message: str, text: Callable[[], str], fields: Callable[[], dict[str, object]]
) -> None:
    """Log a message with several lines behind it, or as JSON with fields instead; both are made only where they are logged."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={"fields": fields(), "text": text()})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return record.__dict__.get("fields") or {}


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [f"{at} {record.levelname:5} {record.getMessage()}"]
        text = record.__dict__.get("text")
        if text is None:
            parts += [f"{name}={_one_word(value)}" for name, value in _fields(record).items()]
        line = " ".join(parts) if text is None else f"{parts[0]}\n{text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _one_word(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    # What clients send must not break a line, nor pass for another field.
    return text if text.isascii() and text.isprintable() and " " not in text and '"' not in text else json.dumps(text)
