"""Log lines and metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.stats import EngineStats
from slipstream.observe import log
from slipstream.observe.metrics import Metrics


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
    return {
        sample.name.removeprefix("slipstream:") + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_of_an_answer() -> None:
    metrics = Metrics()
    metrics.started(5)
    metrics.first_token(0.5, 2)
    metrics.tokens(0.3, 3)
    metrics.finished("stop", 1.0, 5)
    metrics.failed("abort")
    metrics.http_request("/v1/completions", 200)
    got = samples(metrics)
    assert got["prompt_tokens_total"] == 5 and got["generation_tokens_total"] == 5
    assert got["time_to_first_token_seconds_count"] == 1 and got["time_to_first_token_seconds_sum"] == 0.5
    assert got["inter_token_latency_seconds_count"] == 3 and got["inter_token_latency_seconds_sum"] == pytest.approx(0.3)
    assert got["request_success_total/stop"] == 1 and got["request_success_total/length"] == 0
    assert got["request_failure_total/abort"] == 1
    assert got["e2e_request_latency_seconds_sum"] == 1 and got["request_generation_tokens_sum"] == 5
    assert got["http_requests_total//v1/completions/200"] == 1
    assert "num_requests_running" not in got


def test_metrics_of_the_engine() -> None:
    engine = EngineStats(num_running=2, num_waiting=3, num_pages=8, num_free_pages=6, num_steps=9, num_drafted=4, num_accepted=3)
    got = samples(Metrics(), engine)
    assert got["num_requests_running"] == 2 and got["num_requests_waiting"] == 3 and got["kv_cache_usage_perc"] == 0.25
    assert got["spec_decode_num_draft_tokens_total"] == 4 and got["spec_decode_num_accepted_tokens_total"] == 3
    assert samples(Metrics(), EngineStats())["kv_cache_usage_perc"] == 0
