"""Prometheus metrics, under vLLM's nouns where it has one. One registry a server; the engine's counters are read at a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "slipstream:"
_SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_LONG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class EngineCounters(Protocol):
    """What of the engine's counters is shown; engine/stats.py has them."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafted: int
    num_accepted: int
    device_s: float
    host_s: float
    wait_s: float


class Metrics:
    """What a server counts and times. Times in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self._http_requests = self._counter("http_requests", "HTTP requests answered.", "path", "status")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were started.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = self._counter("request_success", "Answers that ended.", "finished_reason")
        self._failed = self._counter("request_failure", "Answers that failed or were aborted.", "reason")
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _LONG_S)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Time per token behind the first.", _SHORT_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the end of an answer.", _LONG_S)
        self._prompt_len = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_len = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        for reason in ("stop", "length"):
            self._finished.labels(reason)

    def http_request(self, path: str, status: int) -> None:
        """An HTTP request was answered. `path` is a route's, so that there are few of them."""
        self._http_requests.labels(path, str(status)).inc()

    def started(self, num_prompt_tokens: int) -> None:
        """A prompt went to the engine."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_len.observe(num_prompt_tokens)

    def first_token(self, seconds: float, num_tokens: int) -> None:
        """An answer's first tokens are here."""
        self._first_token.observe(seconds)
        self._generation_tokens.inc(num_tokens)

    def tokens(self, seconds: float, num_tokens: int) -> None:
        """Further tokens of an answer came `seconds` after those before."""
        self._generation_tokens.inc(num_tokens)
        for _ in range(num_tokens):
            self._inter_token.observe(seconds / num_tokens)

    def finished(self, reason: str, seconds: float, num_tokens: int) -> None:
        """An answer ended as it should."""
        self._finished.labels(reason).inc()
        self._e2e.observe(seconds)
        self._output_len.observe(num_tokens)

    def failed(self, reason: str) -> None:
        """An answer failed (an error's code) or was aborted (`abort`)."""
        self._failed.labels(reason).inc()

    def render(self, engine: EngineCounters | None) -> bytes:
        """All of it in Prometheus' text format. `engine`: its counters; None while there is none."""
        self._engine.counters = engine
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=buckets)


class _EngineCollector(Collector):
    counters: EngineCounters | None = None

    def collect(self) -> Iterator[Metric]:
        engine = self.counters
        if engine is None:
            return
        used = 1 - engine.num_free_pages / engine.num_pages if engine.num_pages else 0.0
        yield _gauge("num_requests_running", "Requests that hold a slot.", engine.num_running)
        yield _gauge("num_requests_waiting", "Requests in the queue.", engine.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", used)
        yield _total("engine_steps", "Steps of the engine.", engine.num_steps)
        yield _total("engine_prompt_tokens", "Prompt tokens computed.", engine.num_prompt_tokens)
        yield _total("engine_output_tokens", "Tokens committed.", engine.num_output_tokens)
        yield _total("spec_decode_num_draft_tokens", "Tokens drafted.", engine.num_drafted)
        yield _total("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", engine.num_accepted)
        yield _total("engine_device_seconds", "Time the device spent in steps.", engine.device_s)
        yield _total("engine_host_seconds", "Time the scheduler planned and settled.", engine.host_s)
        yield _total("engine_wait_seconds", "Time the scheduler waited for results.", engine.wait_s)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)
