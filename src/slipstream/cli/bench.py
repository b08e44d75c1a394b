"""Measure. A table goes to stdout; --json FILE writes the numbers.

latency      one batch at a time, in this process: how long does a batch take?
throughput   many requests at once, in this process: how many tokens a second?
speculate    drafters against plain decoding, in turns: does drafting pay here?
serve        a server that runs, over HTTP as clients see it: TTFT, TPOT, ITL
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.cli import bench_speculate
from slipstream.cli.flags import ENGINE_GROUPS, add_config_flags, config_from, count
from slipstream.cli.measure import Timeline, machine, random_prompts, read_prompts, summary, table, write_json
from slipstream.errors import EngineError

if TYPE_CHECKING:
    from slipstream.cli.local import LocalModel
    from slipstream.config import EngineConfig

EXAMPLE = "slipstream bench throughput smollm2-135m --num-prompts 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    latency = kinds.add_parser(
        "latency",
        description="How long a batch of equal requests takes, one batch at a time.",
        epilog=_example("latency MODEL --batch-size 4"),
    )
    latency.add_argument("--batch-size", type=count, default=8, metavar="N", help="requests of a batch (default: 8)")
    latency.add_argument("--num-iters", type=count, default=10, metavar="N", help="batches that are measured (default: 10)")
    throughput = kinds.add_parser(
        "throughput", description="Many requests at once: tokens a second.", epilog=_example("throughput MODEL --num-prompts 64")
    )
    throughput.add_argument("--num-prompts", type=count, default=64, metavar="N", help="requests (default: 64)")
    for kind in (latency, throughput):
        kind.add_argument("name", nargs="?", metavar="MODEL", help="alias, hub id, folder or .gguf file")
        kind.add_argument("--input-len", type=count, default=128, metavar="N", help="random prompt tokens (default: 128)")
        kind.add_argument("--output-len", type=count, default=64, metavar="N", help="tokens to generate (default: 64)")
        add_config_flags(kind, ENGINE_GROUPS)
    speculate = kinds.add_parser(
        "speculate",
        description="Drafters against plain decoding, in turns: tokens a second, ratios with 95% intervals. Above 1 it pays.",
        epilog=_example('speculate MODEL --system ngram --system "ngram eagle:model=HEAD"'),
    )
    bench_speculate.add_arguments(speculate)
    serve = kinds.add_parser(
        "serve",
        description="Send requests to a server that speaks OpenAI's API, and time their streams.",
        epilog=_example("serve --base-url http://127.0.0.1:8000 --concurrency 8"),
    )
    serve.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: http://127.0.0.1:8000)")
    serve.add_argument("--model", metavar="NAME", help="model to ask for; by default the server's first")
    serve.add_argument("--api-key", metavar="KEY", help="key of the server [OPENAI_API_KEY]")
    serve.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="(default: completions)")
    serve.add_argument("--concurrency", type=count, default=8, metavar="N", help="most requests at once (default: 8)")
    serve.add_argument("--num-prompts", type=count, default=64, metavar="N", help="requests (default: 64)")
    serve.add_argument("--request-rate", type=_rate, metavar="X", help="requests a second, with random gaps; by default no gaps")
    serve.add_argument("--dataset", metavar="FILE", help="JSON lines with `prompt` or `turns`; by default random words")
    serve.add_argument("--input-len", type=count, default=100, metavar="N", help="random words a prompt (default: 100)")
    serve.add_argument("--max-tokens", type=count, default=64, metavar="N", help="tokens to generate (default: 64)")
    serve.add_argument("--ignore-eos", action="store_true", help="generate all of them, where the server knows ignore_eos")
    for kind in (latency, throughput, serve):
        kind.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts (default: 0)")
    for kind in (latency, throughput, speculate, serve):
        kind.add_argument("--json", dest="json_path", metavar="FILE", help="write the result there; - for stdout")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.kind == "speculate":
        return bench_speculate.run(args)
    measured: dict[str, Any] = {"latency": _latency, "throughput": _throughput, "serve": _serve}[args.kind](args)
    write_json(args.json_path, {"bench": args.kind, **measured, "machine": machine()})
    if args.json_path != "-":
        print(table(measured["result"]))
    return int(bool(measured["result"].get("num_failed")))


def run_batch(model: LocalModel, prompts: Sequence[Sequence[int]], output_len: int) -> list[Timeline]:
    """Answer prompts of token ids greedily, all handed over at once, each with exactly `output_len` tokens."""
    params = model.sampling_params({"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True})
    engine = model.engine
    timelines = {}
    for index, ids in enumerate(prompts):
        (request,) = model.frontend.prepare(f"bench-{index}", ids, params).requests
        timelines[request.request_id] = Timeline(time.perf_counter(), num_prompt_tokens=len(ids))
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise EngineError(f"a request must be answered, but got {output.error[0]}: {output.error[1]}")
            if output.token_ids:
                timeline = timelines[output.request_id]
                timeline.num_tokens += len(output.token_ids)
                timeline.arrivals_s.append(time.perf_counter())
    return list(timelines.values())


def _latency(args: argparse.Namespace) -> dict[str, Any]:
    config = config_from(args, model=args.name)
    with _warm(config, args, args.batch_size) as model:
        vocab_size = model.frontend.info.vocab_size
        timelines: list[Timeline] = []
        started = time.perf_counter()
        for iteration in range(args.num_iters):
            prompts = random_prompts(args.batch_size, args.input_len, vocab_size, args.seed + iteration)
            timelines += run_batch(model, prompts, args.output_len)
        return _local_result(config, args, summary(timelines, time.perf_counter() - started), batch_size=args.batch_size)


def _throughput(args: argparse.Namespace) -> dict[str, Any]:
    config = config_from(args, model=args.name)
    with _warm(config, args, args.num_prompts) as model:
        prompts = random_prompts(args.num_prompts, args.input_len, model.frontend.info.vocab_size, args.seed)
        started = time.perf_counter()
        timelines = run_batch(model, prompts, args.output_len)
        return _local_result(config, args, summary(timelines, time.perf_counter() - started), num_prompts=args.num_prompts)


def _warm(config: EngineConfig, args: argparse.Namespace, num_prompts: int) -> LocalModel:
    """The model, warmed up by one short batch."""
    from slipstream.cli.local import LocalModel

    model = LocalModel.load(config)
    vocab_size = model.frontend.info.vocab_size
    run_batch(model, random_prompts(min(num_prompts, 4), min(args.input_len, 32), vocab_size, args.seed + 10**6), 4)
    return model


def _local_result(config: EngineConfig, args: argparse.Namespace, result: dict[str, Any], **setup: int) -> dict[str, Any]:
    lengths = {"input_len": args.input_len, "output_len": args.output_len, "seed": args.seed}
    settings = config.model_dump(mode="json", exclude={"api_key"})
    return {"setup": {**setup, **lengths, "config": settings}, "result": result}


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    import asyncio
    import os

    from slipstream.cli.bench_http import Load, measure, random_words

    if args.dataset:
        prompts = read_prompts(args.dataset, args.num_prompts)
    else:
        prompts = random_words(args.num_prompts, args.input_len, args.seed)
    load = Load(
        base_url=args.base_url.rstrip("/").removesuffix("/v1"),
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY"),
        model=args.model,
        endpoint=args.endpoint,
        concurrency=args.concurrency,
        request_rate=args.request_rate,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
    )
    measured = asyncio.run(measure(load, prompts))
    for error in measured.errors[:3]:
        print(f"error: a request must be answered, but got {error}", file=sys.stderr)
    result = summary(measured.timelines, measured.wall_s) | {"num_failed": len(measured.errors)}
    setup = {"model": measured.model, "endpoint": load.endpoint, "concurrency": load.concurrency, "num_prompts": len(prompts)}
    return {"setup": {**setup, "max_tokens": load.max_tokens, "seed": load.seed}, "result": result}


def _example(text: str) -> str:
    return f"example:\n  slipstream bench {text}"


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, but got {text!r}")
    return rate
