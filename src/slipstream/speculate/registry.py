"""Finds a drafter by name: speculate/<name>.py with two functions. A new drafter is a new file and no edit.

    parse(options) -> its options, typed and checked       at once, before any model is loaded
    build(options, target) -> the drafter                  once the target is there
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import slipstream.speculate
from slipstream.attention.base import AttentionBackend
from slipstream.attention.reference import ReferenceBackend
from slipstream.errors import ConfigError, ModelError
from slipstream.models.base import CausalLM
from slipstream.speculate.accept import COUPLED, AcceptRule
from slipstream.speculate.base import Drafter
from slipstream.text.tokenizer import Tokenizer
from slipstream.weights.loaded import Numbers

_NOT_DRAFTERS = frozenset({"accept", "base", "choice", "curve", "registry", "sampled_rows", "verify", "width"})


@dataclass(frozen=True, slots=True)
class Target:
    """What a drafter is built against.

    Attributes:
        model: the target.
        page_size: tokens a page holds; a drafter's own KV lies in the target's pages.
        device: where the target is, and the drafter will be.
        attention: runs a drafter's own forward passes.
        tokenizer: the target's; None: not known.
        accept: how the drafter draws tokens from logits, and what is done with them.
        numbers: how models that drafters load hold and multiply their matrices; None: as plain ones of the target's dtype.
    """

    model: CausalLM
    page_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    attention: AttentionBackend = field(default_factory=ReferenceBackend)
    tokenizer: Tokenizer | None = None
    accept: AcceptRule = COUPLED
    numbers: Numbers | None = None

    @property
    def num_known_ids(self) -> int:
        """Ids that stand for a token; rows of the head behind them are padding. All rows where the tokenizer is not known."""
        head = self.model.vocab_size
        return head if self.tokenizer is None else min(head, self.tokenizer.vocab_size)


def drafter_names() -> tuple[str, ...]:
    """Values --speculate takes before the colon."""
    modules = pkgutil.iter_modules(slipstream.speculate.__path__)
    return tuple(sorted(m.name for m in modules if not m.ispkg and m.name not in _NOT_DRAFTERS))


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """`name:key=value,key=value` -> (name, options)."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"--speculate options must be key=value, but got {part!r}", hint="e.g. name:width=4")
        if key in options:
            raise ConfigError(f"--speculate options must be given once, but {spec!r} has {key} twice", hint="leave one out")
        options[key] = value
    return name.strip(), options


def check_spec(spec: str) -> None:
    """Raise `ConfigError` for a `--speculate` value whose name or options are wrong, as far as that goes without a model."""
    name, options = parse_spec(spec)
    _module(name).parse(options)


def build_drafter(spec: str, target: Target) -> tuple[str, Drafter]:
    """Build the drafter a `--speculate` value names; returns its name and the drafter."""
    name, options = parse_spec(spec)
    try:
        drafter: Drafter = _module(name).build(options, target)
    except ModelError as error:  # else it would read as if the target were meant
        raise ModelError(f"--speculate {spec}: {error.message}", hint=error.hint) from error
    return name, drafter


def build_drafters(specs: Sequence[str], target: Target) -> dict[str, Drafter]:
    """Build what several `--speculate` values name, by name; nothing named is plain decoding."""
    return dict(build_drafter(spec, target) for spec in specs or ("off",))


def _module(name: str) -> Any:
    names = drafter_names()
    if name not in names:
        near = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"did you mean {near[0]}?" if near else "off is plain decoding"
        raise ConfigError(f"--speculate must name one of {', '.join(names)}, but got {name!r}", hint=hint)
    module = importlib.import_module(f"slipstream.speculate.{name}")
    if missing := [part for part in ("parse", "build") if part not in vars(module)]:
        raise ConfigError(
            f"speculate/{name}.py must have the functions parse and build, but has no {' and no '.join(missing)}",
            hint="docs/adding-a-drafter.md says what they do; a file that is no drafter belongs into speculate/heads",
        )
    return module


def known_options(drafter: str, options: Mapping[str, str], *names: str) -> None:
    """Raise `ConfigError` for an option that the drafter does not have."""
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else None
            raise ConfigError(f"--speculate {drafter} must have options of {', '.join(names)}, but got {name!r}", hint=hint)


def integer_option(drafter: str, options: Mapping[str, str], name: str, default: int, most: int) -> int:
    """An option that is an integer from 1 to `most`. Raises `ConfigError`."""
    text = options.get(name, str(default))
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= value <= most:
        raise ConfigError(f"{name} of --speculate {drafter} must be an integer from 1 to {most}, but got {text!r}")
    return value
