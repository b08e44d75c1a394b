"""Answer one prompt: the text goes to stdout as it comes."""

from __future__ import annotations

import argparse
import sys

from slipstream.cli.flags import ENGINE_GROUPS, add_config_flags, add_sampling_flags, config_from, sampling_fields
from slipstream.errors import ConfigError

EXAMPLE = 'slipstream run smollm2-135m "Name three rivers." --temperature 0'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", metavar="MODEL", help="alias, hub id, folder or .gguf file")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; by default what comes in on stdin")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the model's chat template")
    add_sampling_flags(parser)
    add_config_flags(parser, ENGINE_GROUPS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = config_from(args, model=args.name)
    fields = sampling_fields(args)
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
        raise ConfigError("a prompt must be given, but got none", hint='slipstream run MODEL "prompt", or pipe it in')
    prompt = sys.stdin.read() if given is None else given
    if not prompt.strip():
        raise ConfigError(f"a prompt must hold text, but got {prompt!r}")
    return prompt
