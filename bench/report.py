"""Tables and the figure of docs/benchmarks.md from the JSON that bench.engine wrote: `python -m bench.report`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

START, END = "<!-- measured: start -->", "<!-- measured: end -->"
NAMES = {"transformers": "transformers generate", "lag0": "slipstream, lag 0", "lag1": "slipstream, lag 1"}
STEP_COLUMNS = (
    ("step", "wall"),
    ("device", "device"),
    ("host works", "host"),
    ("host waits", "wait"),
    ("host stands", "host_off_cpu"),
    ("host wakes", "host_wake"),
    ("device thread stands", "device_off_cpu"),
)
COLOURS = {"transformers": "#9aa5b1", "lag0": "#7fb3d5", "lag1": "#1f77b4"}


def main(argv: Sequence[str] | None = None) -> None:
    """Put tables between the marks of a Markdown file and write the figure beside it."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("bench/results/engine.json"))
    parser.add_argument("--into", type=Path, default=Path("docs/benchmarks.md"))
    args = parser.parse_args(argv)
    result = json.loads(args.json.read_text())
    args.into.write_text(between_marks(args.into.read_text(), markdown(result)))
    args.into.with_suffix(".svg").write_text(figure(result))


def between_marks(text: str, new: str) -> str:
    """`text` with what stands between the two marks replaced."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"the file must hold {START} and {END} once each, in this order")
    return f"{text[: text.index(START)]}{START}\n\n{new}\n{text[text.index(END) :]}"


def markdown(result: Mapping[str, Any]) -> str:
    """Where it was measured, the speed table, and where a step's time goes."""
    machine = result["machine"]
    memory = machine["memory_bytes"] / 2**30
    lines = [
        f"Measured {result['measured']}: {result['model']} in {result['dtype']}, prompts of {result['input_len']} tokens, "
        f"answers of {result['output_len']}, greedy; {machine['processor']}, {machine['num_cores']} cores, {memory:.0f} GiB, "
        f"torch {result['torch']} with {result['num_threads']} threads. Medians of {result['rounds']} rounds, ratios with their "
        "95% intervals.",
        "",
    ]
    systems = list(next(iter(result["results"].values()))["systems"])
    shown = [NAMES[name] for name in systems]
    ratio_names = list(next(iter(result["results"].values()))["ratios"])
    lines += _table(
        ["at once", *(f"{name}, tok/s" for name in shown), *(name.replace("/", " / ") for name in ratio_names)],
        [_speed_row(size, one, systems, ratio_names) for size, one in result["results"].items()],
    )
    lines += ["", "CPU time of the process, in milliseconds a token:", ""]
    lines += _table(
        ["at once", *shown],
        [[size, *(f"{one['systems'][n]['cpu_ms_per_token']:.2f}" for n in systems)] for size, one in result["results"].items()],
    )
    lines += ["", "Where a step's time goes, in milliseconds a step:", ""]
    lines += _table(
        ["at once", "lag", *(title for title, _ in STEP_COLUMNS), "host share"],
        [_step_row(size, lag, one["systems"][lag]) for size, one in result["results"].items() for lag in ("lag0", "lag1")],
    )
    return "\n".join(lines) + "\n"


def figure(result: Mapping[str, Any]) -> str:
    """Bars of tokens a second, a group for each number of requests, as SVG."""
    width, bar, gap, left, top = 720, 22, 18, 190, 46
    sizes = result["results"]
    order = [name for name in NAMES if name in next(iter(sizes.values()))["systems"]]
    most = max(one["systems"][name]["tokens_per_s"] for one in sizes.values() for name in order)
    parts, y = [], top
    for size, one in sizes.items():
        for name in order:
            rate = one["systems"][name]["tokens_per_s"]
            length = rate / most * (width - left - 90)
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar - 4}" fill="{COLOURS[name]}"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{rate:.0f}</text>')
            parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(NAMES[name])}</text>')
            y += bar
        parts.append(f'<text x="8" y="{y - bar * len(order) // 2}" font-weight="bold">{size}</text>')
        y += gap
    title = f"Tokens a second, {result['model']} in {result['dtype']}, by requests at once"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" font-family="sans-serif" font-size="13">'
    background = f'<rect width="{width}" height="{y}" fill="white"/>'
    return "\n".join([head, background, f'<text x="8" y="24" font-size="15">{escape(title)}</text>', *parts, "</svg>"]) + "\n"


def _speed_row(size: str, one: Mapping[str, Any], systems: Sequence[str], ratios: Sequence[str]) -> list[str]:
    rates = [f"{one['systems'][name]['tokens_per_s']:.1f}" for name in systems]
    return [size, *rates, *(_ratio(one["ratios"][name]) for name in ratios)]


def _step_row(size: str, lag: str, medians: Mapping[str, float]) -> list[str]:
    times = [f"{medians[f'{name}_ms_per_step']:.2f}" for _, name in STEP_COLUMNS]
    return [size, lag.removeprefix("lag"), *times, f"{medians['host_share']:.1%}"]


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    main()
