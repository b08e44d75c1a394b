"""A whole server in processes of its own, on a free port of the loopback interface."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import httpx
import psutil

DEADLINE_S = 60.0  # for anything that is waited for: a slow machine is no failure


def gone(pid: int) -> bool:
    """The process has ended, and is no zombie."""
    return not psutil.pid_exists(pid)


def in_thread(call: Callable[[], httpx.Response]) -> tuple[threading.Thread, list[Any]]:
    """Make a call beside the test; the list gets its response, or the error of the connection."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except httpx.HTTPError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


class LiveServer:
    """Starts `tests.server.fake_engine` with these settings. Ends what it started, whatever the test did.

    `temporary` is its folder of temporary files; without `wait` it may still be loading. `command`, Python's arguments, starts
    another server.
    """

    def __init__(
        self, wait: bool = True, temporary: str | None = None, command: Sequence[str] | None = None, **settings: Any
    ) -> None:
        settings = {"model": "fake", "port": 0, "drain_timeout_s": 10, **settings}
        self.process = subprocess.Popen(
            [sys.executable, *(command or ("-m", "tests.server.fake_engine", json.dumps(settings)))],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                **({"TMPDIR": temporary} if temporary else {}),
            },
        )
        self.lines: list[str] = []
        self._new_lines: queue.Queue[str | None] = queue.Queue()
        self._reader_done = threading.Event()
        self.http = httpx.Client()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.url = self.wait_for_line(r"loading .*; (http://\S+)/ready").group(1)
            self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)
            if wait:
                self.wait_for_line(r"listening on")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Wait until the server logs a line that holds `pattern`, from where the last such wait ended."""
        ends = time.monotonic() + DEADLINE_S
        while (line := self._new_lines.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"the server must log {pattern!r}, but ended with:\n{self.log}")

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def engine_pid(self) -> int:
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1, children
        return children[0].pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait until the server has ended; returns its exit code."""
        code = self.process.wait(DEADLINE_S)
        self._reader_done.wait(DEADLINE_S)
        return code

    def gauge(self, name: str) -> float:
        """The value of one metric; labels, but for the model's name, written out."""
        text = re.sub(r',?model_name="[^"]*"', "", self.http.get("/metrics").text).replace("{}", "").replace("{,", "{")
        found = re.search(rf"^slipstream:{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in\n{text}"
        return float(found.group(1))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition."""
        ends = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < ends, f"{what} must happen, but did not; log:\n{self.log}"
            time.sleep(0.02)

    def until_idle(self) -> None:
        """Wait until the engine runs nothing and nothing waits."""
        self.until(lambda: self.gauge("num_requests_running") == 0 == self.gauge("num_requests_waiting"), "idling")

    def complete(self, prompt: Any = "say(ok)", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields})

    def chat(self, content: Any = "say(ok)", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.http.post("/v1/chat/completions", json={"model": "fake", "messages": messages, **fields})

    def is_alive(self) -> bool:
        """Answers a request as it should."""
        response = self.complete("say(alive)")
        return response.status_code == 200 and response.json()["choices"][0]["text"] == "alive"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its engine process ends with it
            self.process.wait()
        self._reader_done.wait(DEADLINE_S)
        self.http.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))
                self._new_lines.put(line)
        self._new_lines.put(None)
        self._reader_done.set()
