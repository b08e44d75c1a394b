"""Log lines and metrics."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.stats import EngineStats
from slipstream.observe import log
from slipstream.observe.metrics import Histogram, Metrics
from slipstream.observe.throughput import throughput
from slipstream.observe.timing import AnswerTimes
from slipstream.types import EngineOutput
from tests.server.live import LiveServer


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("slipstream")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_text_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", as_json=False)
    logger = logging.getLogger("slipstream.test")
    log.event(logger, logging.INFO, "request", status=200, seconds=0.12345, missing=None, what="a b", id='x"\ny')
    log.event(logger, logging.DEBUG, "not shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.endswith('INFO  request status=200 seconds=0.123 what="a b" id="x\\"\\ny"')


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", as_json=True)
    logger = logging.getLogger("slipstream.test")
    log.event(logger, logging.DEBUG, "request", status=200, what="ü\n")
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == "request" and first["status"] == 200 and first["what"] == "ü\n" and first["level"] == "debug"
    assert "ValueError: no" in second["exception"]


def samples(metrics: Metrics, engine: EngineStats | None = None) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render(engine).decode())
    got: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        assert labels.pop("model_name") == "m"
        got[sample.name.removeprefix("slipstream:") + "".join(f"/{value}" for value in labels.values())] = sample.value
    return got


def tokens(*ids: int, **more: Any) -> EngineOutput:
    return EngineOutput("a", token_ids=ids, **more)


def test_metrics_of_an_answer() -> None:
    """Six tokens in three outputs, 0.5, 0.8 and 1.0 s behind the call."""
    metrics, times = Metrics("m"), AnswerTimes(arrived_s=10.0)
    metrics.started(5)
    metrics.output(times, tokens(queue_s=0.25), 10.3)
    metrics.output(times, tokens(1, 2, queue_s=0.25), 10.5)
    metrics.output(times, tokens(3, 4, 5, queue_s=0.25, num_retractions=1), 10.8)
    metrics.output(times, tokens(6, queue_s=0.25, num_retractions=1), 11.0)
    metrics.finished(times, "stop", 11.0)
    metrics.failed("abort")
    metrics.http_request("/v1/completions", 200)
    got = samples(metrics)
    assert got["prompt_tokens_total"] == 5 and got["generation_tokens_total"] == 6
    assert got["time_to_first_token_seconds_count"] == 1 and got["time_to_first_token_seconds_sum"] == 0.5
    assert got["inter_token_latency_seconds_count"] == 2 and got["inter_token_latency_seconds_sum"] == pytest.approx(0.5)
    assert got["request_time_per_output_token_seconds_count"] == 1
    assert got["request_time_per_output_token_seconds_sum"] == pytest.approx(0.5 / 4)
    assert got["request_queue_time_seconds_sum"] == 0.25 and times.num_retractions == 1
    assert got["request_success_total/stop"] == 1 and got["request_success_total/length"] == 0
    assert got["request_failure_total/abort"] == 1
    assert got["e2e_request_latency_seconds_sum"] == 1 and got["request_generation_tokens_sum"] == 6
    assert got["http_requests_total//v1/completions/200"] == 1
    assert "num_requests_running" not in got


def test_an_answer_that_comes_at_once_has_no_time_per_token() -> None:
    metrics, times = Metrics("m"), AnswerTimes(arrived_s=0.0)
    assert times.ttft_s is None and times.tpot_s is None
    metrics.output(times, tokens(1, 2, 3), 0.5)
    metrics.finished(times, "length", 0.5)
    got = samples(metrics)
    assert got["request_time_per_output_token_seconds_count"] == got["inter_token_latency_seconds_count"] == 0
    assert times.ttft_s == 0.5 and got["request_generation_tokens_count"] == 1


def test_buckets_count_what_is_at_most_their_bound() -> None:
    mine, theirs = Histogram("h", "help", (1.0, 2.5, 10.0)), CollectorRegistry()
    other = prometheus_client.Histogram("slipstream:h", "help", ["model_name"], buckets=(1.0, 2.5, 10.0), registry=theirs)
    for value in (0.5, 1.0, 1.1, 2.5, 11.0, 10.0):
        mine.observe(value)
        other.labels("m").observe(value)
    wanted = {(s.name, s.labels["le"]): s.value for f in theirs.collect() for s in f.samples if "le" in s.labels}
    family = mine.family("m")
    assert {(s.name, s.labels["le"]): s.value for s in family.samples if "le" in s.labels} == wanted
    assert {s.value for s in family.samples if s.name.endswith("_sum")} == {26.1}


def test_metrics_of_the_engine() -> None:
    engine = EngineStats(
        num_running=2, num_waiting=3, num_paused=1, num_pages=8, num_free_pages=1, num_evictable_pages=5, num_steps=9,
        num_prompt_tokens=30, num_cached_tokens=10, num_retractions=4, num_drafts=2, num_drafted=4, num_accepted=3,
    )  # fmt: skip
    got = samples(Metrics("m"), engine)
    assert got["num_requests_running"] == 2 and got["num_requests_waiting"] == 3 and got["num_requests_paused"] == 1
    assert got["kv_cache_usage_perc"] == 0.25
    assert (got["kv_cache_pages/used"], got["kv_cache_pages/evictable"], got["kv_cache_pages/free"]) == (2, 5, 1)
    assert got["prefix_cache_queries_total"] == 40 and got["prefix_cache_hits_total"] == 10 and got["num_retractions_total"] == 4
    assert got["spec_decode_num_drafts_total"] == 2
    assert got["spec_decode_num_draft_tokens_total"] == 4 and got["spec_decode_num_accepted_tokens_total"] == 3
    assert samples(Metrics("m"), EngineStats())["kv_cache_usage_perc"] == 0


def test_metrics_of_drafters() -> None:
    engine = EngineStats()
    for drafted, accepted in ((4, 3), (4, 0), (2, 1)):
        engine.drafter("ngram").add(drafted, accepted)
    engine.drafter("head").observe_s = 0.5
    text = Metrics("m").render(engine).decode()

    def value(name: str, labels: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"slipstream:{name}{{")]
        (line,) = [line for line in lines if all(label in line for label in labels.split(","))]
        return float(line.rsplit(" ", 1)[1])

    assert value("drafter_drafts_total", 'drafter="ngram"') == 3
    assert value("drafter_draft_tokens_total", 'drafter="ngram"') == 10
    assert value("drafter_accepted_tokens_total", 'drafter="ngram"') == 4
    at = [value("drafter_accepted_tokens_per_pos_total", f'drafter="ngram",position="{place}"') for place in (1, 2, 3)]
    assert at == [2, 1, 1]
    assert value("drafter_seconds_total", 'drafter="head",phase="observe"') == 0.5


def test_throughput() -> None:
    before = EngineStats(num_steps=5, num_prompt_tokens=100, num_output_tokens=50, num_pages=10, num_free_pages=10)
    now = EngineStats(
        num_running=3, num_waiting=2, num_paused=1, num_steps=9, num_prompt_tokens=400, num_cached_tokens=100,
        num_output_tokens=70, num_pages=10, num_free_pages=4, num_evictable_pages=1, num_retractions=2,
        num_drafts=10, num_drafted=30, num_accepted=15,
    )  # fmt: skip
    assert throughput(before, now, 2.0) == {
        "prompt_tokens_per_s": 150.0,
        "output_tokens_per_s": 10.0,
        "running": 3,
        "waiting": 2,
        "paused": 1,
        "pages_used_percent": 50.0,
        "cache_hit_rate": 0.25,
        "accept_length": 2.5,
        "retractions": 2,
    }


def test_throughput_is_silent_when_idle_and_only_then() -> None:
    idle = EngineStats(num_steps=9, num_pages=10, num_free_pages=10)
    assert throughput(idle, idle, 1.0) is None
    stuck = throughput(idle, replace(idle, num_waiting=1), 1.0)
    assert stuck is not None and stuck["output_tokens_per_s"] == 0 and stuck["cache_hit_rate"] is None
    assert throughput(replace(idle, num_steps=8), idle, 1.0) is not None


SECRET = "a-key-nobody-may-read"
ASKED = "a prompt that nobody may read"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_log_of_a_server(as_json: bool) -> None:
    """One line a request, with its times; throughput while there is work; neither key nor prompt."""
    with LiveServer(log_json=as_json, log_interval_s=0.2, api_key=SECRET, log_level="debug") as server:
        server.http.headers["Authorization"] = f"Bearer {SECRET}"
        prompt = f"{ASKED} say(one two three) [delay=0.05]"
        response = server.complete(prompt, n=2, max_tokens=50)
        assert response.status_code == 200
        server.http.get("/v1/models", headers={"Authorization": f"Bearer {SECRET}-not", "X-Request-Id": "mine"})
        refused = server.http.post(
            "/v1/completions", json={"model": ASKED, "prompt": [ASKED, 1]}, headers={"X-Request-Id": "bad"}
        )
        assert refused.status_code == 400
        server.wait_for_line("bad")
        server.until_idle()
        count = sum("throughput" in line for line in server.lines)
        assert count >= 2
        time.sleep(0.7)
        assert sum("throughput" in line for line in server.lines) <= count + 1, "an idle server is silent"
        assert SECRET not in server.log and "nobody may read" not in server.log and "one two" not in server.log
        (line,) = [line for line in server.lines if "POST /v1/completions" in line and "200" in line]
        some = next(line for line in server.lines if "throughput" in line)
    ids = (response.headers["x-request-id"], response.json()["id"])
    if as_json:
        fields, work = json.loads(line), json.loads(some)
        assert (fields["id"], fields["response"]) == ids
        assert fields["output_tokens"] == 28 and fields["prompt_tokens"] == len(prompt) and fields["cached_tokens"] == 0
        assert 0 < fields["ttft_s"] < fields["seconds"] and fields["queue_s"] == 0
        assert 0 < fields["tokens_per_s"] < 28 / fields["ttft_s"] and fields["finish"] == "stop" and "retractions" not in fields
        assert work["running"] == 2 and work["output_tokens_per_s"] > 0 and work["waiting"] == work["paused"] == 0
    else:
        assert f"id={ids[0]} response={ids[1]} prompt_tokens={len(prompt)} cached_tokens=0 output_tokens=28" in line
        assert re.search(r"queue_s=0.000 ttft_s=0\.\d+ tokens_per_s=[\d.]+ finish=stop$", line)
        assert re.search(r"INFO  throughput prompt_tokens_per_s=\S+ output_tokens_per_s=\S+ running=2 waiting=0 paused=0", some)


def test_no_throughput_lines_where_none_are_wanted() -> None:
    with LiveServer(log_interval_s=0) as server:
        assert server.complete("say(ok) [delay=0.1]").status_code == 200
        assert "throughput" not in server.log
