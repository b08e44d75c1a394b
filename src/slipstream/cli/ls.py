"""List the models that have been fetched: those of the hub's cache and our own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime

from slipstream.cli.table import ago_text, columns, size_text

EXAMPLE = "slipstream ls --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from slipstream.weights.cache import cached_models

    models = cached_models()
    if args.json:
        rows = [
            {
                "name": model.name,
                "source": model.source,
                "path": str(model.path),
                "num_bytes": model.num_bytes,
                "last_used": datetime.fromtimestamp(model.last_used_s, UTC).isoformat(timespec="seconds"),
                "is_complete": model.is_complete,
            }
            for model in models
        ]
        print(json.dumps(rows, indent=2))
        return 0
    if not models:
        print("hint: nothing has been fetched yet; slipstream pull MODEL fetches", file=sys.stderr)
        return 0
    now = time.time()
    table = [["NAME", "SOURCE", "SIZE", "LAST USED"]]
    for model in models:
        used = ago_text(now - model.last_used_s)
        table.append(
            [model.name, model.source, size_text(model.num_bytes), used if model.is_complete else f"{used} (incomplete)"]
        )
    print(columns(table, right=(2,)))
    return 0
