"""Talk to a model, in this process or behind --url.

Ctrl-C stops a reply, /help lists the commands, /exit or Ctrl-D leaves. Where stdin is not a terminal, each of its lines is a
message and only the replies go to stdout.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from slipstream.cli.flags import (
    ENGINE_GROUPS,
    add_config_flags,
    add_model_argument,
    add_sampling_flags,
    checked,
    config_from,
    known_sampling,
    sampling_field,
    sampling_fields,
)
from slipstream.cli.tally import Tally
from slipstream.config import EngineConfig, flag_name
from slipstream.errors import ConfigError, InvalidRequest, SlipstreamError

EXAMPLE = 'slipstream chat smollm2-135m --system "Be brief." --temperature 0.7'

_WORD = re.compile(r"/[a-z]+")
_COMMANDS = {
    "/reset": "forget the conversation",
    "/system": "TEXT: change the system message; without TEXT there is none",
    "/set": "NAME VALUE: change a sampling parameter; without VALUE back to the default; alone: show what is set",
    "/stats": "what the last reply took",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does; Ctrl-C stops a reply",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--url", metavar="URL", help="talk to this server, which speaks OpenAI's API, instead of loading a model")
    parser.add_argument("--api-key", dest="bearer", metavar="KEY", help="key of that server [OPENAI_API_KEY]")
    add_sampling_flags(parser)
    add_config_flags(parser, ENGINE_GROUPS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    fields = sampling_fields(args)
    if args.url is not None:
        return _run_remote(args, fields)
    if args.bearer is not None:
        raise ConfigError("--api-key must be given with --url, but got it alone", hint="a model in this process asks for no key")
    config = config_from(args, model=args.name)
    from slipstream.cli.local import LocalModel

    with LocalModel.load(config) as model:
        if not model.can_chat:
            raise ConfigError(f"the model must have a chat template, but {config.model} has none", hint="slipstream run --raw")
        return Conversation(model, fields, args.system).run()


def _run_remote(args: argparse.Namespace, fields: Mapping[str, Any]) -> int:
    settings = [name for name in EngineConfig.model_fields if name != "model" and name in vars(args)]
    if settings or args.config:
        flag = flag_name(settings[0]) if settings else "--config"
        raise ConfigError(f"{flag} must not be given with --url, but got both", hint="the server has settings of its own")
    from slipstream.cli.remote import RemoteModel

    key = args.bearer or os.environ.get("OPENAI_API_KEY")
    with RemoteModel(args.url, key, args.name or getattr(args, "model", None)) as model:
        print(f"talking to {model.name}", file=sys.stderr)
        return Conversation(model, fields, args.system).run()


class Partner(Protocol):
    """Who answers: `LocalModel` or `RemoteModel`."""

    def reply(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any], tally: Tally) -> Iterator[str]:
        """The reply to a conversation, as it comes. `fields` are sampling parameters that were set, `tally` is filled in."""
        ...


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, partner: Partner, fields: Mapping[str, Any], system: str | None) -> None:
        self._partner = partner
        self._fields = dict(fields)
        self._system = system
        self._tally: Tally | None = None
        self.messages: list[dict[str, str]] = []

    def run(self) -> int:
        """Answer what is typed until it ends; returns the exit code, 1 where a piped line could not be answered or obeyed."""
        interactive = sys.stdin.isatty()
        if interactive:
            print("/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves", file=sys.stderr)
        failed = False
        for line in _lines(interactive):
            text = line.strip()
            word, _, rest = text.partition(" ")
            if text == "/exit":
                break
            if self._is_command(word, rest):
                failed |= not self._obey(word, rest.strip())
            elif text:
                failed |= not self._answer(text)
        return int(failed and not interactive)

    @staticmethod
    def _is_command(word: str, rest: str) -> bool:
        """A word that is nearly a command counts as a typo; `/etc is what?` is a message."""
        if word in _COMMANDS:
            return True
        return bool(_WORD.fullmatch(word)) and (not rest or bool(difflib.get_close_matches(word, _COMMANDS, n=1, cutoff=0.75)))

    def _obey(self, word: str, rest: str) -> bool:
        """Run a command; false where it is wrong."""
        try:
            match word:
                case "/reset" if not rest:
                    self.messages = []
                case "/system":
                    self._system = rest or None
                case "/set":
                    self._set(*rest.split(maxsplit=1))
                case "/stats" if not rest:
                    print(self._tally.line() if self._tally else "no reply yet", file=sys.stderr)
                case "/help" if not rest:
                    print("\n".join(f"{name:8} {text}" for name, text in _COMMANDS.items()), file=sys.stderr)
                case _:
                    near = difflib.get_close_matches(word, _COMMANDS, n=1)
                    text = f"{word} {rest}".strip()
                    hint = f"did you mean {near[0]}?" if near and near[0] != word else "/help lists them"
                    raise ConfigError(f"a command must be one of {', '.join(_COMMANDS)}, but got {text!r}", hint=hint)
        except SlipstreamError as error:
            _report(error)
            return False
        return True

    def _set(self, name: str = "", value: str = "") -> None:
        fields = dict(self._fields)
        if value:
            fields[name] = sampling_field(name, value)
        elif name in fields:
            del fields[name]
        elif name:
            known_sampling(name)
        else:
            print("\n".join(f"{key} {one}" for key, one in fields.items()) or "nothing is set", file=sys.stderr)
        self._fields = checked(fields)

    def _answer(self, text: str) -> bool:
        """Add a message and the reply to it. A message that cannot be answered is taken back."""
        messages = [*self.messages, {"role": "user", "content": text}]
        start = [{"role": "system", "content": self._system}] if self._system else []
        tally = Tally()
        reply: list[str] = []
        try:
            for piece in self._partner.reply([*start, *messages], self._fields, tally):
                reply.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            print(" [stopped]", file=sys.stderr)
        except SlipstreamError as error:
            if reply:
                print()
            _report(error)
            if isinstance(error, InvalidRequest):
                print("hint: /reset forgets the conversation", file=sys.stderr)
            return False
        print()
        # What was said until Ctrl-C stays part of the conversation.
        self.messages = [*messages, {"role": "assistant", "content": "".join(reply)}]
        self._tally = tally
        return True


def _report(error: SlipstreamError) -> None:
    from slipstream.cli.main import report

    report(error)


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from sys.stdin
        return
    import contextlib

    with contextlib.suppress(ImportError):  # arrow keys and history, where the platform has them
        import readline  # noqa: F401
    prompt = "> "
    if not sys.stdout.isatty():  # where replies go to a file, input() would write its prompt there too
        prompt = ""
    while True:
        try:
            if not prompt:
                print("> ", end="", file=sys.stderr, flush=True)
            yield input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # at the prompt it clears the line, as in a shell
            print()
