"""Answer one prompt: the text goes to stdout as it comes. Or answer a file of requests in OpenAI's batch format.

A batch writes its answers to --out as they finish. What is there already is not asked again: the same command goes on where it
was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.cli.flags import ENGINE_GROUPS, add_config_flags, add_sampling_flags, config_from, sampling_fields
from slipstream.config import flag_name
from slipstream.errors import ConfigError

EXAMPLE = 'slipstream run smollm2-135m "Name three rivers." --temperature 0'

_HOW = 'slipstream run MODEL "prompt", or pipe it in'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", metavar="MODEL", help="alias, hub id, folder or .gguf file")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; by default what comes in on stdin")
    parser.add_argument("--batch", metavar="FILE", help="answer the requests of this file instead, one JSON object a line")
    parser.add_argument("--out", metavar="FILE", help="where a batch's answers go, one JSON object a line")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the model's chat template")
    add_sampling_flags(parser)
    add_config_flags(parser, ENGINE_GROUPS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = config_from(args, model=args.name)
    fields = sampling_fields(args)
    if args.batch is not None:
        _only_batch(args, fields)
        from slipstream.cli.batch import run_batch

        return run_batch(config, Path(args.batch), Path(args.out))
    if args.out is not None:
        raise ConfigError("--batch must be given with --out, but got none", hint="the answer to one prompt goes to stdout")
    prompt = _prompt(args.prompt)
    from slipstream.cli.local import LocalModel

    with LocalModel.load(config) as model:
        params = model.sampling_params(fields)
        if not args.raw and (model.can_chat or args.system):
            messages = [{"role": "system", "content": args.system}] if args.system else []
            prompt = model.chat_prompt([*messages, {"role": "user", "content": prompt}])
        text = "\n"
        for text in filter(None, model.stream(prompt, params)):
            sys.stdout.write(text)
            sys.stdout.flush()
        if not text.endswith("\n"):
            print()
    return 0


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise ConfigError("a prompt must be given, but got none", hint=_HOW)
    prompt = sys.stdin.read() if given is None else given
    if not prompt.strip():
        raise ConfigError(f"a prompt must hold text, but got {prompt!r}", hint=_HOW)
    return prompt


def _only_batch(args: argparse.Namespace, fields: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for what only makes sense for one prompt."""
    given = {"PROMPT": args.prompt, "--system": args.system, "--raw": args.raw or None}
    given |= {flag_name(name): value for name, value in fields.items()}
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(f"{flag} must not be given with --batch, but got both", hint="each request says it in its body")
    if args.out is None:
        raise ConfigError(
            "--out must be given with --batch, but got none", hint="slipstream run MODEL --batch in.jsonl --out out.jsonl"
        )
