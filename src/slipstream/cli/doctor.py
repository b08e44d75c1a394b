"""Look at this machine: what it has, what Slipstream will use of it and why, and what will not work.

Takes the flags of `slipstream serve`, and looks with those settings. Exit code 1 where something fails; a warning does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import TYPE_CHECKING

from slipstream.cli.flags import add_config_flags, add_model_argument, config_from
from slipstream.cli.table import columns
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.cli.checks import Check

EXAMPLE = "slipstream doctor smollm2-135m --port 9000"
WIDTH = 110  # of a check's text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 where nothing fails, else 1."""
    from slipstream.cli.checks import Check, host_checks
    from slipstream.cli.engine_checks import engine_checks
    from slipstream.config_sources import unknown_variables

    checks: list[Check] = []
    try:
        config = config_from(args, model=args.name)
        checks.append(Check("settings", "ok", "all settings are known and hold"))
    except ConfigError as error:  # what can be looked at without them is still worth knowing
        config = EngineConfig()
        checks.append(Check("settings", "fail", error.message, error.hint or "slipstream config show"))
    checks += [Check("settings", "warn", text, "rename it, or unset it") for text in unknown_variables()]
    checks += [*host_checks(config), *engine_checks(config)]
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [check.as_json() for check in checks]}, indent=2))
    else:
        print(_table(checks))
        _count(checks)
    return int(failed)


def _table(checks: list[Check]) -> str:
    rows: list[list[str]] = []
    for check in checks:
        lines = textwrap.wrap(check.text.replace("\n", "; "), WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += [f"hint: {check.hint}"] if check.hint else []
        rows += [[check.status if i == 0 else "", check.name if i == 0 else "", line] for i, line in enumerate(lines)]
    return columns(rows)


def _count(checks: list[Check]) -> None:
    counts = {status: sum(check.status == status for check in checks) for status in ("fail", "warn")}
    said = [f"{count} {status}" for status, count in counts.items() if count]
    print(", ".join(said) if said else "no problems", file=sys.stderr)
