"""Talk to a model. Ctrl-C stops a reply, /reset forgets the conversation, /exit or Ctrl-D leaves.

Where stdin is not a terminal, each of its lines is a message and only the replies go to stdout.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slipstream.cli.flags import (
    ENGINE_GROUPS,
    add_config_flags,
    add_model_argument,
    add_sampling_flags,
    config_from,
    sampling_fields,
)
from slipstream.errors import ConfigError, InvalidRequest, SlipstreamError

if TYPE_CHECKING:
    from slipstream.cli.local import LocalModel
    from slipstream.types import SamplingParams

_COMMAND = re.compile(r"/[a-z]+")
_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops a reply"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser)
    add_config_flags(parser, ENGINE_GROUPS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = config_from(args, model=args.name)
    fields = sampling_fields(args)
    from slipstream.cli.local import LocalModel

    with LocalModel.load(config) as model:
        if not model.can_chat:
            raise ConfigError(f"the model must have a chat template, but {config.model} has none", hint="slipstream run --raw")
        return Conversation(model, model.sampling_params(fields), args.system).run()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, model: LocalModel, params: SamplingParams, system: str | None) -> None:
        self._model = model
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def run(self) -> int:
        """Answer what is typed until it ends; returns the exit code, 1 where a piped message could not be answered."""
        interactive = sys.stdin.isatty()
        if interactive:
            print(_HELP, file=sys.stderr)
        failed = False
        for line in _lines(interactive):
            text = line.strip()
            if text == "/exit":
                break
            if text == "/reset":
                self.messages = list(self._start)
            elif _COMMAND.fullmatch(text):
                print(_HELP, file=sys.stderr)
            elif text:
                failed |= not self._answer(text)
        return int(failed and not interactive)

    def _answer(self, text: str) -> bool:
        """Add a message and the reply to it. A message that cannot be answered is taken back."""
        messages = [*self.messages, {"role": "user", "content": text}]
        reply: list[str] = []
        try:
            for piece in self._model.stream(self._model.chat_prompt(messages), self._params):
                reply.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            print(" [stopped]", file=sys.stderr)
        except SlipstreamError as error:
            from slipstream.cli.main import report

            report(error)
            if isinstance(error, InvalidRequest):
                print("hint: /reset forgets the conversation", file=sys.stderr)
            return False
        print()
        # What was said until Ctrl-C stays part of the conversation.
        self.messages = [*messages, {"role": "assistant", "content": "".join(reply)}]
        return True


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from sys.stdin
        return
    import contextlib

    with contextlib.suppress(ImportError):  # arrow keys and history, where the platform has them
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # at the prompt it clears the line, as in a shell
            print()
