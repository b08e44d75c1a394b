"""`slipstream bench speculate`: does drafting pay, on this machine, with this model, at this many requests at once?

Every system (plain decoding is one of them, `off`) answers the same prompts in the same round; turns.py has the rounds.

    --json FILE   {"setup": ..., "machine": ..., "step_cost": {rows: ...}, "results": {set: {requests at once: cell}}}
                  written after each cell; --resume goes on with the cells that are missing
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import slipstream
from slipstream.cli.bench_prompts import passage, task
from slipstream.cli.flags import ENGINE_GROUPS, add_config_flags, config_from, count
from slipstream.cli.measure import machine, read_prompts, write_json
from slipstream.cli.progress import StatusLine, progress
from slipstream.cli.table import columns
from slipstream.config import EngineConfig, field_group
from slipstream.errors import ConfigError
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.cli.timed_engine import TimedEngine
    from slipstream.weights.loaded import LoadedModel

OFF = "off"
COPY, PLAIN = "copy", "plain"
RULES = ("coupled", "rejection")
STEP_ROWS = (1, 4, 8, 16)
TRUSTED_ROUNDS = 10
# What a system writes behind a prompt and its answer, at the very most: drafts that are not accepted.
SPARE_LEN = 128
# Settings that do not decide what is measured, or that stand in `setup` under a name of their own.
NOT_SETUP = frozenset({"model", "served_model_name", "dtype", "num_threads", "speculate", "accept", "max_num_seqs", "num_pages"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the kind."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="alias, hub id, folder or .gguf file")
    parser.add_argument(
        "--system",
        action="append",
        dest="systems",
        metavar="SPECS",
        help="drafters to measure together, as --speculate takes them, with spaces between several; may be repeated for several "
        "systems (default: what --speculate says, else ngram)",
    )
    parser.add_argument(
        "--dataset",
        action="append",
        dest="datasets",
        default=[],
        metavar="NAME=FILE",
        help="a set of prompts: JSON lines with `prompt` or `turns`, through the chat template if there is one; may be repeated",
    )
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="sets to measure (default: copy, plain and every --dataset)")
    parser.add_argument(
        "--concurrency", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N", help="(default: 1 2 4 8 16 32)"
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=12,
        metavar="N",
        help=f"turns of each system (default: 12; trust no less than {TRUSTED_ROUNDS})",
    )
    parser.add_argument("--input-len", type=count, default=192, metavar="N", help="tokens of a prompt of `copy` (default: 192)")
    parser.add_argument("--output-len", type=count, default=96, metavar="N", help="tokens of every answer (default: 96)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of every request (default: 0)")
    parser.add_argument(
        "--accept",
        nargs="+",
        dest="rules",
        choices=RULES,
        metavar="RULE",
        help=f"{' or '.join(RULES)}, or both in turns [SLIPSTREAM_ACCEPT]",
    )
    parser.add_argument(
        "--fixed-width",
        dest="adaptive_speculation",
        action="store_const",
        const=False,
        default=argparse.SUPPRESS,
        help="short for --no-adaptive-speculation",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the cells that the file of --json lacks")
    add_config_flags(parser, ENGINE_GROUPS, without=("accept", "enable_prefix_caching"))


def run(args: argparse.Namespace) -> int:
    """Measure; a table to stdout, progress to stderr, JSON after each cell."""
    _check_lengths(args)
    config = config_from(args, model=args.name)
    if config.max_num_seqs < max(args.concurrency):
        raise ConfigError(
            f"--concurrency must be at most --max-num-seqs ({config.max_num_seqs}), but got {max(args.concurrency)}",
            hint=f"--max-num-seqs {max(args.concurrency)}",
        )
    configs = system_configs(args.systems, args.rules, config)
    sets = _prompt_sets(args.datasets, args.sets, max(args.concurrency))
    before = _earlier(args)
    bench = _Bench(args, config, configs, sets, before)
    try:
        bench.measure()
    finally:
        bench.close()
    if args.json_path == "-":
        write_json("-", bench.result)
    else:
        print(speculate_table(bench.result))
    return 0


def system_configs(systems: Sequence[str] | None, rules: Sequence[str] | None, config: EngineConfig) -> dict[str, EngineConfig]:
    """The settings of each system, by its name: its drafters, and the accept rule where there are several. `off` comes first.

    Raises `ConfigError` for what no engine could be built from.
    """
    from slipstream.engine.compat import check_startup  # imports torch

    rules = rules or [config.accept]
    wanted = [tuple(text.split()) for text in systems] if systems is not None else [config.speculate or ("ngram",)]
    same = {**config.model_dump(), "enable_prefix_caching": False}  # every round computes its prompts anew
    found = {OFF: EngineConfig(**{**same, "speculate": (OFF,), "accept": rules[0]})}
    for specs, rule in itertools.product(wanted, rules):
        if not specs or OFF in specs:
            raise ConfigError(
                f"--system must name one drafter or more, but got {' '.join(specs)!r}", hint="plain decoding is always measured"
            )
        name = " ".join(specs) if len(rules) == 1 else f"{' '.join(specs)} {rule}"
        if name in found:
            raise ConfigError(f"--system must name every system once, but got {name!r} twice")
        found[name] = EngineConfig(**{**same, "speculate": specs, "accept": rule})
    for one in found.values():
        check_startup(one)
    return found


def speculate_table(result: Mapping[str, Any]) -> str:
    """The result for people: what a step costs, then a row for each system and number of requests at once."""
    steps = [f"{rows}: {one['step_ms']:.1f} ms ({one['ratio']:.2f})" for rows, one in result["step_cost"].items()]
    head = ["PROMPTS", "AT ONCE", "SYSTEM", "TOK/S", "RATIO TO OFF", "DRAFTED A TOKEN", "TOKENS A STEP", "STEP MS"]
    rows = [[*head, "ANSWERS THAT DIFFER"]]
    for kind, size, one in cells(result):
        for name, own in one["systems"].items():
            speed = [kind, size, name, f"{own['tokens_per_s']:.1f}"]
            if name == OFF:
                rows.append([*speed, "", "", "", f"{own['step_ms']:.1f}", ""])
                continue
            ratio, differ = one["speed"][name], f"{one['num_differing'][name]} of {one['num_answers']}"
            interval = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            drafts = [f"{own['drafted_per_token']:.2f}", f"{own['accept_length']:.2f}"]
            rows.append([*speed, interval, *drafts, f"{own['step_ms']:.1f}", differ])
    table = f"a step that verifies R rows of one request: {', '.join(steps)}\n\n{columns(rows, right=(1, 3, 5, 6, 7, 8))}"
    if (rounds := result["setup"]["rounds"]) < TRUSTED_ROUNDS:
        table += f"\n\nof {rounds} rounds: the intervals of fewer than {TRUSTED_ROUNDS} are rough"
    return table


def cells(result: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(set, requests at once, cell) of a result."""
    for kind, sizes in result["results"].items():
        for size, one in sizes.items():
            yield kind, size, one


