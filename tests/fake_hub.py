"""A hub of our own on the loopback interface. The client reads its address once: each case is a process (`run_python`)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40
LARGE = ".safetensors"  # files whose checksum is sha256; others have git's


class Hub(ThreadingHTTPServer):
    """One repository, tiny/llama, out of a folder; gated/model asks for a login.

    Attributes:
        asked: paths, in order; ranges: the Range header of each request for a file's content.
        cut_at: the first time a large file is sent, the connection ends behind this many bytes.
        damaged: name of a file of which a wrong byte is sent.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        self.ranges: list[str | None] = []
        self.cut_at: int | None = None
        self.damaged = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        folder = self.server.folder
        if path.startswith("/api/models/gated/model"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/tiny/llama/tree/"):
            self.answer(200, json.dumps([self.entry(file) for file in sorted(folder.iterdir())]).encode())
        elif path.startswith("/api/models/tiny/llama"):
            files = [{**self.entry(file), "rfilename": file.name, "blobId": _git_sha1(file)} for file in sorted(folder.iterdir())]
            self.answer(200, json.dumps({"id": "tiny/llama", "sha": COMMIT, "siblings": files}).encode())
        elif path.startswith(f"/tiny/llama/resolve/{COMMIT}/") and (file := folder / path.rsplit("/", 1)[1]).is_file():
            self.send_file(file)
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send_file(self, file: Path) -> None:
        data = file.read_bytes()
        if file.name == self.server.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers: dict[str, Any] = {"ETag": f'"{_checksum(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        given = self.headers.get("Range")
        start = int(given.removeprefix("bytes=").split("-")[0]) if given else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.server.ranges.append(given)
            if file.suffix == LARGE and self.server.cut_at is not None:
                cut, self.server.cut_at = self.server.cut_at, None
                self.answer(200, data[:cut], {**headers, "Content-Length": len(data)})
                self.close_connection = True
                return
        self.answer(206 if start else 200, data[start:], headers)

    def entry(self, file: Path) -> dict[str, Any]:
        size = file.stat().st_size
        lfs = {"oid": _checksum(file), "sha256": _checksum(file), "size": size, "pointerSize": 130}
        return {
            "type": "file",
            "path": file.name,
            "size": size,
            "oid": _git_sha1(file),
            "lfs": lfs if file.suffix == LARGE else None,
        }

    def answer(self, status: int, body: bytes, headers: dict[str, Any] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A hub that serves the folder's files as tiny/llama."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def run_python(*arguments: str, endpoint: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with that hub and an own cache."""
    removed = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy")
    env = {key: value for key, value in os.environ.items() if key not in removed}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False)


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == LARGE else _git_sha1(file)


def _git_sha1(file: Path) -> str:
    data = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
