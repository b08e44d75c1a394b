"""Look at the settings, or begin a file of them.

show    every setting, its value, and the flag, variable or file it comes from
init    write a TOML file with every setting, commented out at its default
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from slipstream.cli.flags import add_config_flags, given_settings, setting_values
from slipstream.cli.table import columns
from slipstream.config import GROUPS, EngineConfig, env_name, field_group
from slipstream.errors import ConfigError

EXAMPLE = "slipstream config init slipstream.toml"

_SECRETS = frozenset({"api_key"})
_MASK = "***"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    show = kinds.add_parser(
        "show",
        description="Every setting, its value and where it comes from.",
        epilog="example:\n  slipstream config show --config slipstream.toml",
    )
    show.add_argument("--json", action="store_true", help="print a JSON object")
    add_config_flags(show)
    init = kinds.add_parser(
        "init", description="Write a TOML file with every setting, commented out.", epilog=f"example:\n  {EXAMPLE}"
    )
    init.add_argument(
        "file", nargs="?", default="slipstream.toml", metavar="FILE", help="(default: slipstream.toml); - for stdout"
    )
    init.add_argument("--force", action="store_true", help="write over a file that is there")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return _show(args) if args.kind == "show" else _init(args.file, args.force)


def template() -> str:
    """The file that `init` writes."""
    lines = [
        "# Settings of Slipstream, for --config FILE or SLIPSTREAM_CONFIG. Flags and SLIPSTREAM_* variables come first.",
        "# Every line is commented out and shows the default. Those without one show what they take.",
    ]
    for group in GROUPS:
        lines += ["", f"# {group}"]
        for name, field in EngineConfig.model_fields.items():
            if field_group(name) == group:
                unset = field.default is None
                value = _kind(field.annotation) if unset else _toml(field.default)
                lines += ["", f"# {field.description}", f"#{name} = {value}"]
    return "\n".join(lines) + "\n"


def _show(args: argparse.Namespace) -> int:
    from slipstream.config_sources import load_with_origins, unknown_variables

    config, origins = load_with_origins(given_settings(args), args.config)
    values = config.model_dump(mode="json")
    for name in _SECRETS:
        values[name] = None if values[name] is None else _MASK
    if args.json:
        print(json.dumps({name: {"value": one, "from": origins.get(name, "default")} for name, one in values.items()}, indent=2))
    else:
        rows = [[name, "" if one is None else _toml(one), origins.get(name, "default")] for name, one in values.items()]
        print(columns([["SETTING", "VALUE", "FROM"], *rows]))
    for warning in unknown_variables():
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _init(file: str, force: bool) -> int:
    if file == "-":
        print(template(), end="")
        return 0
    try:
        with Path(file).open("w" if force else "x", encoding="utf-8") as out:
            out.write(template())
    except FileExistsError:
        raise ConfigError(f"the file must not be there yet, but {file} is", hint="--force writes over it") from None
    except OSError as error:
        raise ConfigError(f"FILE must be a file that can be written, but got {file!r}: {error.strerror}") from None
    print(file)
    print(f"hint: --config {file} or {env_name('config')} uses it", file=sys.stderr)
    return 0


def _kind(annotation: Any) -> str:
    """What a setting without a default takes, as TOML that is right once a value is put in its place."""
    return {"TEXT": '"TEXT"'}.get(setting_values(annotation), setting_values(annotation))


def _toml(value: Any) -> str:
    # JSON's spelling of text, numbers, booleans and lists of text is TOML's too.
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
