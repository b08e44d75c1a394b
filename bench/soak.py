"""A server under mixed load for minutes or hours: nothing may go wrong, nothing may be held at the end, memory may not grow.

    python -m bench.soak --minutes 20                        the tiny random model, as fast as it goes
    python -m bench.soak --model smollm2-135m --hours 8 -- --lag 0       flags behind -- go to the server

Ends with a verdict, on stdout and in bench/results/soak-MODEL.json, and exit code 1 where it is bad. Needs the [dev] tools.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.soak_load import Load, Sizes, Tally
from bench.trend import Trend, trend
from slipstream.cli.measure import machine, spread, write_json

RESULTS = Path(__file__).parent / "results"
SAMPLE_S = 2.0
WARM_UP = 1 / 3  # of the time: buffers, pages and caches are touched for the first time
START_S, IDLE_S, STOP_S = 300.0, 60.0, 60.0
# Growth below this is an allocator's business; above it, and surely there, it is a leak.
ALLOWED_BYTES, ALLOWED_SHARE = 4 * 2**20, 0.01
PRESSURE_S = 60.0  # a run of this length has seen want of pages
LEAST_JUDGED_S = 240.0  # of memory behind the warm-up; less says nothing
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# The pool is too small for all that may run at once, and nobody is left room to grow: requests wait, are paused and retracted,
# and cached pages are evicted.
MODELS: dict[str, tuple[Sizes, int, str]] = {  # sizes, clients, flags
    "tiny": (
        Sizes(long=300, short=40, max_tokens=24, exact=True),
        24,
        "--dtype float64 --num-threads 1 --max-num-seqs 16 --num-pages 80 --max-num-batched-tokens 256 "
        "--admission-headroom-tokens 0",
    ),
    "smollm2-135m": (
        Sizes(long=1000, short=120, max_tokens=64, exact=False),
        20,
        "--max-model-len 1024 --max-num-seqs 16 --num-pages 66 --max-num-batched-tokens 256 --admission-headroom-tokens 0",
    ),
}


@dataclass(slots=True)
class Samples:
    """Resident memory in bytes of both processes, at these seconds since the load began."""

    at_s: list[float] = field(default_factory=list)
    server: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)

    def trends(self) -> dict[str, Trend | None]:
        """The slope of each process after the warm-up."""
        first = sum(at < WARM_UP * self.at_s[-1] for at in self.at_s) if self.at_s else 0
        return {name: trend(self.at_s[first:], getattr(self, name)[first:]) for name in ("server", "engine")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    args = _parser().parse_args(argv)
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    seconds = 60 * args.minutes if args.hours is None else 3600 * args.hours
    sizes, usual, flag_text = MODELS[args.model]
    flags = flag_text.split()
    clients = args.clients or usual
    with _model_folder(args.model) as model, _server(model, (*flags, *args.serve)) as (process, url, log_path):
        ran, tally, samples, gauges = asyncio.run(_soak(process, url, sizes, seed, clients, seconds))
        exit_code = _stop(process)
        log = log_path.read_text(errors="replace")
    result = {
        "model": args.model,
        "seed": seed,
        "serve": [*flags, *args.serve],
        "clients": clients,
        "measured": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **report(ran, tally, samples, gauges),
    }
    result["problems"] = problems(tally, samples, gauges, exit_code, log)
    path = args.json or str(RESULTS / f"soak-{args.model}.json")
    write_json(path, result)
    print(_shown(result))
    if result["problems"]:
        print("the end of the server's log:\n" + "\n".join(log.splitlines()[-20:]), file=sys.stderr)
    return 1 if result["problems"] else 0


def report(seconds: float, tally: Tally, samples: Samples, gauges: Mapping[str, float]) -> dict[str, Any]:
    """The numbers of a run, for JSON."""
    num_calls = sum(count for kind, count in tally.counts.items() if "," not in kind)
    every = [timeline for timelines in tally.timelines.values() for timeline in timelines]
    streamed = [timeline for timeline in every if len(timeline.arrivals_s) > 1]
    return {
        "seconds": seconds,
        "calls": dict(sorted(tally.counts.items())),
        "calls_per_s": num_calls / seconds,
        "output_tokens_per_s": tally.num_output_tokens / seconds,
        "latency_ms": {
            kind: spread([timeline.latency_s for timeline in timelines]) for kind, timelines in sorted(tally.timelines.items())
        },
        "ttft_ms": spread([timeline.ttft_s for timeline in streamed]),
        "itl_ms": spread([gap for timeline in streamed for gap in timeline.itl_s]),
        "seed_differences": tally.differences,
        "errors": tally.errors,
        "at_the_end": dict(gauges),
        "memory": {name: None if found is None else asdict(found) for name, found in samples.trends().items()},
        "rss_bytes": asdict(samples),
    }


def problems(tally: Tally, samples: Samples, gauges: Mapping[str, float], exit_code: int, log: str) -> list[str]:
    """Everything that makes a run a bad one."""
    found = [f"error: {error}" for error in tally.errors]
    if not tally.timelines:
        found.append("no call was answered")
    if samples.at_s and samples.at_s[-1] >= PRESSURE_S and not gauges["retractions"]:
        found.append("requests must be retracted for want of pages, but none was: there was no pressure")
    if gauges["running"] or gauges["waiting"]:
        found.append(f"nothing must run or wait at the end, but {gauges['running']:.0f} run and {gauges['waiting']:.0f} wait")
    if gauges["free"] + gauges["evictable"] != gauges["pool"] or gauges["used"]:
        found.append(f"free and evictable pages must be the pool at the end, but got {dict(gauges)}")
    for name, line in samples.trends().items():
        if line is None or line.seconds < LEAST_JUDGED_S:
            continue
        if line.surely_grown > max(ALLOWED_BYTES, ALLOWED_SHARE * line.mean):
            found.append(f"the {name} process must not grow, but grew by at least {line.surely_grown / 2**20:.1f} MiB")
    if exit_code != 0:
        found.append(f"the server must end with 0, but got {exit_code}")
    found += [f"log: {line}" for line in log.splitlines() if re.match(r"\S+ (ERROR|CRITICAL)|Traceback", line)]
    return found


async def _soak(
    process: subprocess.Popen[str], url: str, sizes: Sizes, seed: int, clients: int, seconds: float
) -> tuple[float, Tally, Samples, dict[str, float]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as http:
        load = Load(http, "soak", sizes, seed)
        await load.fill(2 * clients)
        samples, began = Samples(), time.monotonic()
        sampling = asyncio.create_task(_sample(process, load.tally, samples, began, seconds))
        await asyncio.gather(*(load.client(number, began + seconds) for number in range(clients)))
        ran = time.monotonic() - began
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        return ran, load.tally, samples, await _gauges_when_idle(http)


async def _sample(process: subprocess.Popen[str], tally: Tally, samples: Samples, began: float, seconds: float) -> None:
    server = psutil.Process(process.pid)
    (engine,) = server.children()
    said = 0.0
    while True:
        now = time.monotonic() - began
        samples.at_s.append(now)
        samples.server.append(server.memory_info().rss)
        samples.engine.append(engine.memory_info().rss)
        if now - said >= 60:
            said = now
            megabytes = f"server {samples.server[-1] >> 20} MiB, engine {samples.engine[-1] >> 20} MiB"
            calls = f"{sum(tally.counts.values())} calls, {len(tally.errors)} errors"
            print(f"{now:6.0f} of {seconds:.0f} s: {calls}; {megabytes}", file=sys.stderr, flush=True)
        await asyncio.sleep(SAMPLE_S)


async def _gauges_when_idle(http: httpx.AsyncClient) -> dict[str, float]:
    """Read the engine's gauges once it is idle, or after IDLE_S as they are then."""
    ends = time.monotonic() + IDLE_S
    while True:
        families = list(text_string_to_metric_families((await http.get("/metrics")).text))
        values = {(s.name, s.labels.get("state")): s.value for family in families for s in family.samples}
        gauges = {state: values["slipstream:kv_cache_pages", state] for state in ("used", "evictable", "free")}
        gauges |= {name: values[f"slipstream:num_requests_{name}", None] for name in ("running", "waiting", "paused")}
        gauges["answers"] = sum(count for (name, _), count in values.items() if name == "slipstream:request_success_total")
        gauges["retractions"] = values["slipstream:num_retractions_total", None]
        gauges["cached_tokens"] = values["slipstream:prefix_cache_hits_total", None]
        gauges["pool"] = gauges["used"] + gauges["evictable"] + gauges["free"]
        if not (gauges["running"] or gauges["waiting"] or gauges["used"]) or time.monotonic() > ends:
            return gauges
        await asyncio.sleep(0.2)


