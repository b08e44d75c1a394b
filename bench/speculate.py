"""A drafter against plain decoding, on prompts that are copied from and on plain ones. bench/README.md has the command.

    copy    a passage, several times over: the model goes on with it
    plain   questions, through the chat template

The systems take turns in every round, in an order that turns around from round to round; ratios are of the same round. Above
temperature 0 every round has other seeds; accept rules can be compared there (--accept coupled rejection --fixed-width).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from bench.engine import DATA
from bench.intervals import median_ratio
from bench.systems import Ids, Sample, Slipstream, System
from slipstream.cli.measure import machine, read_prompts
from slipstream.config import EngineConfig
from slipstream.frontend.model_info import model_info
from slipstream.frontend.prepare import Frontend
from slipstream.weights import load
from slipstream.weights.loaded import LoadedModel

SETS = ("copy", "plain")
OFF = "off"
RULES = ("coupled", "rejection")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print progress to stderr, write JSON."""
    args = _parser().parse_args(argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    loaded = load(args.model, dtype=args.dtype, max_context=args.context)
    asked = {name_of(spec, rule, args.accept): (spec, rule) for spec in args.speculate for rule in args.accept}
    systems: dict[str, System] = {OFF: _system(OFF, args.accept[0], args, loaded)}
    systems.update({name: _system(*how, args, loaded) for name, how in asked.items()})
    result: dict[str, Any] = {
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "output_len": args.output_len,
        "rounds": args.rounds,
        "lag": args.lag,
        "adaptive_speculation": not args.fixed_width,
        "temperature": args.temperature,
        "accept": args.accept,
        "machine": machine(),
        "measured": time.strftime("%Y-%m-%d"),
        "results": {},
    }
    for name in args.sets:
        prompts = prompts_of(name, loaded, max(args.concurrency), args.input_len)
        for concurrency in args.concurrency:
            samples, num_differing = measure(systems, prompts[:concurrency], args.output_len, args.rounds)
            found = {**compare(samples), "num_differing": num_differing, "num_answers": concurrency * args.rounds}
            result["results"].setdefault(name, {})[str(concurrency)] = found
            print(f"{name}, {concurrency} at once: {line(found)}", file=sys.stderr, flush=True)
            # After each cell: a run that is cut short leaves what it has.
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    systems: Mapping[str, System], prompts: Sequence[Ids], output_len: int, rounds: int
) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """Samples of each system, after one uncounted turn each, and how many of its answers were not those of plain decoding.

    Answers may differ where torch's products round differently for different numbers of rows and two tokens nearly tie, and under
    `--accept rejection` they have the same distribution and nothing more.
    """
    for system in systems.values():
        system.run(prompts, min(output_len, 8))
    samples: dict[str, list[Sample]] = {name: [] for name in systems}
    differing = dict.fromkeys(systems, 0)
    for number in range(rounds):
        answers: dict[str, list[Ids]] = {}
        order = list(systems)[:: 1 if number % 2 == 0 else -1]
        for name in order:
            sample, answers[name] = systems[name].run(prompts, output_len)
            samples[name].append(sample)
        for name, found in answers.items():
            differing[name] += sum(one != other for one, other in zip(found, answers[OFF], strict=True))
    return samples, differing


def compare(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Medians of each system, and the ratio of its tokens a second, and of its CPU time a token, to plain decoding."""
    rates = {name: [one.num_tokens / one.wall_s for one in taken] for name, taken in samples.items()}
    costs = {name: [one.cpu_s / one.num_tokens for one in taken] for name, taken in samples.items()}
    drafters = [name for name in samples if name != OFF]
    return {
        "systems": {name: _medians(taken) for name, taken in samples.items()},
        "speed": {name: asdict(median_ratio(rates[name], rates[OFF])) for name in drafters},
        "cpu": {name: asdict(median_ratio(costs[name], costs[OFF])) for name in drafters},
        "samples": {name: [asdict(one) for one in taken] for name, taken in samples.items()},
    }


def line(found: Mapping[str, Any]) -> str:
    """One cell for people."""
    parts = [f"off {found['systems'][OFF]['tokens_per_s']:.1f} tok/s"]
    for name, ratio in found["speed"].items():
        own, cpu = found["systems"][name], found["cpu"][name]
        parts.append(
            f"{name} {own['tokens_per_s']:.1f} tok/s, {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}], "
            f"accept length {own['accept_length']:.2f}, cpu {cpu['median']:.3f}, step {own['step_ms']:.1f} ms against "
            f"{found['systems'][OFF]['step_ms']:.1f}, {found['num_differing'][name]} of {found['num_answers']} answers differ"
        )
    return "; ".join(parts)


def prompts_of(name: str, loaded: LoadedModel, count: int, length: int) -> list[Ids]:
    """`count` prompts of a set. Those to copy from have exactly `length` tokens: a third of it, three times over."""
    questions: list[str] = read_prompts(str(DATA), count)
    if name == "plain":
        frontend = Frontend(model_info(loaded.text, EngineConfig(model=loaded.name)))
        texts = [frontend.chat_prompt([{"role": "user", "content": q}]) if loaded.chat_template else q for q in questions]
        return [loaded.tokenizer.encode(text) for text in texts]
    passages = [loaded.tokenizer.encode(f"{question}\n", add_special_tokens=False) for question in questions]
    return [(passage[: max(1, length // 3)] * length)[:length] for passage in passages]


def name_of(spec: str, rule: str, rules: Sequence[str]) -> str:
    """What a system is called: as its drafter, and by the accept rule where there are several."""
    return spec if len(rules) == 1 else f"{spec} {rule}"


def _system(spec: str, rule: Literal["coupled", "rejection"], args: argparse.Namespace, loaded: LoadedModel) -> Slipstream:
    config = EngineConfig(
        model=loaded.name,
        lag=args.lag,
        speculate=(spec,),
        adaptive_speculation=not args.fixed_width,
        accept=rule,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_pages=-(-args.context // 16) * max(args.concurrency),
        # Every round computes its prompts anew.
        enable_prefix_caching=False,
    )
    return Slipstream(spec, loaded, config, args.temperature)


def _medians(taken: Sequence[Sample]) -> dict[str, float]:
    tokens, accepted = sum(one.num_tokens for one in taken), sum(one.num_accepted for one in taken)
    return {
        "tokens_per_s": statistics.median(one.num_tokens / one.wall_s for one in taken),
        "cpu_ms_per_token": statistics.median(1000 * one.cpu_s / one.num_tokens for one in taken),
        "step_ms": statistics.median(1000 * one.wall_s / one.num_steps for one in taken),
        # Each step of a row commits what was accepted and one token more.
        "accept_length": tokens / (tokens - accepted),
        "drafted_per_token": sum(one.num_drafted for one in taken) / tokens,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.speculate", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculate", nargs="+", default=["ngram"], help="drafters, as the server's --speculate takes them")
    parser.add_argument("--fixed-width", action="store_true", help="draft as much as may be, whatever the cost model says")
    parser.add_argument("--accept", nargs="+", choices=RULES, default=["coupled"], help="accept rules to compare")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=12, help="alternations; the interval needs at least ten")
    parser.add_argument("--input-len", type=int, default=192, help="tokens of the prompts to copy from")
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--context", type=int, default=1024, help="most tokens of a request")
    parser.add_argument("--lag", type=int, choices=(0, 1), default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--num-threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--json", type=Path, default=Path("bench/results/speculate.json"))
    return parser


if __name__ == "__main__":
    main()
