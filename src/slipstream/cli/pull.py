"""Fetch a model into the cache without loading it, check its checksums, and print where it lies.

A download that was cut goes on with what is missing when it is asked for again.
"""

from __future__ import annotations

import argparse

from slipstream.cli.flags import add_model_argument, config_from
from slipstream.cli.progress import progress

EXAMPLE = "slipstream pull smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings [SLIPSTREAM_CONFIG]")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from slipstream.weights.source import resolve

    config = config_from(args, model=args.name)
    with progress() as on_progress:
        source = resolve(config.model, on_progress, verify=True)
    print(source.path)
    return 0