@contextmanager
def _model_folder(model: str) -> Iterator[str]:
    """What to serve: the name itself, or a folder with the tiny model and a chat template."""
    if model != "tiny":
        yield model
        return
    from slipstream.testing.tiny import tiny_checkpoint

    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as folder:
        path = Path(folder, "model")
        shutil.copytree(tiny_checkpoint("llama"), path)
        settings = path / "tokenizer_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
        yield str(path)


@contextmanager
def _server(model: str, flags: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A server that is ready, its address, and where its log goes. It is ended in any case."""
    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as folder:
        log_path = Path(folder, "log")
        command = [sys.executable, "-m", "slipstream.cli.main", "serve", model, "--port", "0", "--served-model-name", "soak"]
        with log_path.open("w") as log, subprocess.Popen([*command, *flags], stderr=log, text=True) as process:
            try:
                yield process, _address(process, log_path), log_path
            finally:
                if process.poll() is None:
                    process.kill()


def _address(process: subprocess.Popen[str], log_path: Path) -> str:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        if found := re.search(r"listening on (http://[^;\s]+)", log_path.read_text()):
            return found.group(1)
        time.sleep(0.1)
    raise RuntimeError(f"the server must be ready within {START_S:.0f} s, but was not:\n{log_path.read_text()}")


def _stop(process: subprocess.Popen[str]) -> int:
    process.terminate()
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _shown(result: Mapping[str, Any]) -> str:
    lines = [f"{result['model']}, {result['seconds']:.0f} s, seed {result['seed']}"]
    lines += [f"  {kind:20} {count:8}" for kind, count in result["calls"].items()]
    lines += [f"  {name:20} {result[name]:8.1f}" for name in ("calls_per_s", "output_tokens_per_s")]
    for name, row in (*result["latency_ms"].items(), ("TTFT", result["ttft_ms"]), ("ITL", result["itl_ms"])):
        lines.append(f"  {name:20} " + "  ".join(f"{p} {row[p]:.1f}" for p in ("p50", "p90", "p99")) + " ms")
    for name, line in result["memory"].items():
        if line is None:
            lines.append(f"  {name:20} too few samples of its memory")
            continue
        judged = "" if line["seconds"] >= LEAST_JUDGED_S else "; not judged: the run is too short"
        hourly = [line[key] * 3600 / 2**20 for key in ("slope", "low", "high")]
        slope = f"{hourly[0]:+.1f} [{hourly[1]:+.1f}, {hourly[2]:+.1f}] MiB an hour"
        lines.append(f"  {name:20} {line['mean'] / 2**20:.1f} MiB, {slope}{judged}")
    lines.append("  at the end: " + ", ".join(f"{name} {value:.0f}" for name, value in result["at_the_end"].items()))
    lines += [f"  PROBLEM {problem}" for problem in result["problems"]] or ["  good"]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--hours", type=float, help="instead of --minutes")
    parser.add_argument("--clients", type=int, help="calls at once; by default what suits the model")
    parser.add_argument("--seed", type=int, help="of everything that is drawn; by default a fresh one, which is printed")
    parser.add_argument("--json", help="where the result goes; by default bench/results/soak-MODEL.json")
    parser.add_argument("serve", nargs="*", help="flags for the server, behind --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
