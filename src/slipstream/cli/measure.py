"""What benchmarks report: times of tokens, percentiles, and the words for them. Knows no engine and no HTTP.

    sent ──── TTFT ────► first token ── ITL ─► ── ITL ─► last token        TPOT = (last - first) / (tokens - 1)
"""

from __future__ import annotations

import json
import math
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Timeline:
    """One request: when it was sent, when tokens arrived (seconds, one clock), and how many there were.

    Tokens that arrived together share an arrival; `num_tokens` counts them all.
    """

    sent_s: float
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """Time to the last token."""
        return self.arrivals_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None for a single token."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between arrivals."""
        return [after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of values, interpolated linearly between the two nearest. NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of seconds, in milliseconds."""
    mean = sum(values) / len(values) if values else math.nan
    found = {"mean": mean} | {f"p{p}": percentile(values, p) for p in PERCENTILES}
    return {name: value * 1000 for name, value in found.items()}


def summary(timelines: Sequence[Timeline], wall_s: float) -> dict[str, Any]:
    """Totals, rates over `wall_s`, and the spreads of TTFT, TPOT, ITL and latency, for requests that got a token."""
    answered = [timeline for timeline in timelines if timeline.arrivals_s]
    num_prompt = sum(timeline.num_prompt_tokens for timeline in answered)
    num_output = sum(timeline.num_tokens for timeline in answered)
    return {
        "num_requests": len(answered),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "wall_s": wall_s,
        "requests_per_s": len(answered) / wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "total_tokens_per_s": (num_prompt + num_output) / wall_s,
        "ttft_ms": spread([timeline.ttft_s for timeline in answered]),
        "tpot_ms": spread([tpot for timeline in answered if (tpot := timeline.tpot_s) is not None]),
        "itl_ms": spread([gap for timeline in answered for gap in timeline.itl_s]),
        "latency_ms": spread([timeline.latency_s for timeline in answered]),
    }


def table(result: Mapping[str, Any]) -> str:
    """A result as lines for a terminal: plain numbers first, then a row for each spread."""
    lines = [f"{name:24}{_shown(value):>12}" for name, value in result.items() if not isinstance(value, Mapping)]
    spreads = {name: value for name, value in result.items() if isinstance(value, Mapping)}
    if spreads:
        columns = list(next(iter(spreads.values())))
        lines += ["", " " * 24 + "".join(f"{column:>12}" for column in columns)]
        lines += [f"{name:24}" + "".join(f"{_shown(value[column]):>12}" for column in columns) for name, value in spreads.items()]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Where a result was measured, as far as it matters to read it."""
    import psutil

    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": _processor(),
        "num_cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
    }


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write a result to a file, or to stdout for `-`; None: nowhere. NaN becomes null, which JSON has."""
    if path is None:
        return
    text = json.dumps(_finite(result), indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"--json must name a file that can be written, but got {path!r}: {error.strerror}") from None


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids: every model has ids, and no two prompts share a beginning."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def read_prompts(path: str, count: int) -> list[str]:
    """The first `count` prompts of a JSON-lines file, again from the start where it is too short. A line has `prompt`, or `turns`
    whose first is taken. Raises `ConfigError`.
    """
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
        prompts = [str(row["prompt"] if "prompt" in row else row["turns"][0]) for row in rows]
    except OSError as error:
        raise ConfigError(f"--dataset must name a readable file, but got {path!r}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"--dataset must hold one JSON object a line, with `prompt` or `turns`, but got something else in {path!r}"
        ) from None
    if not prompts:
        raise ConfigError(f"--dataset must hold at least one prompt, but got none in {path!r}")
    return [prompts[i % len(prompts)] for i in range(count)]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
