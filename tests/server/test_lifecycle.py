"""From start to stop: loading, keys, draining, and what happens when a process dies."""

from __future__ import annotations

import glob
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.server.events import complete_events, cut_events, texts
from tests.server.live import DEADLINE_S, LiveServer

MODEL_CALL = {"model": "fake", "prompt": "say(ok)"}


def gone(pid: int) -> bool:
    """The process has ended, and is no zombie."""
    return not psutil.pid_exists(pid)


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def test_while_loading(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with LiveServer(wait=False, model=f"fake-gate:{gate}") as server:
        server.until(lambda: server.http.get("/ready").json().get("phase") == "weights", "loading weights")
        ready = server.http.get("/ready")
        assert ready.status_code == 503 and ready.json() == {"status": "loading", "phase": "weights", "percent": 25.0}
        assert server.http.get("/health").status_code == 200
        refused = server.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_busy" and "retry-after" in refused.headers
        assert server.http.get("/v1/models").status_code == 503
        assert server.http.get("/metrics").status_code == 200
        gate.touch()
        server.wait_for_line("listening on")
        assert server.http.get("/ready").status_code == 200 and server.is_alive()


def test_stopped_while_loading(tmp_path: Path) -> None:
    with LiveServer(wait=False, model=f"fake-gate:{tmp_path / 'never'}") as server:
        server.until(lambda: server.http.get("/ready").json().get("phase") == "weights", "loading weights")
        engine = server.engine_pid
        server.signal(signal.SIGTERM)
        assert server.wait() == 0 and gone(engine)


@pytest.mark.parametrize(
    "model, message",
    [
        ("fake-damaged", "error: ModelError: model.safetensors must be whole, but got 3 bytes\nhint: fetch it again"),
        ("fake-no-tokenizer", "error: ModelError: the folder must hold tokenizer.json, but it does not"),
        ("fake-crash", "error: EngineDead: the engine process must keep running, but it ended with exit code 7"),
    ],
)
def test_what_cannot_be_loaded_ends_the_server(model: str, message: str) -> None:
    with LiveServer(wait=False, model=model) as server:
        assert server.wait() == 1
        assert message in server.log and "Traceback" not in server.log
        assert server.lines[-1] == "no torch"


def test_a_taken_port_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"host and port must be free to listen on, but got 127.0.0.1:{port}"):
            LiveServer(port=port)


