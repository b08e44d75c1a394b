"""Command-line flags. Those of settings are made from the fields of `EngineConfig`: none can be forgotten, or differ.

Values stay text here: `EngineConfig` and `SamplingParams` check them, with one message whatever way they came in.
"""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Container, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from slipstream.config import GROUPS, EngineConfig, env_name, field_group, flag_name
from slipstream.errors import ConfigError
from slipstream.types import SamplingParams

ENGINE_GROUPS = tuple(group for group in GROUPS if group not in ("Server", "Logging"))

# Sampling flags: SamplingParams' name, how to read it, what --help says.
SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "most tokens of an answer"),
    ("temperature", float, "0 is greedy"),
    ("top_k", int, "keep the k best tokens; 0 keeps all"),
    ("top_p", float, "keep the best tokens up to this probability"),
    ("min_p", float, "drop tokens less likely than this share of the best one"),
    ("repetition_penalty", float, "over prompt and answer; 1 is off"),
    ("presence_penalty", float, "over the answer; 0 is off"),
    ("frequency_penalty", float, "over the answer; 0 is off"),
    ("seed", int, "the same seed gives the same answer"),
    ("min_tokens", int, "fewest tokens of an answer"),
    ("ignore_eos", bool, "go on behind the model's own end"),
)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add an optional MODEL; it arrives as `name`, apart from --model."""
    text = "alias, hub id, folder or .gguf file; by default the configured one"
    parser.add_argument("name", nargs="?", metavar="MODEL", help=text)


def add_config_flags(
    parser: argparse.ArgumentParser, groups: Iterable[str] = GROUPS, without: Container[str] = ()
) -> None:
    """Add --config and a flag for each setting of these groups; only flags that are given appear among the parsed arguments.

    `without`: settings that the command sets itself.
    """
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings, e.g. `max_num_seqs = 8` [SLIPSTREAM_CONFIG]")
    for group in groups:
        section = parser.add_argument_group(group)
        for name, field in EngineConfig.model_fields.items():
            if field_group(name) == group and name not in without:
                options = _flag(name, field.annotation, field.default, field.description)
                section.add_argument(flag_name(name), dest=name, **options)


def count(text: str) -> int:
    """A flag's value that counts something: at least 1. Raises `argparse.ArgumentTypeError`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, but got {text!r}")
    return int(text)


def config_from(args: argparse.Namespace, **given: Any) -> EngineConfig:
    """The configuration that flags, variables and file make together; `given` counts as flags where it is not None."""
    from slipstream.config_sources import load_config

    return load_config(given_settings(args, **given), args.config)


def given_settings(args: argparse.Namespace, **given: Any) -> dict[str, Any]:
    """The settings that flags gave; `given` counts as flags where it is not None."""
    flags = {name: value for name, value in vars(args).items() if name in EngineConfig.model_fields}
    return flags | {name: value for name, value in given.items() if value is not None}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each sampling parameter that makes sense for one answer in a terminal."""
    section = parser.add_argument_group("Sampling", "defaults: the model's own, else those of SamplingParams")
    for name, kind, text in SAMPLING_FLAGS:
        if kind is bool:
            section.add_argument(flag_name(name), dest=name, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            metavar = "N" if kind is int else "X"
            section.add_argument(flag_name(name), dest=name, metavar=metavar, default=argparse.SUPPRESS, help=text)
    section.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="text that ends the answer; may be repeated"
    )


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by SamplingParams' names, checked as far as that goes without a model.

    Raises `ConfigError` for what is no number and `InvalidParameter` for one that cannot hold.
    """
    given = vars(args)
    fields = {name: number(flag_name(name), given[name], kind) for name, kind, _ in SAMPLING_FLAGS if name in given}
    return checked(fields | ({"stop": given["stop"]} if "stop" in given else {}))


def sampling_field(name: str, text: str) -> Any:
    """The value of one sampling parameter, typed as `text`. Raises `ConfigError`."""
    kind = known_sampling(name)
    if kind is list:
        return [text]
    if kind is bool:
        if text not in ("on", "off"):
            raise ConfigError(f"{name} must be on or off, but got {text!r}")
        return text == "on"
    return number(name, text, kind)


def known_sampling(name: str) -> type:
    """What a sampling parameter takes: int, float, bool or list. Raises `ConfigError` for a name that is none."""
    kinds: dict[str, type] = {known: kind for known, kind, _ in SAMPLING_FLAGS} | {"stop": list}
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1)
        hint = f"did you mean {near[0]}?" if near else None
        raise ConfigError(f"a sampling parameter must be one of {', '.join(kinds)}, but got {name!r}", hint=hint)
    return kinds[name]


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields as they are, if `SamplingParams` takes them. Before a model is loaded: a typo should not cost a minute."""
    SamplingParams.from_json_fields(fields, {"max_tokens": None})
    return dict(fields)


def number(name: str, value: Any, kind: type) -> Any:
    """`value` as an int or float, a bool as it is. Raises `ConfigError` naming the flag."""
    if kind is bool:
        return value
    try:
        return kind(value)
    except ValueError:
        noun = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name} must be {noun}, but got {value!r}") from None


def _flag(name: str, annotation: Any, default: Any, description: str | None) -> dict[str, Any]:
    if isinstance(default, bool):
        default = "on" if default else "off"
    known = "" if default in (None, ()) else f" (default: {default})"
    text = f"{description}{known} [{env_name(name)}]"
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    kind = _inner(annotation)
    if kind is bool:
        return {**options, "action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return {**options, "action": "append", "metavar": "SPEC"}
    return {**options, "metavar": setting_values(kind)}


def setting_values(annotation: Any) -> str:
    """What a setting takes, in a word: `auto|cpu|cuda`, N, X, TEXT or on|off."""
    kind = _inner(annotation)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "SPEC, repeated"
    return {int: "N", float: "X", bool: "on|off"}.get(kind, "TEXT")


def _inner(annotation: Any) -> Any:
    """`Annotated[int, ...] | None` -> int."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