class TimeLeft:
    """An upper bound of the time that rounds still take: a round of twice the requests takes at most twice as long."""

    def __init__(self) -> None:
        self._round_s: dict[int, float] = {}

    def took(self, concurrency: int, round_s: float) -> None:
        """A round of so many requests took so long."""
        self._round_s[concurrency] = round_s

    def text(self, rounds: Mapping[int, int]) -> str:
        """What is left, for so many rounds by number of requests; at least one round has been seen."""
        left_s = 0.0
        for concurrency, num_rounds in rounds.items():
            nearest = min(self._round_s, key=lambda seen: abs(seen - concurrency))
            left_s += num_rounds * self._round_s[nearest] * max(1.0, concurrency / nearest)
        return f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"


class _Bench:
    """A model, its systems and what has been measured of them."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: EngineConfig,
        configs: Mapping[str, EngineConfig],
        sets: Mapping[str, list[str]],
        before: Mapping[str, Any] | None,
    ) -> None:
        import torch

        from slipstream.cli.timed_engine import TimedEngine
        from slipstream.engine.build import forward_threads, load_configured

        with progress() as on_progress:
            loaded = load_configured(config, on_progress)
        self._args = args
        self._status = StatusLine()
        self._prompts = {name: _encoded(name, texts, loaded, config, args) for name, texts in sets.items()}
        self._loaded = loaded
        self._config = self._sized(configs[OFF])
        setup = {
            "slipstream": slipstream.__version__,
            "model": loaded.name,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "num_threads": forward_threads(loaded),
            "torch": torch.__version__,
            "systems": [name for name in configs if name != OFF],
            "accept": args.rules or [config.accept],
            "temperature": args.temperature,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "rounds": args.rounds,
            "datasets": {
                name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in named_files(args.datasets).items()
            },
            "config": configs[OFF].model_dump(mode="json", include=_deciding_settings()),
        }
        fresh = {"bench": "speculate", "setup": setup, "machine": machine(), "measured": time.strftime("%Y-%m-%d")}
        self.result: dict[str, Any] = {**fresh, "step_cost": {}, "results": {}}
        if before is not None:
            check_same_setup(before, fresh)
            self.result = dict(before)
        self._write()
        self._systems: dict[str, TimedEngine] = {}
        for name, one in configs.items():
            self._systems[name] = TimedEngine(name, loaded, self._sized(one), args.temperature)

    def measure(self) -> None:
        """Fill in what is missing."""
        from slipstream.cli.turns import compare, step_cost, turns

        args, left = self._args, TimeLeft()
        if not self.result["step_cost"]:
            self._status.show("what a step costs")
            prompt = _copies(0, args.input_len, self._loaded)
            self.result["step_cost"] = step_cost(self._loaded, self._config, prompt, STEP_ROWS)
            self._write()
        missing = [(name, size) for name in self._prompts for size in args.concurrency if not self._has(name, size)]
        for place, (name, size) in enumerate(missing):
            taken = []
            began_s = time.monotonic()
            for found in turns(self._systems, self._prompts[name][:size], args.output_len, args.rounds):
                taken.append(found)
                left.took(size, (time.monotonic() - began_s) / len(taken))
                rounds: dict[int, int] = {size: args.rounds - len(taken)}
                for _, later in missing[place + 1 :]:
                    rounds[later] = rounds.get(later, 0) + args.rounds
                self._status.show(
                    f"{name}, {size} at once: round {len(taken)} of {args.rounds}; {place} of {len(missing)} cells done, "
                    f"at most {left.text(rounds)} left"
                )
            cell = compare(taken, OFF)
            self.result["results"].setdefault(name, {})[str(size)] = cell
            self._write()
            self._status.keep(f"{name}, {size} at once: {_line(cell)}")

    def close(self) -> None:
        """Stop the engines."""
        for engine in self._systems.values():
            engine.close()

    def _has(self, name: str, size: int) -> bool:
        return str(size) in self.result["results"].get(name, {})

    def _sized(self, config: EngineConfig) -> EngineConfig:
        """With as many pages as this needs: several engines share the memory, and none may take what it can get."""
        if config.num_pages is not None or config.kv_cache_memory_bytes is not None:
            return config
        # The prompt that tells what a step costs is as long as --input-len whatever the others are.
        prompt_len = max([self._args.input_len, *(len(ids) for prompts in self._prompts.values() for ids in prompts)])
        num_pages = max(self._args.concurrency) * -(-(prompt_len + self._args.output_len + SPARE_LEN) // config.page_size)
        return EngineConfig(**{**config.model_dump(), "num_pages": num_pages})

    def _write(self) -> None:
        if self._args.json_path != "-":
            write_json(self._args.json_path, self.result)


def check_same_setup(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless a result that is gone on with was measured as it would be now."""
    for part in ("machine", "setup"):
        for name, value in now[part].items():
            if (earlier := before[part].get(name)) != value:
                raise ConfigError(
                    f"--resume must go on with the same setup, but {name} is {value!r} and the file has {earlier!r}",
                    hint="leave --resume out to begin anew, or name another file",
                )


