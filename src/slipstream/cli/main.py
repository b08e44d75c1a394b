"""`slipstream COMMAND ...`. A command's module is imported when it is asked for, torch only when a command needs it.

Exit codes: 0 done, 1 failed while running, 2 a wrong setting, request or command line, 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import slipstream
from slipstream.cli.parser import Parser
from slipstream.errors import ConfigError, InvalidRequest, SlipstreamError

# Each is a module slipstream.cli.<name>, - as _, with a docstring and an EXAMPLE for --help, `add_arguments(parser)` and
# `run(args) -> exit code`.
COMMANDS = {
    "serve": "serve a model to OpenAI clients",
    "run": "answer one prompt, or a file of requests",
    "chat": "talk to a model in the terminal",
    "bench": "measure latency, throughput, and whether drafting pays",
    "train-draft": "make a draft head for a model",
    "pull": "fetch a model without loading it",
    "ls": "list fetched models",
    "show": "describe a model without loading it",
    "rm": "remove a fetched model",
    "config": "show the settings, or begin a file of them",
    "doctor": "look at this machine and say what will be used",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. `argv` is without the program's name; None: sys.argv."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except SlipstreamError as error:
        report(error)
        return 2 if isinstance(error, (ConfigError, InvalidRequest)) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def report(error: SlipstreamError) -> None:
    """Print an error as `error: ...` lines and a `hint: ...` line on stderr."""
    for line in error.message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        name = argv[0]
        module = importlib.import_module(f"slipstream.cli.{name.replace('-', '_')}")
        parser = Parser(prog=f"slipstream {name}", description=module.__doc__, epilog=f"example:\n  {module.EXAMPLE}")
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(argv[1:])))
    parser = Parser(prog="slipstream", description="Serves language models.", epilog=_command_list())
    parser.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below; `slipstream COMMAND --help` lists its flags")
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    command = parser.parse_known_args(argv)[0].command
    raise ConfigError(f"a command must be one of {', '.join(COMMANDS)}, but got {command!r}", hint="slipstream --help")


def _command_list() -> str:
    return "commands:\n" + "\n".join(f"  {name:13}{summary}" for name, summary in COMMANDS.items())


if __name__ == "__main__":
    sys.exit(main())
