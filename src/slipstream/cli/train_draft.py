"""Make a draft head for a model, in the published EAGLE-3 layout: the model answers prompts, and a small head learns to foretell
the answers. `serve` then drafts with it.

Everything goes to the folder --out. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from slipstream.cli.flags import ENGINE_GROUPS, add_config_flags, config_from, number
from slipstream.cli.progress import progress
from slipstream.cli.table import duration_text
from slipstream.config import flag_name
from slipstream.terminal import deferred_stops
from slipstream.train.settings import TrainSettings

EXAMPLE = "slipstream train-draft smollm2-135m --prompts questions.jsonl --out draft"

REPORT_EVERY_S = 10.0  # on a terminal ten times a second

# TrainSettings' name, how to read it, what --help says.
FLAGS: tuple[tuple[str, type, str], ...] = (
    ("num_prompts", int, "use only so many of the prompts; by default all"),
    ("max_tokens", int, "most tokens of an answer"),
    ("temperature", float, "of the answers; 0 is greedy"),
    ("held_out", float, "share of the prompts that are not trained on, but measured on"),
    ("feature_dtype", str, "what the model's states are kept in, bfloat16 or float32"),
    ("draft_vocab_size", int, "most tokens the head can say"),
    ("unroll", int, "steps the head is trained to go on by itself, and is measured with"),
    ("epochs", int, "passes over the answers"),
    ("learning_rate", float, "the highest; it rises first and then falls to 0"),
    ("batch_tokens", int, "tokens of one step of the optimizer"),
    ("train_dtype", str, "what products are computed in: bfloat16, float32, or auto, bfloat16 where the device is fast in it"),
    ("seed", int, "of weights, order and sampled answers"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", metavar="MODEL", help="alias, hub id, folder or .gguf file")
    parser.add_argument(
        "--prompts", nargs="+", required=True, metavar="FILE", help="JSON lines or arrays with messages, turns, prompt, ..."
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the head, and of everything on the way to it")
    section = parser.add_argument_group("Training")
    for name, kind, text in FLAGS:
        default = TrainSettings.__dataclass_fields__[name].default
        known = "" if default is None else f" (default: {default})"
        metavar = {int: "N", float: "X", str: "TYPE"}[kind]
        section.add_argument(flag_name(name), dest=name, metavar=metavar, default=argparse.SUPPRESS, help=f"{text}{known}")
    add_config_flags(parser, ENGINE_GROUPS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    given = {name: number(flag_name(name), getattr(args, name), kind) for name, kind, _ in FLAGS if name in args}
    settings = TrainSettings(prompts=tuple(map(Path, args.prompts)), out=Path(args.out), **given)
    config = config_from(args, model=args.name)
    from slipstream.train.pipeline import Pipeline  # imports torch

    meter = Meter()
    pipeline = Pipeline(config, settings, meter)
    with deferred_stops() as stop:
        try:
            report = pipeline.run(stop)
        except KeyboardInterrupt:
            meter.end()
            print("hint: the same command goes on from there", file=sys.stderr)
            raise
        finally:
            meter.end()
    print(summary(report))
    head = settings.out / "head"
    print(f"slipstream serve {args.name} --speculate eagle:model={head},topk=1,steps={settings.unroll}")
    return 0


def summary(report: Mapping[str, Any]) -> str:
    """What a report says, for a terminal."""
    data, times = report["data"], report["seconds"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in data["finish_reasons"].items())
    last = report["epochs"][-1]
    rows = [
        ("answers", f"{data['num_answers']}, {data['num_answer_tokens']} tokens ({reasons})"),
        (
            "head",
            f"{report['num_parameters'] / 1e6:.1f} M weights, "
            f"{data['draft_vocab_size']} ids: {data['coverage']:.1%} of the answers",
        ),
        ("training", f"{len(report['epochs'])} epochs, {report['num_steps']} steps"),
        ("right, last epoch", "  ".join(f"{one:.2f}" for one in last["accuracy"]) + "  (by step, on what it was trained on)"),
        ("time", ", ".join(f"{stage} {duration_text(seconds)}" for stage, seconds in times.items())),
    ]
    held_out = report["held_out"]
    if held_out is None:
        rows.append(("held out", "nothing: not measured"))
    else:
        acceptance = "  ".join(f"{one:.2f}" for one in held_out["acceptance"])
        rows += [
            ("held out", f"{held_out['num_prompts']} prompts, {held_out['num_tokens']} tokens, {held_out['num_drafts']} drafts"),
            ("accept length", f"{held_out['accept_length']:.2f} tokens a pass of the model"),
            ("acceptance", f"{acceptance}  (by position, of the drafts that came so far)"),
        ]
    return "\n".join(f"{name:20}{text}" for name, text in rows)


class Meter:
    """How far it is, on stderr: a line that is overwritten on a terminal, else one now and then; a `train.progress.Reporter`."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._stage: str | None = None
        self._first = self._total = self._done = 0.0
        self._note = ""
        self._started = self._said = 0.0

    def line(self, text: str) -> None:
        """See `Reporter.line`."""
        print(f"\r\x1b[K{text}" if self._is_terminal else text, file=sys.stderr, flush=True)

    def loading(self) -> AbstractContextManager[Callable[[str, float], None]]:
        """See `Reporter.loading`."""
        return progress()

    def begin(self, stage: str, done: float, total: float) -> None:
        """See `Reporter.begin`."""
        self._stage, self._first, self._done, self._total, self._note = stage, done, done, total, ""
        self._started = self._said = time.perf_counter()
        self._say()

    def at(self, done: float, note: str = "") -> None:
        """See `Reporter.at`."""
        self._done, self._note = done, note
        if time.perf_counter() - self._said >= (0.1 if self._is_terminal else REPORT_EVERY_S):
            self._say()

    def end(self) -> None:
        """See `Reporter.end`."""
        if self._stage is not None:
            self._say()
            if self._is_terminal:
                print(file=sys.stderr)
            self._stage = None

    def text(self, seconds: float) -> str:
        """The line, `seconds` after the stage began."""
        parts = [f"{self._stage}: {self._done:.0f} of {self._total:.0f}"]
        if self._note:
            parts.append(self._note)
        left, done = self._total - self._done, self._done - self._first
        if left > 0 and done > 0:
            parts.append(f"{duration_text(seconds * left / done)} left")
        return ", ".join(parts)

    def _say(self) -> None:
        self._said = time.perf_counter()
        text = self.text(self._said - self._started)
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
