"""The engine with models whose layers are one call: the same tokens on every path, with rounded weights too."""

from __future__ import annotations

from functools import cache

import pytest

from slipstream.layers.fused import FusedDecoder
from tests.cpu_kernels import needed
from tests.engine.harness import Answer, Job, assert_equal, reference, run
from tests.engine.test_equality import DRAFTERS, params, prompt
from tests.kernels.decoder_world import model

# The heads of our EAGLE tests are too narrow for the kernels.
NAMES = [name for name in DRAFTERS if not name.startswith("eagle")]
JOBS = [
    Job(prompt(1, 5), params(20)),
    Job(prompt(2, 70), params(20, temperature=0.8, top_p=0.9), seed=5),
    Job(prompt(3, 33), params(12, frequency_penalty=1.0)),
    Job(prompt(4, 130), params(30, temperature=1.0), seed=9),
]
MODELS = [("llama", "float32"), ("gemma3_text", "q4")]


@pytest.fixture(autouse=True)
def there() -> None:
    needed()


@cache
def wanted(name: str, holding: str) -> list[Answer]:
    return reference(model(name, holding), JOBS, attention_backend="cpu")


@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize("lag, page_size", [(0, 16), (1, 1)])
@pytest.mark.parametrize(("name", "holding"), MODELS)
def test_the_same_tokens_on_every_path(name: str, holding: str, drafter: str, lag: int, page_size: int) -> None:
    decoder = model(name, holding)
    assert type(decoder) is FusedDecoder
    how = {"lag": lag, "page_size": page_size, "chunk": 32, "attention_backend": "cpu"}
    got = run(decoder, JOBS, drafters={drafter: DRAFTERS[drafter]}, **how)
    assert_equal(got, wanted(name, holding), (name, holding, drafter, lag, page_size))


def test_the_tokens_of_layer_by_layer() -> None:
    """In float32, against the same model multiplied by torch: logits of tiny models differ by more than the bits."""
    assert_equal(wanted("llama", "float32"), reference(model("llama", cpu_kernels="off"), JOBS), "fused")
