"""The engine with `--attention-backend cpu`: the same tokens on every path, and refusals where it cannot serve a model."""

from __future__ import annotations

from functools import cache

import pytest

from slipstream.errors import ConfigError
from slipstream.models.base import CausalLM
from slipstream.testing.tiny import tiny_checkpoint, tiny_model
from slipstream.types import SamplingParams
from slipstream.weights import load
from tests.cpu_kernels import needed
from tests.engine.harness import Answer, Job, assert_equal, make_engine, reference, run
from tests.engine.test_equality import DRAFTERS, params, prompt

FAMILY = "qwen3"  # the one whose heads are wide enough

# The heads of our EAGLE tests are too narrow for the kernels.
NAMES = [name for name in DRAFTERS if not name.startswith("eagle")]
JOBS = [
    Job(prompt(1, 5), params(20)),
    Job(prompt(2, 70), params(20, temperature=0.8, top_p=0.9), seed=5),
    Job(prompt(3, 33), params(12, frequency_penalty=1.0)),
    Job(prompt(4, 130), SamplingParams(temperature=1.0, max_tokens=30), seed=9),
]


@pytest.fixture(autouse=True)
def there() -> None:
    needed()


@cache
def model(dtype: str) -> CausalLM:
    return load(str(tiny_checkpoint(FAMILY)), dtype=dtype).model


@cache
def wanted(dtype: str) -> list[Answer]:
    return reference(model(dtype), JOBS, attention_backend="cpu")


def test_the_tokens_of_the_reference_backend() -> None:
    """float32 against float64: logits of this model differ by whole units."""
    assert_equal(wanted("float32"), reference(tiny_model(FAMILY), JOBS), "backends")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lag, page_size", [(0, 16), (1, 1)])
def test_the_same_tokens_on_every_path(name: str, lag: int, page_size: int) -> None:
    drafters = {name: DRAFTERS[name]}
    got = run(model("float32"), JOBS, lag=lag, page_size=page_size, chunk=32, drafters=drafters, attention_backend="cpu")
    assert_equal(got, wanted("float32"), (name, lag, page_size))


def test_a_float64_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="KV of float32, bfloat16 or int8, but the model's is float64") as caught:
        make_engine(tiny_model(FAMILY), attention_backend="cpu")
    assert caught.value.hint


def test_heads_that_are_too_narrow_are_refused() -> None:
    """The target's and a drafter's."""
    with pytest.raises(ConfigError, match="but the model's have 8"):
        make_engine(model("float32"), attention_backend="cpu", drafters={"eagle": DRAFTERS["eagle_chain"]})
    narrow = load(str(tiny_checkpoint("llama")), dtype="float32").model
    with pytest.raises(ConfigError, match="but the model's have 8"):
        make_engine(narrow, attention_backend="cpu")
