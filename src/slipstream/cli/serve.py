"""Serve a model to OpenAI clients.

Settings come from flags, then SLIPSTREAM_* variables, then --config FILE, then defaults. docs/configuration.md lists them all.
"""

from __future__ import annotations

import argparse
import sys

from slipstream.cli.flags import add_config_flags, add_model_argument, config_from

EXAMPLE = "slipstream serve smollm2-135m --port 9000 --max-num-seqs 16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command: until SIGTERM or Ctrl-C."""
    config = config_from(args, model=args.name)
    from slipstream.config_sources import unknown_variables

    for warning in unknown_variables():
        print(f"warning: {warning}", file=sys.stderr)
    from slipstream.server.app import run_server

    return run_server(config)
