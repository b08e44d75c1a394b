"""What a row needs is known on the host, and rows are what their slots say."""

from __future__ import annotations

import pytest
import torch

from slipstream.sampling.sampler import process, sample
from slipstream.sampling.state import NO_NEEDS, RowNeeds, SamplingState
from slipstream.types import MIN_TEMPERATURE, EngineRequest, SamplingParams
from tests.sampling.oracle import Asked
from tests.sampling.steps import Row, step_of

CPU = torch.device("cpu")


def needs_of(**params: object) -> RowNeeds:
    state = SamplingState(2, 100, (1,), CPU)
    state.admit(1, EngineRequest("r", (3,), SamplingParams(**params), 0), 1)
    return state.rows([1]).needs[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
        {"temperature": 0, "min_tokens": 5, "ignore_eos": True},
        {"temperature": 0, "logit_bias": {4: 0.0}},
        {"temperature": 0, "stop_token_ids": (5,), "stop": ("x",), "logprobs": 3},
    ],
)
def test_rows_that_need_an_argmax_only(params: dict[str, object]) -> None:
    assert needs_of(**params) == NO_NEEDS and needs_of(**params).nothing


def test_needs() -> None:
    assert needs_of() == RowNeeds(noise=True)
    assert needs_of(temperature=0.5) == RowNeeds(noise=True, scaled=True)
    assert needs_of(top_k=50) == RowNeeds(noise=True, top_k=True, num_candidates=64)
    assert needs_of(top_k=100) == needs_of(top_k=-1) == RowNeeds(noise=True), "top_k of the whole vocabulary keeps all"
    assert needs_of(top_p=0.9) == RowNeeds(noise=True, top_p=True, num_candidates=256)
    assert needs_of(min_p=0.1) == RowNeeds(noise=True, min_p=True, num_candidates=256)
    assert needs_of(temperature=0, repetition_penalty=1.1) == RowNeeds(penalties=True)
    assert needs_of(temperature=0, presence_penalty=1.0) == RowNeeds(penalties=True, output_counts=True)
    for edit in ({"min_tokens": 3}, {"logit_bias": {4: 1.0}}, {"allowed_token_ids": (3,)}):
        assert needs_of(temperature=0, **edit) == RowNeeds(edits=True)


def test_a_step_of_plain_rows_gathers_nothing() -> None:
    state = SamplingState(3, 100, (1,), CPU)
    state.admit(1, EngineRequest("a", (3,), SamplingParams(temperature=0), 0), 1)
    state.admit(2, EngineRequest("b", (3,), SamplingParams(), 0), 1)
    assert state.rows([1]).numbers is None and state.rows([]).numbers is None
    assert state.rows([1, 2]).numbers is not None
    assert state.rows([0]).needs == (NO_NEEDS,), "the padding row needs nothing"


def test_a_resumed_request_counts_its_output_from_the_original_prompt() -> None:
    """The same tokens, once as output of a two-token prompt, once as prompt: only the first is penalised by frequency."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 5.0, 4.0]])
    asked = Asked(temperature=0, frequency_penalty=2.0, min_tokens=4)
    resumed = step_of([Row(asked, [0, 3], [3])], [(0, 0)], 5)
    fresh = step_of([Row(asked, [0, 3, 3])], [(0, 0)], 5)
    assert sample(logits, resumed.rows, resumed.nodes).tolist() == [4]
    assert sample(logits, fresh.rows, fresh.nodes).tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_temperatures_stay_finite(dtype: torch.dtype) -> None:
    logits = torch.tensor([[30.0, -20.0, 29.9, 0.0]], dtype=dtype)
    for temperature, greedy in ((MIN_TEMPERATURE, True), (100.0, False)):
        step = step_of([Row(Asked(temperature=temperature), [3])], [(0, 0)], 4)
        assert bool(process(logits, step.rows, step.nodes).isfinite().all())
        assert not greedy or sample(logits, step.rows, step.nodes).tolist() == [0]


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, -(2**63), 2**64 - 1, 2**63])
def test_seeds_are_taken_modulo_two_to_the_64(seed: int) -> None:
    state = SamplingState(2, 10, (), CPU)
    state.admit(1, EngineRequest("r", (3,), SamplingParams(), seed), 1)
    numbers = state.rows([1]).numbers
    assert numbers is not None and int(numbers.integer("seed")) % 2**64 == seed % 2**64
