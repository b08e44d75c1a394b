"""argparse, speaking our grammar: `error: X must Y, but got Z`, `hint: ...`, exit code 2."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

from slipstream.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose errors are `ConfigError`."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong: `argument --port: must ...` -> `--port must ...`."""
        message = re.sub(r"^argument ([^:]+):", r"\1", message)
        raise ConfigError(message, hint=f"{self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; an unknown flag is answered with the nearest known one."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            chosen, others = self._kinds(parsed)
            hint = _hint(rest[0].partition("=")[0], chosen, others)
            raise ConfigError(f"an argument must be one that {chosen.prog} knows, but got {rest[0]!r}", hint=hint)
        return parsed

    def _kinds(self, parsed: argparse.Namespace) -> tuple[argparse.ArgumentParser, list[argparse.ArgumentParser]]:
        """The parser whose flags count (`bench latency`), and its siblings."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices[getattr(parsed, action.dest)]
                return chosen, [parser for parser in action.choices.values() if parser is not chosen]
        return self, []


def _hint(flag: str, chosen: argparse.ArgumentParser, others: list[argparse.ArgumentParser]) -> str:
    owners = [parser.prog for parser in others if flag in parser._option_string_actions]
    if owners:
        return f"{flag} belongs to {' and '.join(owners)}"
    near = difflib.get_close_matches(flag, chosen._option_string_actions, n=1)
    return f"did you mean {near[0]}?" if near else f"{chosen.prog} --help"