def _line(cell: Mapping[str, Any]) -> str:
    parts = [f"off {cell['systems'][OFF]['tokens_per_s']:.1f} tok/s"]
    for name, ratio in cell["speed"].items():
        parts.append(f"{name} {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]")
    return "; ".join(parts)


def _check_lengths(args: argparse.Namespace) -> None:
    for flag, least, value in (("--input-len", 3, args.input_len), ("--output-len", 2, args.output_len)):
        if value < least:
            raise ConfigError(f"{flag} must be at least {least}, but got {value}")
    SamplingParams(temperature=args.temperature)


def _deciding_settings() -> set[str]:
    return {name for name in EngineConfig.model_fields if field_group(name) in ENGINE_GROUPS} - NOT_SETUP


def named_files(datasets: Sequence[str]) -> dict[str, str]:
    """NAME=FILE, several of them, as a mapping. Raises `ConfigError`."""
    files: dict[str, str] = {}
    for text in datasets:
        name, equals, path = text.partition("=")
        if not name or not equals or name in (COPY, PLAIN) or name in files:
            raise ConfigError(
                f"--dataset must be NAME=FILE with a name of its own, but got {text!r}",
                hint=f"{COPY} and {PLAIN} are there already",
            )
        files[name] = path
    return files


def _prompt_sets(datasets: Sequence[str], wanted: Sequence[str] | None, most: int) -> dict[str, list[str]]:
    """The texts of each set, before a model is loaded; `copy` is made of numbers, once there is a tokenizer to count with."""
    files = named_files(datasets)
    known = [COPY, PLAIN, *files]
    for name in wanted or ():
        if name not in known:
            raise ConfigError(f"--sets must be of {', '.join(known)}, but got {name!r}", hint="--dataset NAME=FILE adds a set")
    made = {COPY: list(map(str, range(most))), PLAIN: [task(number) for number in range(most)]}
    return {name: read_prompts(files[name], most) if name in files else made[name] for name in wanted or known}


