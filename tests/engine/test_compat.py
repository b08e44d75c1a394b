"""The table of refusals: every row is shown to refuse, with a message that names the field and says what to do."""

from __future__ import annotations

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.compat import REQUEST_ROWS, STARTUP_ROWS, check_request, check_startup
from slipstream.errors import ConfigError, InvalidRequest
from slipstream.types import EngineRequest, SamplingParams

VOCAB = 64


def request(prompt: tuple[int, ...] = (1,), *, words: tuple[tuple[int, ...], ...] = (), grammar: tuple[str, str] | None = None,
            **params: object) -> EngineRequest:  # fmt: skip
    return EngineRequest("r", prompt, SamplingParams(**params), 0, words, grammar)


BAD_REQUESTS = {
    "prompt outside the vocabulary": request((1, VOCAB)),
    "logit_bias outside the vocabulary": request(logit_bias={VOCAB: 1.0}),
    "stop_token_ids outside the vocabulary": request(stop_token_ids=(VOCAB,)),
    "allowed_token_ids outside the vocabulary": request(allowed_token_ids=(VOCAB,)),
    "bad_words outside the vocabulary": request(words=((1, VOCAB),)),
    "unknown grammar kind": request(grammar=("nope", "")),
}
BAD_CONFIGS = {
    "cuda is untested": EngineConfig(device="cuda"),
    "unknown drafter or option": EngineConfig(speculate=("nope:width=4",)),
    "unknown attention backend": EngineConfig(attention_backend="nope"),
    "a drafter given twice": EngineConfig(speculate=("ngram", "ngram:width=2")),
    "off beside other drafters": EngineConfig(speculate=("ngram", "off")),
    "several drafters without the cost model": EngineConfig(
        speculate=("ngram", "draft_model:model=m"), adaptive_speculation=False
    ),
    "too few tokens a step": EngineConfig(max_num_batched_tokens=1),
    "quantised weights on cuda": EngineConfig(device="cuda", allow_untested=True, quantization="q4"),
    "exact kernels where none compute": EngineConfig(cpu_kernels="exact", dtype="float64"),
}


def test_every_row_has_an_example() -> None:
    assert {row.name for row in REQUEST_ROWS} == set(BAD_REQUESTS)
    assert {row.name for row in STARTUP_ROWS} == set(BAD_CONFIGS)


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_requests_are_refused_by_their_row_alone(name: str) -> None:
    refusing = [row.name for row in REQUEST_ROWS if row.refuse(BAD_REQUESTS[name], VOCAB)]
    assert refusing == [name]
    with pytest.raises(InvalidRequest, match="must"):
        check_request(BAD_REQUESTS[name], VOCAB)


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configurations_are_refused_by_their_row_alone(name: str) -> None:
    refusing = [row.name for row in STARTUP_ROWS if row.refuse(BAD_CONFIGS[name])]
    assert refusing == [name]
    with pytest.raises(ConfigError, match="must") as caught:
        check_startup(BAD_CONFIGS[name])
    assert caught.value.hint


def test_the_last_real_id_passes() -> None:
    last = VOCAB - 1
    ids = {"logit_bias": {last: 1.0}, "stop_token_ids": (last,), "allowed_token_ids": (last,)}
    check_request(request((last,), words=((last,),), **ids), VOCAB)


def test_untested_features_run_when_asked_to() -> None:
    check_startup(EngineConfig(device="cuda", allow_untested=True))
    check_startup(EngineConfig())
