"""Remove a fetched model from the cache. Only what `slipstream ls` lists can be removed."""

from __future__ import annotations

import argparse
import sys

from slipstream.cli.table import size_text
from slipstream.errors import ConfigError

EXAMPLE = "slipstream rm smollm2-135m --yes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", metavar="MODEL", help="a name that slipstream ls lists")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 removed, 1 kept."""
    from slipstream.weights.cache import find_cached, remove

    model = find_cached(args.name)
    size = size_text(model.num_bytes)
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                "removing a model must be confirmed, but stdin is no terminal", hint=f"slipstream rm {args.name} --yes"
            )
        print(f"remove {model.name} ({model.path}), which frees {size}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("kept", file=sys.stderr)
            return 1
    remove(model)
    print(f"removed {model.name}, which freed {size}", file=sys.stderr)
    return 0
