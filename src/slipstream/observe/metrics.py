"""Prometheus metrics, under vLLM's nouns where it has one; docs/observability.md lists them all. One `Metrics` a server.

    per output    Metrics.output    a few additions to plain numbers
    per answer    finished, failed
    per scrape    collect           the numbers, and the engine's counters of now, as Prometheus' families

prometheus_client writes the text. Its own histograms take a lock and walk through their buckets for every value; here a value is
one bisection, because there is one for every output of every answer. Everything belongs to the server's event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.observe.timing import AnswerTimes
from slipstream.types import EngineOutput

PREFIX = "slipstream:"
MODEL = "model_name"  # on every sample
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_WAIT_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class DraftCounters(Protocol):
    """What of a drafter's counters is shown; engine/stats.py has them."""

    num_drafts: int
    num_drafted: int
    num_accepted: int
    accepted_at: list[int]
    propose_s: float
    observe_s: float


class EngineCounters(Protocol):
    """What of the engine's counters is shown; engine/stats.py has them."""

    num_running: int
    num_waiting: int
    num_paused: int
    num_pages: int
    num_free_pages: int
    num_evictable_pages: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_retractions: int
    num_output_tokens: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    device_s: float

    @property
    def drafting(self) -> Mapping[str, DraftCounters]:
        """By drafter."""
        ...

    host_s: float
    wait_s: float


def num_used_pages(engine: EngineCounters) -> int:
    """Pages that requests hold now; what is only cached is free for whoever needs it."""
    return engine.num_pages - engine.num_free_pages - engine.num_evictable_pages


class Histogram:
    """Values in buckets: `counts[i]` of them were at most `bounds[i]` and above the bound before; the last bucket is open."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, model: str) -> Metric:
        """As Prometheus has it: buckets that include those below them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        out = HistogramMetricFamily(PREFIX + self.name, self.help, labels=[MODEL])
        out.add_metric([model], list(zip(names, accumulate(self.counts), strict=True)), self.total)
        return out


@dataclass(frozen=True, slots=True)
class _FromEngine:
    """A metric that is one of the engine's counters. `family`: its kind."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    help: str
    value: Callable[[EngineCounters], float]


_GAUGE, _TOTAL = GaugeMetricFamily, CounterMetricFamily
_ENGINE = (
    _FromEngine(_GAUGE, "num_requests_running", "Requests that hold a slot.", lambda e: e.num_running),
    _FromEngine(_GAUGE, "num_requests_waiting", "Requests in the queue.", lambda e: e.num_waiting),
    _FromEngine(
        _GAUGE, "num_requests_paused", "Running requests left out of the last step for want of a page.", lambda e: e.num_paused
    ),
    _FromEngine(
        _GAUGE,
        "kv_cache_usage_perc",
        "Share of the KV pages that requests hold, 0 to 1.",
        lambda e: num_used_pages(e) / e.num_pages if e.num_pages else 0.0,
    ),
    _FromEngine(_TOTAL, "prefix_cache_queries", "Prompt tokens looked up: computed or found.", lambda e: _looked_up(e)),
    _FromEngine(_TOTAL, "prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda e: e.num_cached_tokens),
    _FromEngine(_TOTAL, "num_retractions", "Requests that lost their slot under memory pressure.", lambda e: e.num_retractions),
    _FromEngine(_TOTAL, "engine_steps", "Steps of the engine.", lambda e: e.num_steps),
    _FromEngine(_TOTAL, "engine_prompt_tokens", "Prompt tokens computed.", lambda e: e.num_prompt_tokens),
    _FromEngine(_TOTAL, "engine_output_tokens", "Tokens committed.", lambda e: e.num_output_tokens),
    _FromEngine(_TOTAL, "spec_decode_num_drafts", "Drafts verified: one a request and step.", lambda e: e.num_drafts),
    _FromEngine(_TOTAL, "spec_decode_num_draft_tokens", "Tokens drafted.", lambda e: e.num_drafted),
    _FromEngine(_TOTAL, "spec_decode_num_accepted_tokens", "Drafted tokens accepted.", lambda e: e.num_accepted),
    _FromEngine(_TOTAL, "engine_device_seconds", "Time the device spent in steps.", lambda e: e.device_s),
    _FromEngine(_TOTAL, "engine_host_seconds", "Time the scheduler planned and settled.", lambda e: e.host_s),
    _FromEngine(_TOTAL, "engine_wait_seconds", "Time the scheduler waited for results.", lambda e: e.wait_s),
)


class Metrics:
    """What a server counts and times. Times in seconds.

    Args:
        model_name: what clients call the model; a label of every sample.
    """

    def __init__(self, model_name: str) -> None:
        self._num_prompt_tokens = 0
        self._num_generated = 0
        self._http: Counter[tuple[str, ...]] = Counter()
        self._finished: Counter[tuple[str, ...]] = Counter({("stop",): 0, ("length",): 0})
        self._failed: Counter[tuple[str, ...]] = Counter()
        self._first_token = Histogram("time_to_first_token_seconds", "Arrival to first token.", _WAIT_S)
        self._inter_token = Histogram("inter_token_latency_seconds", "Time between two outputs of an answer.", _STEP_S)
        self._per_token = Histogram(
            "request_time_per_output_token_seconds", "First to last token of an answer, by its tokens behind the first.", _STEP_S
        )
        self._e2e = Histogram("e2e_request_latency_seconds", "Arrival to the end of an answer.", _WAIT_S)
        self._queue = Histogram("request_queue_time_seconds", "Arrival at the engine to a slot.", _WAIT_S)
        self._prompt_len = Histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_len = Histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._collector = _Collector(self, model_name)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)

    def http_request(self, path: str, status: int) -> None:
        """An HTTP request was answered. `path` is a route's, so that there are few of them."""
        self._http[path, str(status)] += 1

    def started(self, num_prompt_tokens: int) -> None:
        """A prompt went to the engine."""
        self._num_prompt_tokens += num_prompt_tokens
        self._prompt_len.observe(num_prompt_tokens)

    def output(self, times: AnswerTimes, output: EngineOutput, now_s: float) -> None:
        """News of an answer came: bring that answer's times up to date, and count its tokens, if it has any."""
        gap_s = times.note(output, now_s)
        num_tokens = len(output.token_ids)
        if not num_tokens:
            return
        self._num_generated += num_tokens
        if gap_s is None:
            self._first_token.observe(now_s - times.arrived_s)
        else:
            self._inter_token.observe(gap_s)

    def finished(self, times: AnswerTimes, reason: str, now_s: float) -> None:
        """An answer ended as it should."""
        self._finished[reason,] += 1
        self._e2e.observe(now_s - times.arrived_s)
        self._queue.observe(times.queue_s)
        self._output_len.observe(times.num_tokens)
        if (tpot_s := times.tpot_s) is not None:
            self._per_token.observe(tpot_s)

    def failed(self, reason: str) -> None:
        """An answer failed (an error's code) or was aborted (`abort`)."""
        self._failed[reason,] += 1

    def render(self, engine: EngineCounters | None) -> bytes:
        """All of it in Prometheus' text format. `engine`: its counters; None while there is none."""
        self._collector.engine = engine
        return generate_latest(self._registry)

    def families(self, model: str) -> Iterator[Metric]:
        """What the server itself counts and times."""
        yield _counters("http_requests", "HTTP requests answered.", ("path", "status"), self._http, model)
        yield _one(_TOTAL, "prompt_tokens", "Prompt tokens of requests that were started.", self._num_prompt_tokens, model)
        yield _one(_TOTAL, "generation_tokens", "Tokens generated.", self._num_generated, model)
        yield _counters("request_success", "Answers that ended.", ("finished_reason",), self._finished, model)
        yield _counters("request_failure", "Answers that failed or were aborted.", ("reason",), self._failed, model)
        for histogram in (
            self._first_token, self._inter_token, self._per_token, self._e2e, self._queue, self._prompt_len, self._output_len,
        ):  # fmt: skip
            yield histogram.family(model)


