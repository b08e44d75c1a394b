"""Hub ids, against a hub of our own on the loopback interface. The client reads the address once: each case is a process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoints import save, tiny

COMMIT = "a" * 40
LOAD_TEXT = """
import sys
from slipstream.errors import ModelError
from slipstream.weights import load_text
try:
    loaded = load_text(sys.argv[1])
    print(loaded.name, loaded.architecture)
except ModelError as error:
    print("refused:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """One repository, tiny/llama, out of a folder; gated/model asks for a login."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        if path.startswith("/api/models/gated/model"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/tiny/llama/tree/"):
            files = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": self.tag(f)}
                for f in sorted(self.folder.iterdir())
            ]
            self.answer(200, json.dumps(files).encode())
        elif path.startswith("/api/models/tiny/llama"):
            files = [{"rfilename": f.name} for f in sorted(self.folder.iterdir())]
            self.answer(200, json.dumps({"id": "tiny/llama", "sha": COMMIT, "siblings": files}).encode())
        elif path.startswith(f"/tiny/llama/resolve/{COMMIT}/") and (file := self.folder / path.rsplit("/", 1)[1]).is_file():
            self.answer(200, file.read_bytes(), {"ETag": f'"{self.tag(file)}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def tag(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def answer(self, status: int, body: bytes, headers: dict[str, Any] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    folder = save(tiny("llama"), tmp_path_factory.mktemp("repo"))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    handler = type("OneHub", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked
    server.shutdown()
    server.server_close()


def load_in_process(repo: str, endpoint: str, home: Path, **environment: str) -> str:
    removed = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy")
    env = {key: value for key, value in os.environ.items() if key not in removed}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_TEXT, repo], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout.strip() or done.stderr


def test_a_hub_id_is_fetched_and_then_works_offline(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    assert load_in_process("tiny/llama", endpoint, tmp_path) == "tiny/llama llama"
    assert any(path.endswith("model.safetensors") for path in asked)
    assert not any(path.endswith(".bin") for path in asked), "pickles must not be fetched"
    count = len(asked)
    assert load_in_process("tiny/llama", endpoint, tmp_path, HF_HUB_OFFLINE="1") == "tiny/llama llama"
    assert len(asked) == count


def test_offline_and_not_in_the_cache(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    said = load_in_process("tiny/llama", hub[0], tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("refused: tiny/llama must be fetched from the hub or be in its cache, but the hub cannot be reached")
    assert "hint:" in said


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    assert "the hub cannot be reached" in load_in_process("tiny/llama", "http://127.0.0.1:9", tmp_path)


def test_a_repository_that_is_not_there(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    said = load_in_process("no/such-model", hub[0], tmp_path)
    assert said.startswith("refused: no/such-model must exist on the hub")


def test_a_gated_repository(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    said = load_in_process("gated/model", hub[0], tmp_path)
    assert said.startswith("refused: gated/model must be open to you")
