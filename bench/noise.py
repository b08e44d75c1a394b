"""The noise test at its full size: a million draws, each over a whole vocabulary of 150,000, through `sample`.

    python -m bench.noise --json bench/results/noise.json

Goes on where the JSON file says it stopped. The draws are shared out among distributions wide and narrow, truncated and not; draw
i of each is that of position i. Counts are kept by bucket of ids and by bucket of probability, and compared with the exact masses
by a chi-square test.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import script
from slipstream.sampling.nodes import Nodes
from slipstream.sampling.sampler import sample
from slipstream.sampling.state import SamplingState
from slipstream.types import EngineRequest, SamplingParams

VOCAB_SIZE = 150_000
NUM_BUCKETS = 100
BLOCK = 500  # draws between two looks at the clock
CPU = torch.device("cpu")
# name, deviation of the logits, parameters
CASES: tuple[tuple[str, float, SamplingParams], ...] = (
    ("wide", 1.0, SamplingParams()),
    ("language-like", 3.0, SamplingParams()),
    ("narrow", 6.0, SamplingParams()),
    ("flat", 0.0, SamplingParams()),
    ("temperature 0.7", 2.0, SamplingParams(temperature=0.7)),
    ("top_k 50", 2.0, SamplingParams(top_k=50)),
    ("top_p 0.9", 5.0, SamplingParams(top_p=0.9)),
    ("min_p 0.05", 3.0, SamplingParams(min_p=0.05)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw until every case has its share, saving as it goes, and print the verdict."""
    parser = argparse.ArgumentParser(prog="python -m bench.noise", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("bench/results/noise.json"))
    parser.add_argument("--draws", type=int, default=1_000_000, help="of all cases together")
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    setting = {"vocab_size": VOCAB_SIZE, "draws": args.draws, "seed": args.seed}
    done: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {"setting": setting, "cases": {}}
    if done["setting"] != setting:
        raise SystemExit(f"{args.json} must hold a run of {setting}, but holds one of {done['setting']}")
    share = args.draws // len(CASES)
    with torch.inference_mode():
        for number, case in enumerate(CASES):
            run_case(number, case, share, args.seed, done, args.json)
    worst = max(z for case in done["cases"].values() for z in (case["z_by_id"], case["z_by_probability"]))
    print(f"{sum(case['draws'] for case in done['cases'].values())} draws; largest deviation {worst:.2f} sigma (5 is too large)")
    raise SystemExit(worst > 5)


def run_case(
    number: int, case: tuple[str, float, SamplingParams], share: int, seed: int, done: dict[str, Any], path: Path
) -> None:
    """Finish one case: `share` draws from its distribution."""
    name, spread, params = case
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed + number)) * spread
    masses = probabilities(logits, params)
    by_id = torch.arange(VOCAB_SIZE) * NUM_BUCKETS // VOCAB_SIZE
    # Buckets of about equal mass, from the least to the most likely token.
    order = masses.argsort(stable=True)
    by_probability = torch.empty_like(order)
    by_probability[order] = (masses[order].cumsum(0) * NUM_BUCKETS).long().clamp(max=NUM_BUCKETS - 1)
    buckets = {"by_id": by_id, "by_probability": by_probability}
    empty = {"draws": 0, "seconds": 0.0, "impossible": 0, **{key: [0] * NUM_BUCKETS for key in buckets}}
    state = done["cases"].setdefault(name, empty)
    sampler = SamplingState(2, VOCAB_SIZE, (), CPU)
    sampler.admit(1, EngineRequest(name, (0,), params, seed + number), 1)
    while state["draws"] < share:
        started = time.perf_counter()
        first, count = 1 + state["draws"], min(BLOCK, share - state["draws"])
        tokens = sample(logits.expand(count, -1), sampler.rows([1]), nodes_at(first, count))
        for key, bucket in buckets.items():
            counts = torch.bincount(bucket[tokens], minlength=NUM_BUCKETS).tolist()
            state[key] = [a + b for a, b in zip(state[key], counts, strict=True)]
        state["impossible"] += int((masses[tokens] == 0).sum())
        state["draws"] += count
        state["seconds"] += time.perf_counter() - started
        for key, bucket in buckets.items():
            expected = torch.zeros(NUM_BUCKETS, dtype=torch.float64).index_add_(0, bucket, masses) * state["draws"]
            state[f"z_{key}"] = math.inf if state["impossible"] else deviation(state[key], expected.tolist())
        partial = path.with_suffix(".part")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(done, indent=1))
        partial.replace(path)
    us = state["seconds"] / state["draws"] * 1e6
    print(
        f"{name:18} {state['draws']:8} draws {us:7.0f} us each   z by id {state['z_by_id']:5.2f}, "
        f"by probability {state['z_by_probability']:5.2f}",
        flush=True,
    )


def nodes_at(first: int, count: int) -> Nodes:
    """One row's token at positions first, first + 1, ..."""
    zeros = torch.zeros(count, dtype=torch.int64)
    return Nodes(
        row=zeros,
        position=torch.arange(first, first + count),
        path=zeros.view(count, 1)[:, :0],
        depth=zeros,
        slots=torch.ones(1, dtype=torch.int64),
        history=torch.zeros(2, 4, dtype=torch.int64),
        history_lens=torch.ones(1, dtype=torch.int64),
        max_history_len=1,
        row_ids=(0,) * count,
    )


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """What each token is drawn with, by sorting the whole vocabulary in float64: [V]."""
    scores = logits.double() / params.temperature
    order = scores.argsort(descending=True, stable=True)
    p = torch.softmax(scores[order], 0)
    kept = torch.ones_like(p, dtype=torch.bool)
    if params.top_k > 0:
        kept[params.top_k :] = False
    if params.top_p < 1:
        p = p * kept / (p * kept).sum()
        kept[1:] &= p.cumsum(0)[:-1] < params.top_p
    if params.min_p > 0:
        kept &= p >= params.min_p * p[0]
    masses = torch.zeros_like(p)
    masses[order] = p * kept / (p * kept).sum()
    return masses


def deviation(counts: Sequence[int], expected: Sequence[float]) -> float:
    """Chi-square of the counts, in deviations of a normal variable (Wilson, Hilferty); cells that expect under 10 are merged."""
    large = [(count, mean) for count, mean in zip(counts, expected, strict=True) if mean >= 10]
    rest = sum(counts) - sum(count for count, _ in large), sum(expected) - sum(mean for _, mean in large)
    cells = [*large, rest] if rest[1] >= 10 else large
    degrees = len(cells) - 1
    if degrees < 1:
        return 0.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    spread = 2 / (9 * degrees)
    return (math.cbrt(statistic / degrees) - (1 - spread)) / math.sqrt(spread)


if __name__ == "__main__":
    script.run(main)
