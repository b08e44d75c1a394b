"""What the measuring scripts have in common: flags whose help keeps its lines, and errors that are said, not traced."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from slipstream.cli.main import report
from slipstream.errors import SlipstreamError


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m bench.<module>`."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m bench.{module}", description=description, formatter_class=formatter)


def run(main: Callable[[], object]) -> None:
    """Run a script; an error of ours ends it with exit code 2, what must hold, and a hint."""
    try:
        main()
    except SlipstreamError as error:
        report(error)
        sys.exit(2)