class _Collector(Collector):
    """What prometheus_client asks at a scrape."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.engine: EngineCounters | None = None
        self._metrics = metrics
        self._model = model

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.families(self._model)
        engine = self.engine
        if engine is None:
            return
        for one in _ENGINE:
            yield _one(one.family, one.name, one.help, one.value(engine), self._model)
        text = "KV pages: held by requests, only cached, free."
        pages = GaugeMetricFamily(PREFIX + "kv_cache_pages", text, labels=[MODEL, "state"])
        pages.add_metric([self._model, "used"], num_used_pages(engine))
        pages.add_metric([self._model, "evictable"], engine.num_evictable_pages)
        pages.add_metric([self._model, "free"], engine.num_free_pages)
        yield pages
        # Plain decoding is no drafter, though the time its empty drafts take is counted under its name.
        yield from _drafting({name: one for name, one in engine.drafting.items() if name != "off"}, self._model)


def _drafting(drafters: Mapping[str, DraftCounters], model: str) -> Iterator[Metric]:
    kinds = ("drafts", "draft_tokens", "accepted_tokens", "accepted_at")
    counts: dict[str, Counter[tuple[str, ...]]] = {kind: Counter() for kind in kinds}
    for name, one in drafters.items():
        counts["drafts"][name,] = one.num_drafts
        counts["draft_tokens"][name,] = one.num_drafted
        counts["accepted_tokens"][name,] = one.num_accepted
        for position, count in enumerate(one.accepted_at, 1):
            counts["accepted_at"][name, str(position)] = count
    by_name, at = ("drafter",), ("drafter", "position")
    yield _counters("drafter_drafts", "Drafts verified, by drafter.", by_name, counts["drafts"], model)
    yield _counters("drafter_draft_tokens", "Tokens drafted, by drafter.", by_name, counts["draft_tokens"], model)
    yield _counters("drafter_accepted_tokens", "Drafted tokens accepted.", by_name, counts["accepted_tokens"], model)
    text = "Drafts whose token at this place behind the root was accepted."
    yield _counters("drafter_accepted_tokens_per_pos", text, at, counts["accepted_at"], model)
    seconds = CounterMetricFamily(
        PREFIX + "drafter_seconds", "Time in drafters, proposing and observing.", labels=[MODEL, "drafter", "phase"]
    )
    for name, one in drafters.items():
        seconds.add_metric([model, name, "propose"], one.propose_s)
        seconds.add_metric([model, name, "observe"], one.observe_s)
    yield seconds


def _looked_up(engine: EngineCounters) -> int:
    return engine.num_prompt_tokens + engine.num_cached_tokens


def _one(family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float, model: str) -> Metric:
    out = family(PREFIX + name, text, labels=[MODEL])
    out.add_metric([model], value)
    return out


def _counters(name: str, text: str, labels: tuple[str, ...], values: Counter[tuple[str, ...]], model: str) -> Metric:
    out = CounterMetricFamily(PREFIX + name, text, labels=[MODEL, *labels])
    for key, value in values.items():
        out.add_metric([model, *key], value)
    return out
