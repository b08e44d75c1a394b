"""What the prefix cache brings and what it costs: on against off, in turns. bench/README.md has the command.

    pays           many requests that begin with the same long prefix; the cache is empty at the start of every round
    costs nothing  requests that share nothing, new ones in every round, the same for both

Both engines share one model; a ratio is of the same round, and the order turns around from round to round. Answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import script
from slipstream.cli.intervals import median_ratio
from slipstream.cli.measure import machine
from slipstream.config import EngineConfig
from slipstream.engine.build import assemble_engine
from slipstream.engine.loop import Engine
from slipstream.text.detokenize import StopScanner
from slipstream.types import EngineRequest, SamplingParams
from slipstream.weights import load
from slipstream.weights.loaded import LoadedModel

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Round:
    """One batch through one engine: seconds in all, the median request's to its first token, CPU seconds of the process."""

    wall_s: float
    ttft_s: float
    cpu_s: float
    num_cached_tokens: int


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print progress to stderr, write JSON."""
    args = _parser().parse_args(argv)
    longest = max(args.prefix_len + args.tail_len, args.input_len) + args.output_len + 1
    loaded = load(args.model, dtype=args.dtype, max_context=longest)
    engines = {name: _engine(loaded, name == "on", longest, args) for name in ("on", "off")}
    rng = random.Random(20240607)
    vocab = range(100, loaded.model.vocab_size // 2)

    def drawn(length: int) -> Ids:
        return rng.choices(vocab, k=length)

    def shared() -> list[Ids]:
        prefix = drawn(args.prefix_len)
        return [prefix + drawn(args.tail_len) for _ in range(args.num_requests)]

    def unshared() -> list[Ids]:
        return [drawn(args.input_len) for _ in range(args.num_unshared)]

    answer(engines["on"], [drawn(8)], 2)  # what is touched for the first time is not measured
    answer(engines["off"], [drawn(8)], 2)
    result: dict[str, Any] = {
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "concurrency": args.concurrency,
        "machine": machine(),
        "measured": time.strftime("%Y-%m-%d"),
        "pays": _compare("pays", engines, shared, args.output_len, args.rounds),
        "costs": _compare("costs", engines, unshared, args.output_len, args.cost_rounds),
        "sizes": {
            "pays": f"{args.num_requests} requests, {args.prefix_len} shared + {args.tail_len} own tokens, {args.output_len} out",
            "costs": f"{args.num_unshared} requests of {args.input_len} tokens, {args.output_len} out",
        },
    }
    for engine in engines.values():
        engine.close()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def answer(engine: Engine, prompts: Sequence[Ids], output_len: int) -> tuple[Round, dict[str, Ids]]:
    """Answer all prompts, greedily and to a fixed length."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    answers: dict[str, Ids] = {f"r{index}": [] for index in range(len(prompts))}
    first: dict[str, float] = {}
    cached = engine.stats().num_cached_tokens
    began, cpu = time.perf_counter(), time.process_time()
    for name, ids in zip(answers, prompts, strict=True):
        engine.add(EngineRequest(name, tuple(ids), params, seed=0))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"a request must be answered, but got {output.error}")
            if output.token_ids:
                first.setdefault(output.request_id, time.perf_counter() - began)
            answers[output.request_id].extend(output.token_ids)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    found = engine.stats().num_cached_tokens - cached
    return Round(wall_s, statistics.median(first.values()), cpu_s, found), answers


def _compare(
    title: str, engines: dict[str, Engine], prompts: Callable[[], list[Ids]], output_len: int, rounds: int
) -> dict[str, Any]:
    taken: dict[str, list[Round]] = {name: [] for name in engines}
    differing = 0
    for number in range(rounds):
        asked, answers = prompts(), {}
        for name in engines if number % 2 == 0 else reversed(engines):
            engines[name].reset_prefix_cache()
            one, answers[name] = answer(engines[name], asked, output_len)
            taken[name].append(one)
        differing += sum(answers["on"][each] != answers["off"][each] for each in answers["on"])
        print(f"\r{title}: round {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    ratios = {
        field: asdict(median_ratio([getattr(one, field) for one in taken["off"]], [getattr(one, field) for one in taken["on"]]))
        for field in ("wall_s", "ttft_s", "cpu_s")
    }
    medians = {
        name: {field: statistics.median(getattr(one, field) for one in each) for field in asdict(each[0])}
        for name, each in taken.items()
    }
    shown = ", ".join(f"{name} {each['median']:.3f} [{each['low']:.3f}, {each['high']:.3f}]" for name, each in ratios.items())
    print(f"\r{title}: off / on: {shown}", file=sys.stderr, flush=True)
    return {
        "rounds": rounds,
        "medians": medians,
        "off/on": ratios,
        "answers_that_differ": differing,
        "samples": {name: [asdict(one) for one in each] for name, each in taken.items()},
    }


def _engine(loaded: LoadedModel, caching: bool, longest: int, args: argparse.Namespace) -> Engine:
    config = EngineConfig(
        model=loaded.name,
        enable_prefix_caching=caching,
        max_num_seqs=args.concurrency,
        max_num_batched_tokens=512,
        num_pages=-(-longest // 16) * (args.concurrency + 2),
    )
    return assemble_engine(
        loaded.model,
        config,
        eos_token_ids=loaded.eos_token_ids,
        stop_text=lambda request: StopScanner(loaded.tokenizer, request.params),
        context_len=loaded.context_len,
    )


def _parser() -> argparse.ArgumentParser:
    parser = script.parser("prefix", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--num-requests", type=int, default=50)
    parser.add_argument("--prefix-len", type=int, default=2000)
    parser.add_argument("--tail-len", type=int, default=20)
    parser.add_argument("--num-unshared", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="of `pays`: the difference is an order of magnitude")
    parser.add_argument("--cost-rounds", type=int, default=12, help="of `costs`; the interval needs at least ten")
    parser.add_argument("--json", type=Path, default=Path("bench/results/prefix.json"))
    return parser


if __name__ == "__main__":
    script.run(main)
