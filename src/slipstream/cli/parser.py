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
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(rest[0].partition("=")[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help"
            raise ConfigError(f"an argument must be one that {self.prog} knows, but got {rest[0]!r}", hint=hint)
        return parsed
