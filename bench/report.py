"""Tables and the figure of docs/benchmarks.md from the JSON that the benchmarks wrote: `python -m bench.report`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench import script
from slipstream.cli.bench_speculate import cells

RESULTS = Path(__file__).parent / "results"
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
    """Put tables between the marks of a Markdown file, those of which there are results, and write the figure beside it."""
    parser = script.parser("report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--into", type=Path, default=Path("docs/benchmarks.md"))
    args = parser.parse_args(argv)
    for name, (pattern, make) in SECTIONS.items():
        results = [json.loads(path.read_text()) for path in sorted(args.results.glob(pattern))]
        if not results:
            print(f"{name}: no {args.results / pattern}, left as it is")
            continue
        args.into.write_text(between_marks(args.into.read_text(), name, "\n".join(map(make, results))))
        if name == "engine":
            args.into.with_suffix(".svg").write_text(figure(results[0]))


def between_marks(text: str, section: str, new: str) -> str:
    """`text` with what stands between the two marks of a section replaced."""
    start, end = f"<!-- {section}: start -->", f"<!-- {section}: end -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"the file must hold {start} and {end} once each, in this order")
    return f"{text[: text.index(start)]}{start}\n\n{new}\n{text[text.index(end) :]}"


def prefix_markdown(result: Mapping[str, Any]) -> str:
    """The prefix cache on against off, where it pays and where it cannot."""
    rows = []
    for name in ("pays", "costs"):
        one, ratios = result[name], result[name]["off/on"]
        rows.append(
            [
                result["sizes"][name],
                *(f"{one['medians'][how]['wall_s']:.1f}" for how in ("off", "on")),
                *(_interval(ratios[field]) for field in ("wall_s", "ttft_s", "cpu_s")),
                str(one["rounds"]),
            ]
        )
    columns = ["work", "off, s", "on, s", "time off / on", "time to first token", "CPU time", "rounds"]
    return "\n".join([_measured(result, f"{result['concurrency']} at once"), "", *_table(columns, rows)]) + "\n"


def speculate_markdown(result: Mapping[str, Any]) -> str:
    """What a step costs, and drafters against plain decoding, by requests at once."""
    rows = []
    for kind, size, one in cells(result):
        off = one["systems"]["off"]
        for name, ratio in one["speed"].items():
            own = one["systems"][name]
            speeds = [f"{each['tokens_per_s']:.1f}" for each in (off, own)]
            times = [f"{each['step_ms']:.1f}" for each in (off, own)]
            differ = f"{one['num_differing'][name]} of {one['num_answers']}"
            rows.append([kind, size, name, *speeds, _interval(ratio), f"{own['accept_length']:.2f}", *times, differ])
    speed, steps = ["off, tok/s", "tok/s", "ratio", "accept length"], ["step off, ms", "step, ms"]
    columns = ["prompts", "at once", "drafter", *speed, *steps, "answers that differ"]
    setup = result["setup"]
    how = f"{setup['rounds']} rounds, answers of {setup['output_len']}, temperature {setup['temperature']:g}"
    costs = [f"{num_rows}: {one['step_ms']:.1f} ms ({one['ratio']:.2f})" for num_rows, one in result["step_cost"].items()]
    head = [_measured({**result, **setup}, how), "", f"A step that verifies R rows of one request: {', '.join(costs)}."]
    return "\n".join([*head, "", *_table(columns, rows)]) + "\n"


def _measured(result: Mapping[str, Any], how: str) -> str:
    machine = result["machine"]
    return (
        f"Measured {result['measured']}: {result['model']} in {result['dtype']}, {how}; {machine['processor']}, "
        f"{machine['num_cores']} cores, torch {result['torch']} with {result['num_threads']} threads. Ratios with 95% intervals."
    )


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


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


SECTIONS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "engine": ("engine.json", markdown),
    "prefix": ("prefix.json", prefix_markdown),
    "speculate": ("speculate-*.json", speculate_markdown),
}

if __name__ == "__main__":
    script.run(main)
