"""Runs schedules again: `python -m tests.fuzz.replay SEED [--count N] [--model llama]`, from SEED on."""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a schedule is faster on one thread

from slipstream.testing.tiny import FAMILIES
from tests.fuzz.schedule import MODELS, run_seed
from tests.fuzz.universe import NUM_JOBS, NUM_REAL_JOBS


def main() -> None:
    """Run one seed, or several in a row; the first that fails is told and ends it."""
    parser = argparse.ArgumentParser(description="Run fuzzer schedules again.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--model", choices=FAMILIES, help="a tiny real model instead of HashLM")
    given = parser.parse_args()
    models, num_jobs = ((given.model,), NUM_REAL_JOBS) if given.model else (MODELS, NUM_JOBS)
    started = time.perf_counter()
    for seed in range(given.seed, given.seed + given.count):
        run_seed(seed, models, num_jobs)
    print(f"{given.count} schedules from {given.seed} on: all right, in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
