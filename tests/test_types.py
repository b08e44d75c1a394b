"""Sampling parameters: nothing wrong gets in, null is the default, and every refusal names its field."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import EngineError, InvalidParameter, NonFiniteLogits, Unsupported, error_from, shown
from slipstream.types import MAX_STOP_CHARS, MAX_STOP_STRINGS, UNSUPPORTED_PARAMS, SamplingParams

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
COUNTS = ("n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "seed")
BOOLS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
NEVER: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    10**400,
    -(10**400),
    "0.5",
    "",
    True,
    False,
    [],
    [1],
    {},
    b"1",
    1j,
)
ZERO_IS_FINE = {"temperature", "min_p", "presence_penalty", "frequency_penalty", "top_k", "seed"} | {
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
}
MINUS_ONE_IS_FINE = {"presence_penalty", "frequency_penalty", "top_k", "seed"}
NESTED: Any = []
for _ in range(10_000):
    NESTED = [NESTED]


def refused(field: str, value: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400
    assert field in caught.value.message
    assert len(caught.value.message) < 400
    json.loads(json.dumps(caught.value.message))
    return caught.value


@pytest.mark.parametrize("field", [*NUMBERS, *COUNTS])
@pytest.mark.parametrize("value", NEVER, ids=lambda value: shown(value))
def test_no_number_field_takes_what_is_no_number_in_range(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [1.5, 1.0])
def test_counts_are_integers(field: str, value: float) -> None:
    refused(field, value)


@pytest.mark.parametrize("field", [*NUMBERS, *COUNTS])
def test_zero_and_minus_one_pass_only_where_they_mean_something(field: str) -> None:
    for value, fine in ((0, ZERO_IS_FINE), (-1, MINUS_ONE_IS_FINE)):
        if field in fine:
            assert getattr(SamplingParams(**{field: value}), field) == value
        else:
            refused(field, value)


@pytest.mark.parametrize("field", BOOLS)
@pytest.mark.parametrize("value", [0, 1, "true", None, math.nan, []])
def test_switches_are_true_or_false(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("temperature", 1e-5, 100),
        ("top_p", 1e-9, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.01, 100),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("n", 1, 128),
        ("logprobs", 0, 20),
        ("seed", -(2**63), 2**63 - 1),
    ],
)
def test_bounds_are_part_of_the_range(field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(SamplingParams(**{field: value}), field) == value
    refused(field, high + 1)
    refused(field, low - 1)


@pytest.mark.parametrize("value", [1e-6, 1e-300, 5e-324])
def test_a_temperature_that_would_overflow_the_scores_is_refused(value: float) -> None:
    refused("temperature", value)
    refused("repetition_penalty", value)


def test_no_tokens_at_all_only_to_score_the_prompt() -> None:
    """A07."""
    refused("max_tokens", 0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(InvalidParameter, match="max_completion_tokens must be at least 1"):
        SamplingParams.from_json_fields({"max_completion_tokens": 0})
    assert SamplingParams.from_json_fields({"max_completion_tokens": 0, "prompt_logprobs": 2}).max_tokens == 0
    with pytest.raises(InvalidParameter, match="min_tokens"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, min_tokens=1)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize(
    "value", [[None], [-1], ["5"], [True], [1.0], [math.nan], [10**12], [10**400], "5", 5, {"5": 1}, [[1]], NESTED]
)
def test_token_id_lists(field: str, value: Any) -> None:
    refused(field, value)
    assert getattr(SamplingParams(**{field: [5, 6]}), field) == (5, 6)


@pytest.mark.parametrize(
    "value",
    [
        {"-1": 1}, {"abc": 1}, {"5": 1e39}, {"5": None}, {"5": "1"}, {"5": True}, {"5": math.nan}, {"5": -101}, {"5": 10**400},
        {True: 1}, {1.0: 1}, {None: 1}, {"": 1}, {"²": 1}, {" 5": 1}, {10**400: 1}, {"5" * 5000: 1}, {"5": 1, 5: 2}, [], [5], "5",
    ],
    ids=lambda value: shown(value),
)  # fmt: skip
def test_logit_bias(value: Any) -> None:
    refused("logit_bias", value)


def test_logit_bias_takes_json_keys_and_copies() -> None:
    given_ = {"5": 1, 7: -100.0}
    params = SamplingParams(logit_bias=given_)
    given_["9"] = 3
    assert params.logit_bias == {5: 1.0, 7: -100.0}


@pytest.mark.parametrize("field", ["stop", "bad_words"])
@pytest.mark.parametrize(
    "value", [[""], "", ["a", None], [1], 5, {"a": 1}, b"a", [b"a"], ["\ud800"], ["a"] * (MAX_STOP_STRINGS + 1), NESTED]
)
def test_strings(field: str, value: Any) -> None:
    refused(field, value)


def test_strings_come_alone_or_in_lists() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop="x" * MAX_STOP_CHARS).stop


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", ["x"] * 10_000), ("stop", "x" * 10**6), ("stop", ["x" * 10**6]), ("n", 5_000_000), ("logprobs", 1_000_000)],
)
def test_huge_values_are_refused_in_flat_memory(field: str, value: Any) -> None:
    tracemalloc.start()
    try:
        refused(field, value)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidParameter, match=r"min_tokens must be at most max_tokens \(5\), but got 6"):
        SamplingParams(max_tokens=5, min_tokens=6)
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    assert SamplingParams(max_tokens=None, min_tokens=6).max_tokens is None


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_allowed_token_ids_must_allow_something() -> None:
    refused("allowed_token_ids", [])


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.integers(10**300, 10**310)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(SamplingParams.field_names()), anything, max_size=5))
def test_whatever_json_holds_gives_parameters_or_a_refusal(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_json_fields(fields)
    except InvalidParameter as error:
        named = error.param
    else:
        named = None
    if named is not None:
        assert named in fields
        return
    for name in NUMBERS:
        assert math.isfinite(getattr(params, name))
    assert SamplingParams.from_json_fields({name: getattr(params, name) for name in SamplingParams.field_names()}) == params


def test_null_is_the_default() -> None:
    assert SamplingParams.from_json_fields(dict.fromkeys(SamplingParams.field_names())) == SamplingParams()
    defaults = {"temperature": 0.5, "max_tokens": None}
    params = SamplingParams.from_json_fields({"temperature": None, "max_tokens": None, "top_p": 0.5}, defaults)
    assert (params.temperature, params.max_tokens, params.top_p) == (0.5, None, 0.5)
    assert SamplingParams.from_json_fields({"temperature": 0}, defaults).temperature == 0


def test_both_names_of_max_tokens() -> None:
    assert SamplingParams.from_json_fields({"max_completion_tokens": 7}).max_tokens == 7
    assert SamplingParams.from_json_fields({"max_completion_tokens": 7, "max_tokens": 7}).max_tokens == 7
    assert SamplingParams.from_json_fields({"max_completion_tokens": None, "max_tokens": 7}).max_tokens == 7
    for wrong in (0, -1, "5", 1.5, True, 2**31, 10**400):
        with pytest.raises(InvalidParameter) as caught:
            SamplingParams.from_json_fields({"max_completion_tokens": wrong})
        assert caught.value.param == "max_completion_tokens"
    with pytest.raises(InvalidParameter, match="agree with max_tokens"):
        SamplingParams.from_json_fields({"max_completion_tokens": 7, "max_tokens": 8})


@pytest.mark.parametrize("name", UNSUPPORTED_PARAMS)
def test_known_but_unsupported_names_are_refused_unless_they_change_nothing(name: str) -> None:
    for value in (None, *UNSUPPORTED_PARAMS[name]):
        assert SamplingParams.from_json_fields({name: value}) == SamplingParams()
    for value in (17, "x", {"type": "json_object"}, math.nan):
        with pytest.raises(Unsupported) as caught:
            SamplingParams.from_json_fields({name: value})
        assert caught.value.param == name
        assert caught.value.status == 400


def test_unknown_names_are_ignored() -> None:
    assert SamplingParams.from_json_fields({"user": "me", "metadata": {}}) == SamplingParams()


def test_shown_is_short_whatever_it_gets() -> None:
    for value in (NESTED, [10**5000], {"a": [10**5000]}, "x" * 10**6, [["x" * 10**6] * 8], 10**5000, object()):
        assert len(shown(value)) < 200
    assert shown([1, "a"]) == "[1, 'a']"
    assert shown(None) == "None"


def test_errors_cross_as_name_and_text() -> None:
    given_ = InvalidParameter("prompt", "be text", 5, hint="write text")
    back = error_from(type(given_).__name__, str(given_))
    assert type(back) is InvalidParameter
    assert (str(back), back.hint, back.status) == (str(given_), "write text", 400)
    assert type(error_from("NonFiniteLogits", "bad")) is NonFiniteLogits
    for name in ("NoSuchError", "shown", "annotations", "reprlib"):
        assert type(error_from(name, "bad")) is EngineError


@pytest.mark.parametrize("given, kept", [(False, 0), (True, None), (None, None), (0, 0), (3, 3)])
def test_drafting_can_be_capped_or_switched_off(given: Any, kept: int | None) -> None:
    assert SamplingParams(speculate=given).speculate == kept


@pytest.mark.parametrize("wrong", [-1, 1.5, "no", 2**40])
def test_a_wrong_cap_of_drafting(wrong: Any) -> None:
    with pytest.raises(InvalidParameter, match="speculate must be true, false or an integer from 0"):
        SamplingParams(speculate=wrong)
