"""What happens when a process dies, is paused or gets stuck (D09, A12)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import httpx

from tests.server.events import cut_events, texts
from tests.server.live import DEADLINE_S, LiveServer, gone, in_thread


def test_the_engine_process_is_killed() -> None:
    """While one request decodes and one waits."""
    with LiveServer(max_num_seqs=1) as server:
        call = {"model": "fake", "prompt": "[random] [delay=0.02]", "max_tokens": 400, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=call) as stream:
            thread, whole = in_thread(lambda: server.complete("say(queued)"))
            server.until(lambda: server.gauge("num_requests_waiting") == 1, "waiting")
            os.kill(server.engine_pid, signal.SIGKILL)
            stream.read()
            _, error = cut_events(stream)
            assert error["code"] == "engine_dead"
        thread.join(DEADLINE_S)
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_dead"
        port = int(server.url.rpartition(":")[2])
        assert server.wait() == 1
        assert "error: EngineDead: the engine process must keep running, but it ended with signal SIGKILL" in server.log
        with socket.create_server(("127.0.0.1", port)):
            """The port is free again."""


def test_the_engine_process_is_killed_while_idle() -> None:
    with LiveServer() as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait() == 1


def test_the_engine_fails() -> None:
    with LiveServer() as server:
        events, error = cut_events(server.complete("say(hello) [boom=3]", stream=True))
        assert texts(events) == {0: "he"}
        assert error["code"] == "engine_dead" and "ValueError: boom" in error["message"]
        assert server.wait() == 1
        assert "error: EngineDead: the engine must not fail, but got ValueError: boom" in server.log
        assert server.log.count('raise ValueError("boom")') == 1  # where it happened, once


def test_a_paused_engine_process_is_noticed() -> None:
    """Not dead, but not alive either; it may come back."""
    with LiveServer(stall_timeout_s=1.5) as server:
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


def test_work_without_progress_is_noticed() -> None:
    with LiveServer(stall_timeout_s=0.5, drain_timeout_s=0) as server:
        thread, whole = in_thread(lambda: server.complete("[hang]"))
        server.until(lambda: server.http.get("/health").status_code == 503, "noticing")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        thread.join(DEADLINE_S)
        assert whole[0].status_code == 503


def test_a_killed_server_leaves_nothing_behind() -> None:
    folder = tempfile.mkdtemp(prefix="t")  # short: the name of a socket may not be long
    try:
        with LiveServer(temporary=folder) as server:
            assert list(Path(folder).iterdir()) == [], "the socket's folder must be gone once both ends are connected"
            engine = server.engine_pid
            thread, answer = in_thread(lambda: server.complete("[freeze=3600]"))
            server.until(lambda: server.gauge("prompt_tokens_total") > 0, "starting")
            server.signal(signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL
            server.until(lambda: gone(engine), "the engine process ending with its parent")
            thread.join(DEADLINE_S)
            assert isinstance(answer[0], httpx.HTTPError)
    finally:
        shutil.rmtree(folder)
