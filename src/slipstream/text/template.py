"""Chat templates: Jinja in a sandbox, with what model authors rely on (the environment of the transformers library)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from slipstream.errors import InvalidRequest


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source.
        special_tokens: variables that hold special tokens, such as bos_token; undefined ones render as nothing.

    Raises `InvalidRequest` where the source does not compile: completions still work, so the model is served.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template must compile, but: {error}", hint="use completions with the prompt written out"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises `InvalidRequest` where the template refuses the messages or fails on them."""
        own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**self._special_tokens, **(variables or {}), **own})
        except _Refused as error:
            raise InvalidRequest(f"the messages must suit the model's chat template, but it says: {error}") from None
        except Exception as error:  # anything may go wrong in a program that came with a model
            raise InvalidRequest(
                f"the model's chat template must render the messages, but failed with {type(error).__name__}: {error}"
            ) from error


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