def _encoded(
    name: str, texts: Sequence[str], loaded: LoadedModel, config: EngineConfig, args: argparse.Namespace
) -> list[list[int]]:
    """Token ids of a set's prompts, as a server would have them."""
    from slipstream.frontend.model_info import model_info
    from slipstream.frontend.prepare import Frontend

    params = SamplingParams(max_tokens=args.output_len)
    frontend = Frontend(model_info(loaded.text, config))
    prompts: list[str] | list[list[int]]
    if name == COPY:
        prompts = [_copies(int(number), args.input_len, loaded) for number in texts]
    elif loaded.chat_template is None:
        prompts = list(texts)
    else:
        prompts = [frontend.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    return [list(frontend.prepare(name, prompt, params).prompt_token_ids) for prompt in prompts]


def _copies(number: int, length: int, loaded: LoadedModel) -> list[int]:
    """Exactly `length` tokens: the beginning of a passage, again and again, cut in its third time.

    A cut between two of them would leave it to a near tie whether the model goes on or stops.
    """
    part = max(1, length * 3 // 7)
    ids = loaded.tokenizer.encode(passage(number, part), add_special_tokens=False)[:part]
    return (ids * length)[:length]


def _earlier(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the file of --json holds, where it is to be gone on with. None: there is no such file yet."""
    if not args.resume:
        return None
    if args.json_path in (None, "-"):
        raise ConfigError(f"--resume must be given with --json FILE, but got {args.json_path or 'none'}")
    try:
        found = json.loads(Path(args.json_path).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume must find JSON in {args.json_path}, but got: {error}") from None
    if not isinstance(found, dict) or found.get("bench") != "speculate":
        raise ConfigError(f"--resume must find a file of bench speculate, but {args.json_path} is another")
    return found
