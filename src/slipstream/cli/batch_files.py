"""The two files of `run --batch`, in OpenAI's batch format. Both are read line by line; what is kept of a line is eight bytes.

    in    {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out   {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": null}
          {"id": ..., "custom_id": ... or null, "response": null, "error": {"code", "message", "line"}}      no request at all

A line of `out` belongs to the line of `in` with its custom_id; one that has none, to the line whose number it names.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from slipstream.errors import ConfigError, InvalidRequest, shown

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_ID_CHARS = 512


class _Fields(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Status(msgspec.Struct):
    status_code: int = 0


class _Done(msgspec.Struct):
    custom_id: str | None
    response: _Status | None
    error: Any

    @property
    def has_failed(self) -> bool:
        """Whether it is no answer."""
        return self.response is None or self.response.status_code != 200


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input.

    Attributes:
        number: from 1.
        custom_id: None where the line has none that can be used.
        url, body: the request, the body as it is written; meaningless where there is a problem.
        problem: why this is no request, if it is none.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: InvalidRequest | None = None

    @property
    def key(self) -> int:
        """64 bits that stand for the custom_id, or for the number of a line without one."""
        return _key(self.custom_id, self.number)


def read_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """The lines that are not blank. A longer line than `max_bytes` is not kept in memory; it has a problem.

    Raises `ConfigError` where the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, data in _raw_lines(file, max_bytes):
                if data is None:
                    yield Line(number, None, problem=InvalidRequest(f"line {number} must have at most {max_bytes} bytes"))
                elif data.strip():
                    yield _parse(number, data)
    except OSError as error:
        raise ConfigError(f"--batch must name a readable file, but got {str(path)!r}: {error.strerror}") from None


class Todo:
    """Which lines of the input are still to be answered.

    Opens the output for appending, as `file`: its last line is mended where a run was cut in the middle of it. Raises
    `ConfigError` for an input with the same custom_id twice, and for an output that is not of this input. Both are read once.
    """

    def __init__(self, source: Path, out: Path, max_bytes: int) -> None:
        if out.exists() and out.samefile(source):
            raise ConfigError(f"--out must be another file than --batch, but got {str(out)!r} for both")
        keys = array("Q", (line.key for line in read_lines(source, max_bytes)))
        self._keys = np.sort(np.frombuffer(keys, dtype=np.uint64)) if keys else np.empty(0, dtype=np.uint64)
        if (self._keys[1:] == self._keys[:-1]).any():
            _refuse_twice(source, max_bytes, self._keys)
        self.num_lines = len(self._keys)
        self.num_failed = 0  # of those that are done
        self.file = _open(out)
        try:
            self._is_done = self._mark_done(out)
        except BaseException:
            self.file.close()
            raise
        self.num_done = int(self._is_done.sum())

    def __contains__(self, line: Line) -> bool:
        return not self._is_done[self._keys.searchsorted(np.uint64(line.key))]

    def _mark_done(self, out: Path) -> np.ndarray[Any, np.dtype[np.bool_]]:
        is_done = np.zeros(len(self._keys), dtype=np.bool_)
        self.file.seek(0)
        whole_bytes = 0
        for number, data in enumerate(self.file, 1):
            try:
                done = msgspec.json.decode(data, type=_Done)
                key = _key(done.custom_id, done.error["line"] if done.custom_id is None else 0)
            except (msgspec.DecodeError, TypeError, LookupError):
                if data.endswith(b"\n"):
                    raise ConfigError(
                        f"--out must hold answers of a batch, but line {number} of {out} is none", hint="name a new file"
                    ) from None
                break  # cut in the middle of writing: the line is answered again
            at = int(self._keys.searchsorted(np.uint64(key)))
            if at == len(self._keys) or self._keys[at] != key:
                what = f"custom_id {shown(done.custom_id)}" if done.custom_id is not None else f"line {done.error['line']}"
                raise ConfigError(f"--out must hold answers of this input, but got {what} in {out}", hint="name a new file")
            self.num_failed += done.has_failed and not is_done[at]
            is_done[at] = True
            whole_bytes += len(data)
            if not data.endswith(b"\n"):
                self.file.seek(0, os.SEEK_END)
                self.file.write(b"\n")
                whole_bytes += 1
        self.file.truncate(whole_bytes)
        self.file.seek(0, os.SEEK_END)
        return is_done


def _open(out: Path) -> BinaryIO:
    try:
        out.touch()
        return out.open("r+b")
    except OSError as error:
        raise ConfigError(f"--out must name a file that can be written, but got {str(out)!r}: {error.strerror}") from None


def _raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        if len(data) <= max_bytes or data.endswith(b"\n"):
            yield number, data
            continue
        while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
            pass
        yield number, None


def _parse(number: int, data: bytes) -> Line:
    try:
        fields = msgspec.json.decode(data, type=_Fields)
    except (msgspec.DecodeError, RecursionError) as error:
        return Line(number, None, problem=InvalidRequest(f"line {number} must be a JSON object, but got: {error}"))
    custom_id = fields.custom_id
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        must = f"custom_id must be text of 1 to {MAX_ID_CHARS} characters"
        return Line(number, None, problem=InvalidRequest(f"line {number}: {must}, but got {shown(custom_id)}"))
    problem = None
    if fields.method != "POST":
        problem = f"method must be POST, but got {shown(fields.method)}"
    elif fields.url not in URLS:
        problem = f"url must be one of {', '.join(URLS)}, but got {shown(fields.url)}"
    elif not bytes(fields.body).lstrip().startswith(b"{"):
        problem = "body must be a JSON object, but got something else or none"
    if problem is not None:
        return Line(number, custom_id, problem=InvalidRequest(f"line {number}: {problem}"))
    return Line(number, custom_id, fields.url, bytes(fields.body))


def _key(custom_id: str | None, number: int) -> int:
    text = f"line {number}" if custom_id is None else f"id {custom_id}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _refuse_twice(source: Path, max_bytes: int, keys: Any) -> None:
    """Say which. Two ids could also have the same key by chance: once in 10^5 inputs of ten million lines."""
    twice = {int(key) for key in keys[1:][keys[1:] == keys[:-1]]}
    seen: dict[int, int] = {}
    for line in read_lines(source, max_bytes):
        if line.key in twice and (first := seen.setdefault(line.key, line.number)) != line.number:
            raise ConfigError(
                f"custom_id must be unique, but lines {first} and {line.number} of {source} both have {shown(line.custom_id)}",
                hint="answers are told apart by it",
            )