def test_key() -> None:
    with LiveServer(api_key="sésame", served_model_name="mine/own") as server:
        call = {"model": "mine/own", "prompt": "say(ok)"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame".encode()}, {"Authorization": "Basic sésame".encode()}):
            for path in ("/v1/completions", "/v1/nope", "/v1/models"):
                response = server.http.post(path, json=call, headers=headers)
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer sésame".encode()}
        assert server.http.post("/v1/completions", json=call, headers=right).json()["model"] == "mine/own"
        assert server.http.get("/v1/models/mine/own", headers=right).json()["id"] == "mine/own"
        assert server.http.post("/v1/completions", json=MODEL_CALL, headers=right).status_code == 404
        assert all(server.http.get(path).status_code == 200 for path in ("/health", "/ready", "/metrics", "/docs"))
        assert "sésame" not in server.log


def test_a_base_model_has_no_chat() -> None:
    """L08."""
    with LiveServer(model="fake-base") as server:
        response = server.chat()
        assert response.status_code == 400 and "chat template" in response.json()["error"]["message"]
        assert server.is_alive() and "/v1/completions" in server.log


def test_sampling_defaults_of_the_model() -> None:
    with LiveServer(model="fake-greedy") as server:
        assert "temperature=0.0" in server.log
        default, drawn, null = (server.complete("[random]", n=2, seed=3, **fields).json() for fields in ({}, {"temperature": 1}, {"temperature": None}))
        assert len({choice["text"] for choice in default["choices"]}) == 1
        assert len({choice["text"] for choice in drawn["choices"]}) == 2
        assert len({choice["text"] for choice in null["choices"]}) == 1


def test_sigterm_drains() -> None:
    with LiveServer() as server:
        engine = server.engine_pid
        with server.http.stream("POST", "/v1/completions", json={"model": "fake", "prompt": "say(to the end) [delay=0.1]", "stream": True}) as stream:
            server.signal(signal.SIGTERM)
            server.wait_for_line("draining: 1 calls")
            assert server.http.get("/ready").status_code == 503 and server.http.get("/health").status_code == 200
            refused = server.complete()
            assert refused.status_code == 503 and "draining" in refused.json()["error"]["message"]
            stream.read()
            assert texts(complete_events(stream)) == {0: "to the end"}
        assert server.wait() == 0 and gone(engine)


def test_a_drain_ends() -> None:
    with LiveServer(drain_timeout_s=0.5) as server:
        thread, whole = in_thread(lambda: server.complete("[hang]"))
        with server.http.stream("POST", "/v1/completions", json={"model": "fake", "prompt": "[random] [delay=0.05]", "max_tokens": 400, "stream": True}) as stream:
            server.until(lambda: server.gauge("num_requests_running") == 2, "running")
            server.signal(signal.SIGTERM)
            stream.read()
            _, error = cut_events(stream)
            assert error["code"] == "engine_busy"
        thread.join(DEADLINE_S)
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_busy"
        assert server.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(number: signal.Signals) -> None:
    with LiveServer(drain_timeout_s=3600) as server:
        engine = server.engine_pid
        thread, whole = in_thread(lambda: server.complete("[hang]"))
        server.until(lambda: server.gauge("num_requests_running") == 1, "running")
        server.signal(number)
        server.wait_for_line("draining")
        server.signal(number)
        assert server.wait() == 130 and gone(engine)
        thread.join(DEADLINE_S)
        assert whole[0].status_code == 503


@pytest.mark.parametrize("number, name", [(signal.SIGKILL, "signal SIGKILL"), (signal.SIGSEGV, "signal SIGSEGV")])
def test_the_engine_process_is_killed(number: signal.Signals, name: str) -> None:
    """D09, A12: while decoding, and while one waits."""
    with LiveServer(max_num_seqs=1) as server:
        with server.http.stream("POST", "/v1/completions", json={"model": "fake", "prompt": "[random] [delay=0.02]", "max_tokens": 400, "stream": True}) as stream:
            thread, whole = in_thread(lambda: server.complete("say(queued)"))
            server.until(lambda: server.gauge("num_requests_waiting") == 1, "waiting")
            os.kill(server.engine_pid, number)
            stream.read()
            _, error = cut_events(stream)
            assert error["code"] == "engine_dead"
        thread.join(DEADLINE_S)
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_dead"
        port = int(server.url.rpartition(":")[2])
        assert server.wait() == 1
        assert f"error: EngineDead: the engine process must keep running, but it ended with {name}" in server.log
        with socket.create_server(("127.0.0.1", port)):
            """The port is free again."""


def test_the_engine_process_is_killed_while_idle() -> None:
    """D09."""
    with LiveServer() as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait() == 1


def test_the_engine_fails() -> None:
    """A12."""
    with LiveServer() as server:
        events, error = cut_events(server.complete("say(hello) [boom=3]", stream=True))
        assert texts(events) == {0: "he"}
        assert error["code"] == "engine_dead" and "ValueError: boom" in error["message"]
        assert server.wait() == 1
        assert "error: EngineDead: the engine must not fail, but got ValueError: boom" in server.log
        assert server.log.count('raise ValueError("boom")') == 1  # where it happened, once


def test_a_paused_engine_process_is_noticed() -> None:
    """D09: not dead, but not alive either."""
    with LiveServer(stall_timeout_s=0.5) as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        server.until(lambda: server.http.get("/health").status_code == 503, "noticing")
        assert server.http.get("/health").json()["status"] == "failed" and server.http.get("/ready").status_code == 503
        refused = server.complete()
        assert refused.status_code == 503 and "make progress" in refused.json()["error"]["message"]
        assert server.http.get("/metrics").status_code == 200
        os.kill(engine, signal.SIGCONT)
        server.until(lambda: server.http.get("/health").status_code == 200, "recovering")
        assert server.is_alive()
        os.kill(engine, signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0 and gone(engine)


def test_work_without_progress_is_noticed_but_idleness_is_none() -> None:
    with LiveServer(stall_timeout_s=1.5) as server:
        server.until(lambda: server.gauge("e2e_request_latency_seconds_count") == 0, "starting")
        with pytest.raises(AssertionError):
            _during(2.5, lambda: server.http.get("/health").status_code == 503)
        thread, whole = in_thread(lambda: server.complete("[hang]"))
        server.until(lambda: server.http.get("/health").status_code == 503, "noticing")
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        server.wait()
        thread.join(DEADLINE_S)
        assert whole[0].status_code == 503


def test_a_killed_server_leaves_nothing_behind() -> None:
    pattern = os.path.join(tempfile.gettempdir(), "slipstream-*")
    before = set(glob.glob(pattern))
    with LiveServer() as server:
        assert set(glob.glob(pattern)) == before, "the socket's folder must be gone once both ends are connected"
        engine = server.engine_pid
        thread, _ = in_thread(lambda: server.complete("[freeze=3600]"))
        server.until(lambda: "answers" not in server.log and server.http.get("/health").status_code == 200, "answering")
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.until(lambda: gone(engine), "the engine process ending with its parent")
        thread.join(DEADLINE_S)


def test_a_full_queue() -> None:
    with LiveServer(max_num_seqs=1, max_queue=2) as server:
        calls = [in_thread(lambda: server.complete("[hang]")) for _ in range(3)]
        server.until(lambda: server.gauge("num_requests_waiting") == 2, "queueing")
        refused = server.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_busy"
        assert server.complete(n=4).status_code == 400  # would never fit
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        server.wait()
        for thread, _ in calls:
            thread.join(DEADLINE_S)


def test_json_logs() -> None:
    import json

    with LiveServer(wait=False, log_json=True) as server:
        server.wait_for_line("listening on")
        assert server.complete().status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.lines[:-1]]
        (line,) = [line for line in lines if line["logger"] == "slipstream.access"]
        assert line["status"] == 200 and line["output_tokens"] == 3 and line["finish"] == "stop" and line["id"].startswith("req-")


def _during(seconds: float, condition: Any) -> None:
    import time

    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError
