"""Runs the equality table, or what is left of it: `python -m tests.equality --out FILE --processes 2`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: steps are small, and processes must not fight for cores

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

from tests.equality import record
from tests.equality.axes import AXIS_NAMES, Configuration, configurations
from tests.equality.check import Outcome, checked


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has not run; returns 1 where any configuration of this source has failed."""
    given = parser().parse_args(argv)
    source, out = record.source_hash(), given.out
    chosen = [one for one in configurations() if one.has(_axes(given.only))]
    if not chosen:
        print("error: --only must leave a configuration, but left none", file=sys.stderr)
        return 2
    found = record.read(out, source) if out else {}
    left = [one for one in chosen if one not in found]
    print(f"{len(chosen)} configurations, {len(chosen) - len(left)} of them done", file=sys.stderr)
    until = time.monotonic() + 60 * given.limit_minutes
    with out.open("a", encoding="utf-8") if out else nullcontext() as file:
        if file is not None and out.stat().st_size and not out.read_bytes().endswith(b"\n"):
            file.write("\n")  # behind a line that was cut short
        started = time.monotonic()
        for number, (configuration, outcome) in enumerate(_outcomes(left, given.processes, until), 1):
            text = record.line(source, configuration, outcome)
            found[configuration] = json.loads(text)
            if file is not None:
                file.write(text)
                file.flush()
            if not outcome.passed:
                print(f"\nFAILED {record.what_failed(found[configuration])}\n{outcome.error}", file=sys.stderr)
                print(f"repeat: {record.repeat(configuration)}", file=sys.stderr)
            each = (time.monotonic() - started) / number
            if number % 10 == 0 or number == len(left):
                minutes = each * (len(left) - number) / 60
                print(f"{number} of {len(left)}, {each:.2f} s each, {minutes:.0f} minutes left", file=sys.stderr)
    failed = [one for one in chosen if one in found and not found[one]["passed"]]
    open_ = sum(one not in found for one in chosen)
    print(f"{len(chosen) - open_ - len(failed)} passed, {len(failed)} failed, {open_} left", file=sys.stderr)
    if given.report:
        given.report.write_text(record.report(found, len(configurations()), source), encoding="utf-8")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog=record.COMMAND, description="The same answers in every configuration of speculation.")
    made.add_argument("--out", type=Path, help="lines of JSON; what is there of this source is not run again")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--only", nargs="+", action="extend", default=[], metavar="AXIS=VALUE[,VALUE]", help=", ".join(AXIS_NAMES))
    made.add_argument("--limit-minutes", type=float, default=float("inf"), help="begin nothing after so long")
    made.add_argument("--report", type=Path, help="write a report in Markdown")
    return made


def _axes(only: Sequence[str]) -> dict[str, frozenset[str]]:
    wanted: dict[str, frozenset[str]] = {}
    for one in only:
        name, _, values = one.partition("=")
        if name not in AXIS_NAMES:
            raise SystemExit(f"error: --only must name one of {', '.join(AXIS_NAMES)}, but got {one!r}")
        wanted[name] = frozenset(values.split(","))
    return wanted


def _outcomes(left: Sequence[Configuration], processes: int, until: float) -> Iterator[tuple[Configuration, Outcome]]:
    waiting = _in_time(left, until)
    if processes == 1:
        yield from map(checked, waiting)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(checked, one) for one in islice(waiting, processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(checked, one) for one in islice(waiting, len(done))}
            yield from (each.result() for each in done)


def _in_time(left: Iterable[Configuration], until: float) -> Iterator[Configuration]:
    for configuration in left:
        if time.monotonic() >= until:
            return
        yield configuration


if __name__ == "__main__":
    sys.exit(main())
