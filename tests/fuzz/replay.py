"""Runs schedules again: `python -m tests.fuzz.replay SEED [COUNT]`, from SEED on."""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a schedule is faster on one thread

from tests.fuzz.schedule import run_seed


def main() -> None:
    """Run one seed, or COUNT seeds in a row."""
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    started = time.perf_counter()
    for seed in range(first, first + count):
        run_seed(seed)
    print(f"{count} schedules from {first} on: all right, in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
