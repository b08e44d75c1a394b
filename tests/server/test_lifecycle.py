"""From start to stop: loading, what keeps a server from starting, draining, a full queue."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.server.events import complete_events, cut_events, texts
from tests.server.live import DEADLINE_S, LiveServer, gone, in_thread


def test_while_loading(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with LiveServer(wait=False, model=f"fake-gate:{gate}") as server:
        server.until(lambda: server.http.get("/ready").json().get("phase") == "weights", "loading weights")
        ready = server.http.get("/ready")
        assert ready.status_code == 503
        body = ready.json()
        assert 0 < body.pop("elapsed_s") < DEADLINE_S
        assert body == {"status": "loading", "phase": "weights", "percent": 25.0}
        assert server.http.get("/health").status_code == 200
        refused = server.complete()
        assert (
            refused.status_code == 503 and refused.json()["error"]["code"] == "engine_busy" and "retry-after" in refused.headers
        )
        assert server.http.get("/v1/models").status_code == 503
        assert server.http.get("/metrics").status_code == 200
        assert "server is at weights, 25%" in refused.json()["error"]["message"]
        time.sleep(0.1)
        gate.touch()
        said = server.wait_for_line(r"start-up phase=weights seconds=(\d+\.\d+)")
        ready_in = server.wait_for_line(r"ready in (\d+\.\d) s \(.*starting engine \d+\.\d s, weights (\d+\.\d) s\)")
        assert float(said.group(1)) > 0.1 and abs(float(said.group(1)) - float(ready_in.group(2))) <= 0.06
        assert float(ready_in.group(1)) >= float(ready_in.group(2))
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


def test_sigterm_drains() -> None:
    with LiveServer() as server:
        engine = server.engine_pid
        call = {"model": "fake", "prompt": "say(to the end) [delay=0.1]", "stream": True}
        with server.http.stream("POST", "/v1/completions", json=call) as stream:
            server.signal(signal.SIGTERM)
            server.wait_for_line("draining: 1 call to finish")
            assert server.http.get("/ready").status_code == 503 and server.http.get("/health").status_code == 200
            refused = server.complete()
            assert refused.status_code == 503 and "draining" in refused.json()["error"]["message"]
            stream.read()
            assert texts(complete_events(stream)) == {0: "to the end"}
        server.wait_for_line("stopped")
        assert server.wait() == 0 and gone(engine)


def test_a_drain_ends() -> None:
    with LiveServer(drain_timeout_s=0.5) as server:
        thread, whole = in_thread(lambda: server.complete("[hang]"))
        call = {"model": "fake", "prompt": "[random] [delay=0.05]", "max_tokens": 400, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=call) as stream:
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


def test_a_full_queue() -> None:
    with LiveServer(max_num_seqs=1, max_queue=2, drain_timeout_s=0) as server:
        calls = [in_thread(lambda: server.complete("[hang]")) for _ in range(3)]
        server.until(lambda: server.gauge("num_requests_waiting") == 2, "queueing")
        refused = server.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_busy"
        assert server.complete(n=4).status_code == 400  # would never fit
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        for thread, _ in calls:
            thread.join(DEADLINE_S)
