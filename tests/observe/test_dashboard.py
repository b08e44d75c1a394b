"""The dashboard and the documented table show what /metrics has: every metric, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.stats import EngineStats
from slipstream.observe.metrics import PREFIX, Metrics
from slipstream.observe.timing import AnswerTimes

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "ops" / "grafana-dashboard.json").read_text())
DOCS = (ROOT / "docs" / "observability.md").read_text()
FUNCTIONS = {"sum", "max", "rate", "histogram_quantile", "label_values", "by", "increase", "absent", "and", "for", "vector"}


def families() -> list[Metric]:
    metrics = Metrics("m")
    metrics.http_request("/v1/completions", 200)
    metrics.failed("abort")
    metrics.finished(AnswerTimes(0.0), "stop", 1.0)
    stats = EngineStats(num_pages=1)
    stats.drafter("off").propose_s += 1.0
    stats.drafter("ngram").add(3, 2)
    return list(text_string_to_metric_families(metrics.render(stats).decode()))


def labels_of_samples() -> dict[str, set[str]]:
    return {sample.name: set(sample.labels) for family in families() for sample in family.samples}


def test_plain_decoding_is_no_drafter() -> None:
    drafters = {sample.labels.get("drafter") for family in families() for sample in family.samples}
    assert drafters == {None, "ngram"}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def check(expression: str, samples: dict[str, set[str]]) -> None:
    """Names, labels and brackets of a PromQL expression; raises AssertionError for what no server would answer."""
    closing = {")": "(", "]": "[", "}": "{"}
    open_brackets: list[str] = []
    for char in re.sub(r'"[^"]*"', '""', expression):
        if char in "([{":
            open_brackets.append(char)
        elif char in closing:
            assert open_brackets and open_brackets.pop() == closing[char], f"brackets of {expression}"
    assert not open_brackets, f"brackets of {expression}"
    names = re.findall(r"slipstream:\w+", expression)
    assert names, f"no metric in {expression}"
    for name in names:
        assert name in samples, f"{name} of {expression} is no sample"
    known = set.intersection(*(samples[name] for name in names))
    given = [label for group in re.findall(r"by \(([\w, ]+)\)", expression) for label in group.split(", ")]
    for label in given + re.findall(r'(\w+)=~?"', expression):
        assert label in known, f"{label} of {expression} is no label"
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)|slipstream:\w+', " ", expression)
    assert set(re.findall(r"[a-z_]+", bare)) <= FUNCTIONS, f"functions of {expression}"
    for counter in re.findall(r"slipstream:\w+_total", expression):
        assert f"rate({counter}" in expression or f"increase({counter}" in expression, f"a counter as it is in {expression}"


@pytest.mark.parametrize("title, expression", list(expressions()))
def test_panels_ask_for_what_there_is(title: str, expression: str) -> None:
    assert title
    check(expression, labels_of_samples())


@pytest.mark.parametrize(
    "expression",
    [
        "sum(slipstream:no_such_thing)",
        "sum(rate(slipstream:engine_steps_total[1m])",
        "sum(slipstream:engine_steps_total)",
        "sum by (no_label) (slipstream:num_requests_running)",
        'slipstream:num_requests_running{no_label="x"}',
        "summ(slipstream:num_requests_running)",
        "sum(rate(node_cpu_seconds_total[1m]))",
    ],
)
def test_the_check_finds_what_is_wrong(expression: str) -> None:
    with pytest.raises(AssertionError):
        check(expression, labels_of_samples())


def test_every_metric_has_a_panel() -> None:
    asked = {name for _, expression in expressions() for name in re.findall(r"slipstream:\w+", expression)}
    for family in families():
        assert asked & {sample.name for sample in family.samples}, f"{family.name} has no panel"


def test_the_dashboard_can_be_imported() -> None:
    """Every panel takes its data from the variable; ids are unique, no panel lies on another."""
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    check(variables["model_name"]["query"]["query"].replace("_total, model_name", "_total[1m]").replace("label_values", "rate"),
          labels_of_samples())  # fmt: skip
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not mine & cells and at["x"] + at["w"] <= 24
        cells |= mine
        if panel["type"] != "row":
            sources: list[Any] = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_the_documented_table_is_the_registry() -> None:
    rows = []
    for family in families():
        labels = sorted(set.union(*(set(sample.labels) for sample in family.samples)) - {"le", "model_name"})
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        rows.append(f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in labels)} | {family.documentation} |")
    documented = re.findall(r"^\| `\w+` \| (?:counter|gauge|histogram) \|.*$", DOCS, re.MULTILINE)
    assert documented == rows, "docs/observability.md must have these rows:\n" + "\n".join(rows)


def test_documented_expressions_are_right() -> None:
    found = re.findall(r"^ +expr: (.+)$", DOCS, re.MULTILINE)
    assert len(found) >= 5
    for expression in found:
        check(expression, labels_of_samples())
