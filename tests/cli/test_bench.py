"""Benchmarks: the sums are right, every request is counted, and a failure is not hidden."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream.cli.measure import Timeline, percentile, read_prompts, summary, table
from slipstream.errors import ConfigError
from tests.cli.conftest import Install


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_a_summary_by_hand() -> None:
    first = Timeline(sent_s=10.0, num_prompt_tokens=5, num_tokens=3, arrivals_s=[11.0, 11.5, 12.5])
    second = Timeline(sent_s=10.0, num_prompt_tokens=7, num_tokens=1, arrivals_s=[13.0])
    result = summary([first, second, Timeline(sent_s=10.0)], wall_s=2.0)
    assert (result["num_requests"], result["num_prompt_tokens"], result["num_output_tokens"]) == (2, 12, 4)
    assert (result["requests_per_s"], result["output_tokens_per_s"], result["total_tokens_per_s"]) == (1.0, 2.0, 8.0)
    assert result["ttft_ms"]["mean"] == pytest.approx(2000)
    assert result["tpot_ms"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), 750.0))
    assert result["itl_ms"]["p50"] == pytest.approx(750)
    assert result["latency_ms"]["p50"] == pytest.approx(2750)
    assert "ttft_ms" in table(result)


@pytest.mark.parametrize(
    ("argv", "requests", "tokens"),
    [
        (["throughput", "--num-prompts", "6"], 6, 18),
        (["latency", "--batch-size", "2", "--num-iters", "3"], 6, 18),
    ],
)
def test_in_process_benchmarks_count_everything(
    argv: list[str], requests: int, tokens: int, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    file = tmp_path / "out.json"
    assert main(["bench", *argv, "--input-len", "5", "--output-len", "3", "--lag", "0", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert (written["result"]["num_requests"], written["result"]["num_output_tokens"]) == (requests, tokens)
    assert written["result"]["num_prompt_tokens"] == 5 * requests
    assert written["setup"]["config"]["lag"] == 0
    assert "api_key" not in written["setup"]["config"]
    assert written["machine"]["num_cores"] >= 1
    assert "output_tokens_per_s" in capsys.readouterr().out
    measured = engine.requests[-requests:]
    assert len({request.prompt_token_ids for request in measured}) == requests  # no shared prefix to profit from
    assert engine.is_closed


def test_json_may_go_to_stdout_alone(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    assert main(["bench", "throughput", "--num-prompts", "1", "--output-len", "1", "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["result"]["tpot_ms"]["mean"] is None  # one token has no time per further token; NaN is not JSON


class Server(ThreadingHTTPServer):
    """Answers each completion with three events and usage; every `fail_each`-th request with an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self.at_once = 0
        self.fail_each = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
            number = len(self.server.bodies)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        if self.server.fail_each and number % self.server.fail_each == 0:
            self.send_error(503, "busy")
        else:
            piece = {"delta": {"content": "x"}} if "chat" in self.path else {"text": "x"}
            events = [{"choices": [piece]}] * 3 + [{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 6}}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
            self._send("".join(lines).encode(), "text/event-stream")
        with self.server.lock:
            self.server.at_once -= 1

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def bench_serve(server: Server, file: Path, *argv: str) -> int:
    url = f"http://127.0.0.1:{server.server_port}"
    return main(["bench", "serve", "--base-url", url, "--num-prompts", "6", "--concurrency", "2", "--json", str(file), *argv])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_serve_streams_from_an_openai_server(endpoint: str, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert bench_serve(server, file, "--endpoint", endpoint, "--api-key", "key", "--ignore-eos") == 0
    written = json.loads(file.read_text())
    result = written["result"]
    assert (result["num_requests"], result["num_failed"]) == (6, 0)
    assert (result["num_prompt_tokens"], result["num_output_tokens"]) == (24, 36)  # usage, not events
    assert written["setup"]["model"] == "first"
    assert len(server.bodies) == 7  # one to warm up
    assert server.most_at_once <= 2
    for body in server.bodies:
        assert (body["model"], body["key"], body["stream"], body["ignore_eos"]) == ("first", "Bearer key", True, True)
        assert ("messages" in body) == (endpoint == "chat")
        assert body["path"] == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")


def test_failed_requests_are_told_and_fail_the_command(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail_each = 3
    assert bench_serve(server, tmp_path / "out.json", "--request-rate", "1000") == 1
    result = json.loads((tmp_path / "out.json").read_text())["result"]
    assert (result["num_requests"], result["num_failed"]) == (4, 2)
    assert "error: a request must be answered, but got HTTP 503" in capsys.readouterr().err


def test_no_server_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: a server must answer at http://127.0.0.1:9")


def test_data_sets(tmp_path: Path, server: Server) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"turns": ["b", "c"]}\n')
    assert read_prompts(str(file), 5) == ["a", "b", "a", "b", "a"]
    assert bench_serve(server, tmp_path / "out.json", "--dataset", str(file)) == 0
    assert {body["prompt"] for body in server.bodies} == {"a", "b"}
    for text in ("", "{}", "[1]", '{"turns": []}', "no json"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--dataset must hold"):
            read_prompts(str(file), 1)
    with pytest.raises(ConfigError, match="--dataset must name a readable file"):
        read_prompts(str(tmp_path / "none"), 1)
