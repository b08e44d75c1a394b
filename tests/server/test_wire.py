"""Messages come out as they went in, and nothing else comes out."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from slipstream.engine.stats import EngineStats
from slipstream.server import wire
from slipstream.types import DraftCounts, EngineOutput, EngineRequest, FinishReason, SamplingParams, TokenLogprobs

PARAMS = SamplingParams(
    temperature=0.5, seed=-5, stop=("a", "ü"), stop_token_ids=(7,), logit_bias={3: -1.5}, logprobs=2, allowed_token_ids=(1, 2)
)
TO_ENGINE: list[wire.ToEngine] = [
    wire.Add(
        (
            EngineRequest("r#0", (1, 2), PARAMS, -(2**63), ((4, 5),), ("regex", "a+")),
            EngineRequest("r#1", (), SamplingParams(), 0, priority=-(2**31), cache_salt="ü", parent_id="r#0"),
        )
    ),
    wire.Abort(("r#0", "")),
    wire.GetStats(2**40),
    wire.ResetPrefixCache(),
    wire.Stop(),
    wire.Stop(drain=True),
]
TO_FRONT: list[wire.ToFront] = [
    wire.Progress("weights", 0.5),
    wire.Ready("llama", "float32", 135_000_000, 2048, 17),
    wire.Outputs(
        (
            EngineOutput(
                "r#0", (1, 2), (TokenLogprobs(1, -0.5, (1, 2), (-0.5, -1e30)), TokenLogprobs(2, 0.0)), num_prompt_tokens=3
            ),
            EngineOutput("r#1", (), None, FinishReason.STOP, "ü", num_drafted=4, num_accepted=2),
            EngineOutput("r#2", (9,), None, FinishReason.STOP, 9, drafting={"ngram": DraftCounts(2, 4, 3, [2, 1])}),
            EngineOutput("r#4", prompt_logprobs=(TokenLogprobs(1, -0.5, (1,), (-0.5,), 1), TokenLogprobs(2, -3.0, rank=9))),
            EngineOutput("r#3", finish_reason=FinishReason.ERROR, error=("NonFiniteLogits", "the model ...")),
        )
    ),
    wire.Stats(3, EngineStats(num_running=1, device_s=0.25), 1.5),
    wire.Fatal("ModelError", "a file must be there"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_to_the_engine(message: wire.ToEngine) -> None:
    assert wire.decode_to_engine(wire.encode(message)) == message


@pytest.mark.parametrize("message", TO_FRONT, ids=lambda message: type(message).__name__)
def test_to_the_front(message: wire.ToFront) -> None:
    assert wire.decode_to_front(wire.encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        pickle.dumps(wire.Stop),
        msgspec.msgpack.encode({"type": "unknown"}),
        wire.encode(wire.Ready("a", "b", 1, 2, 3)),
    ],
)
def test_what_is_not_declared_does_not_decode(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(data)
