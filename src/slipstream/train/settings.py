"""What `train-draft` can be told. Imports no torch: the command line reads it too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

TRAIN_DTYPES = ("auto", "bfloat16", "float32")
FEATURE_DTYPES = ("bfloat16", "float32")  # never float16: some states of some models are beyond its range
MIN_LAYERS = 4  # below, the layers 2, L/2 and L - 3 are not all there

_COUNTS = ("num_prompts", "max_tokens", "draft_vocab_size", "unroll", "epochs", "batch_tokens")
_LEAST = {"max_tokens": 2}  # of an answer of one token nothing is drafted
_MOST = {"unroll": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a head is made. Raises `ConfigError` naming the flag whose value cannot be used.

    Attributes:
        prompts: files of prompts, see `prompts.read_prompts`.
        out: folder of everything that is made.
        num_prompts: how many of the prompts are used, those with the lowest hash; None: all.
        max_tokens: most tokens of an answer.
        temperature: of the answers; 0 is greedy.
        held_out: share of the prompts that are never trained on; the head is measured on them. 0: no measuring.
        feature_dtype: what the target's states are kept in, one of `FEATURE_DTYPES`.
        draft_vocab_size: most tokens the head can say.
        unroll: steps of training-time test; also how long the drafts are that the head is measured with.
        epochs: passes over the answers.
        learning_rate: highest one.
        batch_tokens: tokens of a step of the optimizer.
        train_dtype: what products are computed in; weights, sums and moments are float32. auto: bfloat16 where the device has
            instructions for it.
        seed: of weights, order and sampled answers.
    """

    prompts: tuple[Path, ...]
    out: Path
    num_prompts: int | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    held_out: float = 0.1
    feature_dtype: str = "bfloat16"
    draft_vocab_size: int = 8192
    unroll: int = 3
    epochs: int = 4
    learning_rate: float = 1e-3
    batch_tokens: int = 1024
    train_dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts:
            raise _wrong("prompts", "name at least one file", "none")
        for name in _COUNTS:
            value, least = getattr(self, name), _LEAST.get(name, 1)
            if value is not None and value < least:
                raise _wrong(name, f"be an integer of at least {least}", value)
            if name in _MOST and value > _MOST[name]:
                raise _wrong(name, f"be at most {_MOST[name]}", value)
        if not 0 <= self.held_out <= 0.5:
            raise _wrong("held_out", "be a share from 0 to 0.5", self.held_out)
        if not 0 < self.learning_rate < 1:
            raise _wrong("learning_rate", "be a number above 0 and below 1", self.learning_rate)
        if not (self.temperature == 0 or 1e-5 <= self.temperature <= 100):
            raise _wrong("temperature", "be 0 or a number from 1e-05 to 100", self.temperature)
        if not 0 <= self.seed < 2**63:
            raise _wrong("seed", "be an integer from 0 to 2**63 - 1", self.seed)
        if self.feature_dtype not in FEATURE_DTYPES:
            raise _wrong("feature_dtype", f"be one of {', '.join(FEATURE_DTYPES)}", repr(self.feature_dtype))
        if self.train_dtype not in TRAIN_DTYPES:
            raise _wrong("train_dtype", f"be one of {', '.join(TRAIN_DTYPES)}", repr(self.train_dtype))
        if set(",=") & set(str(self.out)):
            raise _wrong("out", "have no comma and no = in its name", repr(str(self.out)), "--speculate could not name the head")

    def of_data(self) -> dict[str, Any]:
        """Settings that answers and features depend on; the prompts themselves are compared apart."""
        names = ("num_prompts", "max_tokens", "temperature", "held_out", "feature_dtype")
        return {name: getattr(self, name) for name in names} | ({"seed": self.seed} if self.temperature else {})

    def of_training(self) -> dict[str, Any]:
        """Settings that the head depends on besides."""
        names = ("draft_vocab_size", "unroll", "epochs", "learning_rate", "batch_tokens", "train_dtype", "seed")
        return {name: getattr(self, name) for name in names}


def _wrong(name: str, must: str, given: object, hint: str | None = None) -> ConfigError:
    given = given if not isinstance(given, float) or math.isfinite(given) else str(given)
    return ConfigError(f"--{name.replace('_', '-')} must {must}, but got {given}", hint=hint)
