"""What a client sends against what the model can take."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ContextLengthExceeded, InvalidParameter, InvalidRequest
from slipstream.frontend.model_info import ModelInfo
from slipstream.frontend.prepare import Frontend
from slipstream.seeds import seed_i, splitmix64
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import SamplingParams
from tests.text.vocabularies import BOS, END, EOS, FakeTokenizer, byte_level, sentence_piece

CONTEXT = 32
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
NO_LIMIT = SamplingParams(max_tokens=None)
HI = [{"role": "user", "content": "hi"}]


def frontend(tokenizer: Tokenizer | None = None, template: str | None = TEMPLATE, padding: int = 0, **info: Any) -> Frontend:
    tokenizer = tokenizer or FakeTokenizer()
    fields = {"context_len": CONTEXT, "eos_token_ids": (EOS, END), **info}
    return Frontend(ModelInfo("tiny", tokenizer, template, tokenizer.vocab_size + padding, **fields))


def refused(prompt: Any, params: SamplingParams = NO_LIMIT, **kind: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        frontend(**kind).prepare("r", prompt, params)
    return caught.value


def test_a_prompt_becomes_one_request_an_answer() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=4)
    prepared = frontend().prepare("r", "ab", params)
    assert prepared.prompt == "ab"
    assert prepared.prompt_token_ids == (100, 101)
    assert prepared.params == params
    assert [request.request_id for request in prepared.requests] == ["r#0", "r#1", "r#2"]
    assert [request.seed for request in prepared.requests] == [5, seed_i(5, 1), seed_i(5, 2)]
    assert all(request.prompt_token_ids == (100, 101) and request.params.n == 1 for request in prepared.requests)


def test_token_ids_are_taken_as_they_are() -> None:
    prepared = frontend(FakeTokenizer(add_bos=True)).prepare("r", [100, 101], NO_LIMIT)
    assert (prepared.prompt, prepared.prompt_token_ids) == (None, (100, 101))


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("prompt", ["", [], ()])
def test_empty_prompts_are_refused_with_and_without_bos(prompt: Any, add_bos: bool) -> None:
    assert refused(prompt, tokenizer=FakeTokenizer(add_bos=add_bos)).param == "prompt"


@pytest.mark.parametrize(
    "prompt", [None, 5, {"a": 1}, b"ab", "\ud800", ["ab"], [1.0], [True], [None], [-1], [10**12], [10**400], [[1]]]
)
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    error = refused(prompt)
    assert (error.param, error.status) == ("prompt", 400)


def test_ids_of_a_padded_head_are_accepted_up_to_the_last() -> None:
    front = frontend(padding=5)
    size = front.info.vocab_size
    assert size == FakeTokenizer().vocab_size + 5
    params = SamplingParams(logit_bias={size - 1: 1}, stop_token_ids=(size - 1,), allowed_token_ids=(size - 1,))
    assert front.prepare("r", [size - 1], params).prompt_token_ids == (size - 1,)
    assert refused([size], padding=5).param == "prompt"
    for field, value in (("logit_bias", {size: 1}), ("stop_token_ids", (size,)), ("allowed_token_ids", (1, size))):
        for min_tokens in (0, 5):
            error = refused("ab", SamplingParams(**{field: value, "min_tokens": min_tokens}), padding=5)
            assert error.param == field
            assert str(size) in error.message


def test_the_answer_may_fill_the_context_and_no_more() -> None:
    front = frontend()
    prepared = front.prepare("r", "a" * 30, NO_LIMIT)
    assert [request.params.max_tokens for request in prepared.requests] == [None], "the engine knows what is left"
    assert front.prepare("r", "a" * 30, SamplingParams(max_tokens=2)).params.max_tokens == 2
    assert front.prepare("r", "a" * 31, NO_LIMIT).requests[0].params.max_tokens is None


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"),
    [
        (30, 3, ("32", "30", "3")),
        (1, 2**31 - 1, ("32", "2147483647")),
        (32, None, ("32",)),
        (320, None, ("32", "320")),
        (320, 1, ("320",)),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(length: int, max_tokens: int | None, numbers: tuple[str, ...]) -> None:
    for prompt in ("a" * length, [100] * length):
        with pytest.raises(ContextLengthExceeded) as caught:
            frontend().prepare("r", prompt, SamplingParams(max_tokens=max_tokens))
        assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)
        assert all(number in caught.value.message for number in numbers)


def test_truncation_keeps_the_end() -> None:
    params = SamplingParams(truncate_prompt_tokens=2, max_tokens=30)
    prepared = frontend().prepare("r", "abcd", params)
    assert prepared.prompt_token_ids == prepared.requests[0].prompt_token_ids == (102, 103)
    assert frontend().prepare("r", "a" * 320, params).prompt_token_ids == (100, 100)
    assert frontend().prepare("r", "a", params).prompt_token_ids == (100,)


def test_min_tokens_that_the_context_cannot_hold() -> None:
    assert refused("a" * 30, SamplingParams(max_tokens=None, min_tokens=3)).param == "min_tokens"
    assert frontend().prepare("r", "a" * 30, SamplingParams(max_tokens=None, min_tokens=2))


def test_more_logprobs_than_tokens() -> None:
    tiny = 10 - FakeTokenizer().vocab_size
    assert refused([1], SamplingParams(logprobs=11), padding=tiny).param == "logprobs"
    assert refused([1], SamplingParams(prompt_logprobs=11), padding=tiny).param == "prompt_logprobs"
    assert frontend(padding=tiny).prepare("r", [1], SamplingParams(logprobs=10))


def test_the_prompt_is_scored_once_for_all_answers() -> None:
    requests = frontend().prepare("r", "abc", SamplingParams(n=3, prompt_logprobs=2)).requests
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None]
    requests = frontend().prepare("r", "abc", SamplingParams(n=2, prompt_logprobs=2, max_tokens=0)).requests
    assert [request.params.prompt_logprobs for request in requests] == [2, 2]


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert frontend().prepare("r", "a" * 32, params).params.max_tokens == 0
    with pytest.raises(ContextLengthExceeded):
        frontend().prepare("r", "a" * 33, params)


def test_priority_salt_and_parent_travel_with_every_answer() -> None:
    prepared = frontend().prepare("r", "abc", SamplingParams(n=3), priority=-(2**31), cache_salt="s" * 256)
    assert [request.priority for request in prepared.requests] == [-(2**31)] * 3
    assert [request.cache_salt for request in prepared.requests] == ["s" * 256] * 3
    assert [request.parent_id for request in prepared.requests] == [None, "r#0", "r#0"]
    plain = frontend().prepare("r", "abc", SamplingParams()).requests[0]
    assert (plain.priority, plain.cache_salt, plain.parent_id) == (0, "", None)


@pytest.mark.parametrize("field", ["priority", "cache_salt"])
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.0, True, "", "s" * 257, "\ud800", [], b"s"])
def test_bad_priorities_and_salts(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        frontend().prepare("r", "abc", SamplingParams(), **{field: value})
    assert caught.value.param == field


def test_unseeded_requests_draw_different_signed_64_bit_seeds() -> None:
    seeds = [frontend().prepare("r", "a", SamplingParams(n=2)).requests for _ in range(20)]
    flat = [request.seed for requests in seeds for request in requests]
    assert len(set(flat)) == 40
    assert all(-(2**63) <= seed < 2**63 for seed in flat)
    assert max(map(abs, flat)) > 2**48


def test_seeds_are_the_documented_hash() -> None:
    # splitmix64's published first outputs for the seed 0 (each step adds the same constant to the state).
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert [seed_i(seed, 0) for seed in (0, -1, 7, -(2**63))] == [0, -1, 7, -(2**63)]
    wanted = splitmix64((7 ^ splitmix64(3)) & (2**64 - 1))
    assert seed_i(7, 3) % 2**64 == wanted
    assert len({seed_i(7, index) for index in range(128)}) == 128


@pytest.mark.parametrize("word", ["the", " the", "the "])
def test_bad_words_cover_the_word_with_and_without_a_space(word: str) -> None:
    for tokenizer in (byte_level(), sentence_piece()):
        ids = frontend(tokenizer).prepare("r", "x", SamplingParams(bad_words=(word,))).requests[0].bad_word_ids
        spelled = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word.lstrip(), f" {word.lstrip()}")]
        assert list(ids) == spelled
        assert len(set(ids)) == 2


def test_bad_words_of_spaces_and_of_nothing() -> None:
    assert frontend().prepare("r", "x", SamplingParams(bad_words=("\n",))).requests[0].bad_word_ids == ((13,), (35, 13))

    class Deaf(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return []

    error = refused([5], SamplingParams(bad_words=("x",)), tokenizer=Deaf())
    assert error.param == "bad_words"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(EOS,), min_tokens=1),
        SamplingParams(allowed_token_ids=(50, EOS), stop_token_ids=(50,), min_tokens=1),
        SamplingParams(allowed_token_ids=(100,), bad_words=("a",)),
        SamplingParams(stop_token_ids=tuple(range(259)), min_tokens=1),
    ],
)
def test_something_must_be_left_to_sample(params: SamplingParams) -> None:
    assert refused("x", params).param == "allowed_token_ids"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(EOS,)),
        SamplingParams(allowed_token_ids=(EOS,), min_tokens=1, ignore_eos=True),
        SamplingParams(allowed_token_ids=(100, 101), bad_words=("a",)),
        SamplingParams(stop_token_ids=tuple(range(259))),
    ],
)
def test_what_leaves_something_passes(params: SamplingParams) -> None:
    assert frontend().prepare("r", "x", params)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.removeprefix("{{ bos_token }}")])
def test_a_chat_prompt_never_has_two_bos(template: str, add_bos: bool) -> None:
    for tokenizer in (FakeTokenizer(add_bos=add_bos), byte_level(add_bos), sentence_piece(add_bos)):
        front = frontend(tokenizer, template)
        ids = front.prepare("r", front.chat_prompt(HI), NO_LIMIT).prompt_token_ids
        wanted = add_bos or template == TEMPLATE
        assert ids.count(BOS) == wanted
        assert (ids[0] == BOS) == wanted


def test_a_bos_in_the_text_is_not_doubled_and_ids_are_left_alone() -> None:
    front = frontend(byte_level(add_bos=True))
    assert front.prepare("r", "<bos>hi", NO_LIMIT).prompt_token_ids == front.prepare("r", "hi", NO_LIMIT).prompt_token_ids
    assert front.prepare("r", [BOS, BOS, 5], NO_LIMIT).prompt_token_ids == (BOS, BOS, 5)


def test_without_a_template_chat_is_refused_and_completions_work() -> None:
    for template, reason in ((None, "must have a chat template"), ("{% if %}", "must compile")):
        front = frontend(template=template)
        with pytest.raises(InvalidRequest, match=reason) as caught:
            front.chat_prompt(HI)
        assert caught.value.status == 400
        assert "completions" in str(caught.value.hint)
        assert front.prepare("r", "hi", NO_LIMIT)


def test_chat_prompts() -> None:
    front = frontend()
    assert front.chat_prompt(HI) == "<bos>user: hi"
    with pytest.raises(InvalidParameter, match=r"messages\[0\]\.role"):
        front.chat_prompt([{"role": "robot", "content": "hi"}])


def test_a_template_that_renders_nothing_is_an_empty_prompt() -> None:
    front = frontend(template="{# nothing #}")
    with pytest.raises(InvalidParameter, match="prompt must hold at least one character"):
        front.prepare("r", front.chat_prompt(HI), NO_LIMIT)


def test_defaults_come_from_the_model_then_the_endpoint_then_the_client() -> None:
    front = frontend(generation_defaults={"temperature": 0.3, "top_p": 0.8, "top_k": 5})
    params = front.sampling_params({"top_p": 0.5, "top_k": None}, {"max_tokens": None})
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.5, 5, None)
