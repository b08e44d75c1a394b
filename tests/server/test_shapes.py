"""How tokens and their logprobs are spelled, in pieces and whole."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from slipstream.frontend.assemble import Delta
from slipstream.server.logprobs import MIN_LOGPROB, token_name
from slipstream.server.shapes import ChatShape, CompletionShape, usage_object
from slipstream.testing.byte_tokenizer import EOS_ID, ByteTokenizer
from slipstream.types import DraftCounts, SamplingParams, TokenLogprobs

TOKENIZER = ByteTokenizer()
EURO = "€".encode()


def delta(text: str, ids: tuple[int, ...], finish: str | None = None, index: int = 0, top: int = 0) -> Delta:
    logprobs = tuple(
        TokenLogprobs(one, -0.5, tuple(one + i for i in range(top)), tuple(-0.5 - i for i in range(top))) for one in ids
    )
    return Delta(index, text, ids, logprobs, finish, None)


def completion() -> CompletionShape:
    return CompletionShape("cmpl-1", "m", SamplingParams(), TOKENIZER)


def chat() -> ChatShape:
    return ChatShape("chatcmpl-1", "m", SamplingParams(), TOKENIZER)


@pytest.mark.parametrize("data, name", [(b"a", "a"), (EURO, "€"), (EURO[:2], "bytes:\\xe2\\x82"), (b"", "")])
def test_token_names(data: bytes, name: str) -> None:
    assert token_name(data) == name


def test_completion_logprobs_of_a_character_in_pieces() -> None:
    ids = (ord("a"), *EURO, ord("b"), EOS_ID)
    choice = completion().whole_choice(delta("a€b", ids, "stop", top=1))
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "<eos>"],
        "token_logprobs": [-0.5] * 6,
        "top_logprobs": [{name: -0.5} for name in ("a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "<eos>")],
        "text_offset": [0, 1, 1, 1, 2, 3],
    }


def test_text_offsets_go_on_from_piece_to_piece_for_each_answer_alone() -> None:
    shape = completion()
    assert shape.choices(delta("ab", (97, 98)))[0]["logprobs"]["text_offset"] == [0, 1]
    assert shape.choices(delta("c", (99,), index=1))[0]["logprobs"]["text_offset"] == [0]
    assert shape.choices(delta("d", (100,)))[0]["logprobs"]["text_offset"] == [2]


def test_the_chosen_token_is_always_among_the_top() -> None:
    one = TokenLogprobs(97, -9.0, (98, 99), (-0.1, -2.0))
    choice = completion().whole_choice(Delta(0, "a", (97,), (one,), None, None))
    assert list(choice["logprobs"]["top_logprobs"][0].items()) == [("b", -0.1), ("c", -2.0), ("a", -9.0)]


def test_chat_logprobs() -> None:
    choice = chat().whole_choice(delta("a", (97, 0xE2), "length", top=2))
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}],
    }
    assert second["token"] == "bytes:\\xe2" and second["bytes"] == [0xE2]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_logprobs_are_numbers_json_can_write(logprob: float) -> None:
    one = TokenLogprobs(97, logprob, (97,), (logprob,))
    for shape in (completion(), chat()):
        data = msgspec.json.encode(shape.whole_choice(Delta(0, "a", (97,), (one,), "stop", None)))
        assert str(MIN_LOGPROB).encode() in data
        json.loads(data, parse_constant=pytest.fail)


def test_chat_pieces() -> None:
    shape = chat()
    none = Delta(0, "", (0xE2,), None, None, None)
    assert [choice["delta"] for choice in shape.choices(none)] == [{"role": "assistant", "content": ""}]
    assert shape.choices(none) == []
    end = shape.choices(Delta(0, "a", (97,), None, "stop", None))
    assert [(choice["delta"], choice["finish_reason"]) for choice in end] == [({"content": "a"}, None), ({}, "stop")]
    other = shape.choices(Delta(1, "", (EOS_ID,), None, "stop", None))
    assert [choice["delta"] for choice in other] == [{"role": "assistant", "content": ""}, {}]
    assert [choice["index"] for choice in other] == [1, 1]


def test_a_piece_without_text_is_sent_for_its_logprobs_or_its_end() -> None:
    assert completion().choices(Delta(0, "", (0xE2,), None, None, None)) == []
    assert len(completion().choices(delta("", (0xE2,)))) == 1
    assert completion().choices(Delta(0, "", (EOS_ID,), None, "stop", None))[0]["finish_reason"] == "stop"


def test_usage() -> None:
    usage = usage_object(5, 7, 2)
    assert usage["total_tokens"] == 12 and usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert "completion_tokens_details" not in usage and "draft_details" not in usage
    assert usage_object(5, 7, 2, None, with_draft_details=True)["draft_details"] == {}


def test_usage_of_drafts() -> None:
    drafting = {"a": DraftCounts(2, 6, 3, [2, 1]), "b": DraftCounts(1, 4, 0)}
    usage = usage_object(5, 7, 2, drafting)
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 7}
    assert "draft_details" not in usage
    assert usage_object(5, 7, 2, drafting, with_draft_details=True)["draft_details"] == {
        "a": {"drafted": 6, "accepted": 3, "accepted_by_position": [2, 1]},
        "b": {"drafted": 4, "accepted": 0, "accepted_by_position": []},
    }
    none = usage_object(5, 7, 2, {})["completion_tokens_details"]
    assert none == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_draft_counts() -> None:
    counts = DraftCounts()
    for drafted, accepted in ((4, 2), (4, 0), (3, 3), (1, 1)):
        counts.add(drafted, accepted)
    assert counts == DraftCounts(4, 12, 6, [3, 2, 1])
    counts.merge(DraftCounts(1, 5, 4, [1, 1, 1, 1]))
    assert counts == DraftCounts(5, 17, 10, [4, 3, 2, 1])
