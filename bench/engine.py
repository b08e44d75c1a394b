"""Lag 0 against lag 1, and both against transformers, with 1, 8 and 32 requests at once. bench/README.md has the command.

All systems take turns in every round, in an order that turns around from round to round; ratios are of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import script
from bench.systems import Transformers
from slipstream.cli.intervals import median_ratio
from slipstream.cli.measure import machine, read_prompts
from slipstream.cli.progress import StatusLine
from slipstream.cli.timed_engine import Ids, Sample, System, TimedEngine
from slipstream.cli.turns import turns
from slipstream.config import EngineConfig
from slipstream.frontend.model_info import model_info
from slipstream.frontend.prepare import Frontend
from slipstream.weights import load
from slipstream.weights.loaded import LoadedModel
from slipstream.weights.source import resolve

DATA = Path(__file__).parent / "data" / "mt_bench.jsonl"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print progress to stderr, write JSON."""
    args = _parser().parse_args(argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    loaded = load(args.model, dtype=args.dtype, max_context=args.input_len + args.output_len + 1)
    prompts = equal_prompts(loaded, max(args.concurrency), args.input_len)
    systems, status = _systems(args, loaded), StatusLine()
    result: dict[str, Any] = {
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "rounds": args.rounds,
        "machine": machine(),
        "measured": time.strftime("%Y-%m-%d"),
        "results": {},
    }
    for concurrency in args.concurrency:
        samples = measure(systems, prompts[:concurrency], args.output_len, args.rounds, status)
        result["results"][str(concurrency)] = compare(samples)
        status.keep(f"{concurrency} at once: {_line(result['results'][str(concurrency)])}")
        # After each size: a run that is cut short leaves what it has.
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    systems: Mapping[str, System], prompts: Sequence[Ids], output_len: int, rounds: int, status: StatusLine
) -> dict[str, list[Sample]]:
    """Samples of each system, after one uncounted turn each. Raises where lags do not agree on a token."""
    samples: dict[str, list[Sample]] = {name: [] for name in systems}
    for number, taken in enumerate(turns(systems, prompts, output_len, rounds)):
        for name, (sample, _) in taken.items():
            samples[name].append(sample)
        ours = [answers for name, (_, answers) in taken.items() if name.startswith("lag")]
        if any(answers != ours[0] for answers in ours):
            raise RuntimeError(f"every lag must give the same tokens, but round {number} differs")
        status.show(f"{len(prompts)} at once: round {number + 1} of {rounds}")
    return samples


def compare(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians of each system, and ratios of their tokens a second with intervals."""
    rates = {name: [one.num_tokens / one.wall_s for one in taken] for name, taken in samples.items()}
    ratios = {}
    for above, below in (("lag1", "lag0"), ("lag1", "transformers")):
        if above in rates and below in rates:
            ratios[f"{above}/{below}"] = asdict(median_ratio(rates[above], rates[below]))
    medians = {name: _medians(taken) for name, taken in samples.items()}
    every = {name: [asdict(one) for one in taken] for name, taken in samples.items()}
    return {"systems": medians, "ratios": ratios, "samples": every}


def equal_prompts(loaded: LoadedModel, count: int, length: int) -> list[Ids]:
    """MT-bench questions through the chat template, repeated or cut to exactly `length` tokens."""
    config = EngineConfig(model=loaded.name)
    frontend = Frontend(model_info(loaded.text, config))
    prompts = []
    for question in read_prompts(str(DATA), count):
        text = frontend.chat_prompt([{"role": "user", "content": question}]) if loaded.chat_template else question
        ids = loaded.tokenizer.encode(text)
        prompts.append((ids * (length // len(ids) + 1))[:length])
    return prompts


def _systems(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, System]:
    pages = -(-(args.input_len + args.output_len + 8) // args.page_size) * max(args.concurrency)
    systems: dict[str, System] = {}
    for lag in (0, 1):
        config = EngineConfig(
            model=loaded.name,
            lag=lag,
            page_size=args.page_size,
            num_pages=pages,
            max_num_seqs=max(args.concurrency),
            max_num_batched_tokens=args.max_num_batched_tokens,
            enable_prefix_caching=False,  # every round asks the same again, and transformers computes it again
        )
        systems[f"lag{lag}"] = TimedEngine(f"lag{lag}", loaded, config)
    if not args.no_transformers:
        source = resolve(args.model)
        systems["transformers"] = Transformers(str(source.path), source.is_gguf, loaded.dtype)
    return systems


def _medians(taken: Sequence[Sample]) -> dict[str, float]:
    """What tables show, each the median over rounds: per token, and per step in milliseconds."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    found = {
        "tokens_per_s": median([one.num_tokens / one.wall_s for one in taken]),
        "cpu_ms_per_token": median([1000 * one.cpu_s / one.num_tokens for one in taken]),
    }
    if taken[0].num_steps:
        for name in ("wall_s", "host_s", "wait_s", "device_s", "host_off_cpu_s", "host_wake_s", "device_off_cpu_s"):
            found[f"{name.removesuffix('_s')}_ms_per_step"] = median([1000 * getattr(one, name) / one.num_steps for one in taken])
        found["host_share"] = median([one.host_s / one.wall_s for one in taken])
    return found


def _line(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {medians['tokens_per_s']:.1f} tok/s" for name, medians in result["systems"].items())
    ratios = ", ".join(f"{name} {r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" for name, r in result["ratios"].items())
    return f"{rates}; {ratios}"


def _parser() -> argparse.ArgumentParser:
    parser = script.parser("engine", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=12, help="alternations; the interval needs at least ten")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--num-threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("bench/results/engine.json"))
    return parser


if __name__ == "__main__":
    script.run(main)
