"""Finds a drafter by name: speculate/<name>.py with a `build` function. A new drafter is a new file and no edit."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

import slipstream.speculate
from slipstream.errors import ConfigError
from slipstream.models.base import CausalLM
from slipstream.speculate.base import Drafter

_NOT_DRAFTERS = frozenset({"base", "registry", "verify", "width"})


@dataclass(frozen=True, slots=True)
class Target:
    """What a drafter is built against: the target model and the pages its own KV would share."""

    model: CausalLM
    num_pages: int
    page_size: int


def drafter_names() -> tuple[str, ...]:
    """Values --speculate takes before the colon."""
    modules = pkgutil.iter_modules(slipstream.speculate.__path__)
    return tuple(sorted(m.name for m in modules if m.name not in _NOT_DRAFTERS))


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """`name:key=value,key=value` -> (name, options)."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--speculate options must be key=value, but got {part!r}", hint="e.g. name:width=4")
        options[key.strip()] = value.strip()
    return name.strip(), options


def build_drafter(spec: str, target: Target) -> tuple[str, Drafter]:
    """Build the drafter a `--speculate` value names; returns its name and the drafter."""
    name, options = parse_spec(spec)
    if name not in drafter_names():
        raise ConfigError(f"--speculate must name one of {', '.join(drafter_names())}, but got {name!r}")
    drafter: Drafter = importlib.import_module(f"slipstream.speculate.{name}").build(options, target)
    return name, drafter
