"""argparse, speaking our grammar: `error: X must Y, but got Z`, `hint: ...`, exit code 2."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from typing import Any, NoReturn

from slipstream.errors import ConfigError

MOST_FLAGS_IN_USAGE = 8

# What argparse says -> what we say.
_OUR_GRAMMAR = (
    (r"the following arguments are required: (.*)", r"\1 must be given, but got none"),
    (r"argument ([^:]+): expected one argument", r"\1 must have a value, but got none"),
    (r"argument ([^:]+): invalid choice: (.+) \(choose from .*\)", r"\1 must be one of {choices}, but got \2"),
    (r"argument ([^:]+):(.*)", r"\1\2"),
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose errors are `ConfigError` and whose flags may stand anywhere."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(description=description, allow_abbrev=False, **options)
        self._is_mixing = False

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong: `argument --port: must ...` -> `--port must ...`."""
        ours = next((found.expand(to) for theirs, to in _OUR_GRAMMAR if (found := re.fullmatch(theirs, message, re.S))), message)
        hint = f"{self.prog} --help"
        name = ours.partition(" ")[0]
        for action in self._actions:
            if action.choices and name in (*action.option_strings, action.metavar):
                choices = ", ".join(map(str, action.choices))
                hint = hint if "{choices}" in ours else f"{name} is one of {choices}; {hint}"
                ours = ours.replace("{choices}", choices, 1)
        raise ConfigError(ours, hint=hint)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but `MODEL --seed 1 PROMPT` is understood like `MODEL PROMPT --seed 1`."""
        if self._is_mixing or any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            return super().parse_known_args(args, namespace)
        self._is_mixing = True  # argparse's way of doing it comes back here
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_mixing = False

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


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs and leaves tables as they are; many flags are one word in the usage line, they are listed below it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(one if "  " in one else textwrap.fill(one, width) for one in paragraphs)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        actions = list(actions)
        if usage is None and sum(bool(action.option_strings) for action in actions) > MOST_FLAGS_IN_USAGE:
            actions = [action for action in actions if not action.option_strings]
            text = super()._format_usage(usage, actions, [], prefix)
            return text.replace(self._prog, f"{self._prog} [FLAGS]", 1)
        return super()._format_usage(usage, actions, groups, prefix)
