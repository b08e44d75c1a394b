"""Prompts in answers: `echo` with and without logprobs, prompt scoring with max_tokens 0, and `prompt_logprobs`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipstream.frontend.assemble import Assembler, Delta
from slipstream.frontend.model_info import ModelInfo
from slipstream.frontend.prepare import Frontend
from slipstream.observe.metrics import Metrics
from slipstream.server.answers import Answers
from slipstream.server.bridge import OutputStream
from slipstream.server.echo import Echo
from slipstream.server.shapes import CompletionShape
from slipstream.testing.byte_tokenizer import BOS_ID, EOS_ID, ByteTokenizer
from slipstream.types import EngineOutput, FinishReason, SamplingParams, TokenLogprobs
from tests.server.events import complete_events, finish_reasons, texts
from tests.server.live import LiveServer

TOKENIZER = ByteTokenizer()
PROMPT = "say(ab)"


def test_a_prompt_is_scored_without_an_answer(server: LiveServer) -> None:
    """A07: max_tokens 0 is fine where it says what for."""
    for fields in ({"logprobs": 1}, {"logprobs": None}, {"logprobs": 0, "n": 2}):
        body = server.complete(PROMPT, max_tokens=0, echo=True, **fields).json()
        assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == len(PROMPT)
        for choice in body["choices"]:
            assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
            assert "prompt_logprobs" not in choice
            assert (choice["logprobs"] is None) == (fields["logprobs"] is None)
    scored = server.complete(PROMPT, max_tokens=0, prompt_logprobs=0).json()["choices"][0]
    assert scored["text"] == "" and len(scored["prompt_logprobs"]) == len(PROMPT)
    assert server.is_alive()


@pytest.mark.parametrize("prompt", [PROMPT, [ord(char) for char in PROMPT]])
def test_logprobs_of_the_prompt_come_first(server: LiveServer, prompt: Any) -> None:
    choice = server.complete(prompt, echo=True, logprobs=2).json()["choices"][0]
    assert choice["text"] == "say(ab)ab"
    names = [*"say(ab)", "a", "b", "<eos>"]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == list(range(10))
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * 9]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][1:3] == [{"a": -0.5, "b": -1.5}, {"y": -0.5, "z": -1.5}]


def test_echo_without_logprobs(server: LiveServer) -> None:
    body = server.complete([PROMPT, "say(€)"], echo=True, n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["say(ab)ab"] * 2 + ["say(€)€"] * 2
    assert all(choice["logprobs"] is None for choice in body["choices"])


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_stream_begins_with_the_prompt(server: LiveServer, logprobs: int | None, max_tokens: int) -> None:
    fields = {"echo": True, "logprobs": logprobs, "max_tokens": max_tokens, "n": 2}
    whole = server.complete(["say(ab)", "say(cd)"], **fields).json()
    events = complete_events(
        server.complete(["say(ab)", "say(cd)"], stream=True, stream_options={"include_usage": True}, **fields)
    )
    assert events[-1]["usage"] == whole["usage"]
    assert texts(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert finish_reasons(events) == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    for index in range(4):
        own = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert own[0]["text"] == ("say(ab)", "say(cd)")[index // 2] and own[0]["finish_reason"] is None
        if logprobs is not None:
            assert own[0]["logprobs"]["token_logprobs"] == [None, *[-0.5] * 6]
            joined = {name: [value for one in own for value in one["logprobs"][name]] for name in own[0]["logprobs"]}
            assert joined == whole["choices"][index]["logprobs"]


@pytest.mark.parametrize("num_top, wanted", [(0, 1), (1, 1), (2, 2)])
def test_prompt_logprobs_have_vllms_shape(server: LiveServer, num_top: int, wanted: int) -> None:
    body = server.complete(PROMPT, prompt_logprobs=num_top, n=2).json()
    for choice in body["choices"]:
        assert choice["logprobs"] is None and len(choice["prompt_logprobs"]) == len(PROMPT)
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1][str(ord("a"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
        assert all(len(entry) == wanted for entry in choice["prompt_logprobs"][1:])
    chat = server.chat("say(ok)", prompt_logprobs=num_top).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in server.chat("say(ok)").json()


def test_echo_and_prompt_logprobs_each_show_what_they_were_asked_for(server: LiveServer) -> None:
    choice = server.complete(PROMPT, echo=True, logprobs=1, prompt_logprobs=3).json()["choices"][0]
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]] == [1] * (len(PROMPT) + 2)
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3] * (len(PROMPT) - 1)


def echoed(prompt: str | list[int], **params: Any) -> Echo:
    info = ModelInfo("m", TOKENIZER, None, TOKENIZER.vocab_size, 512, (EOS_ID,))
    prepared = Frontend(info).prepare("r", prompt, SamplingParams(prompt_logprobs=0, logprobs=0, **params))
    assembler = Assembler(prepared, info)
    ids = prepared.prompt_token_ids
    assembler.push(EngineOutput("r#0", prompt_logprobs=tuple(TokenLogprobs(one, -1.0) for one in ids[1:])))
    return Echo(assembler, 0, TOKENIZER)


@pytest.mark.parametrize(
    "prompt, params, text, offsets",
    [
        ("a€b", {}, "a€b", [0, 1, 1, 1, 2]),
        ([BOS_ID, 97, EOS_ID, 98], {}, "<bos>a<eos>b", [0, 5, 6, 11]),
        ([97, 0xE2, 0x82], {}, "a�", [0, 1, 1]),
        ("abcd", {"truncate_prompt_tokens": 2}, "cd", [0, 1]),
        ("abcd", {"truncate_prompt_tokens": 9}, "abcd", [0, 1, 2, 3]),
    ],
)
def test_text_and_offsets(prompt: str | list[int], params: dict[str, Any], text: str, offsets: list[int]) -> None:
    echo = echoed(prompt, **params)
    assert echo.text == text and echo.logprobs is not None and echo.logprobs["text_offset"] == offsets


def test_a_bos_that_the_tokenizer_puts_in_front_takes_no_room() -> None:
    class WithBos(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [BOS_ID] * add_special_tokens + super().encode(text, add_special_tokens)

    tokenizer = WithBos()
    info = ModelInfo("m", tokenizer, None, tokenizer.vocab_size, 512, (EOS_ID,))
    params = SamplingParams(prompt_logprobs=0, logprobs=0)
    assembler = Assembler(Frontend(info).prepare("r", "hi", params), info)
    assembler.push(EngineOutput("r#0", prompt_logprobs=(TokenLogprobs(104, -1.0), TokenLogprobs(105, -1.0))))
    shape = CompletionShape("c", "m", params, tokenizer, [assembler], echo=True)
    choice = shape.whole_choice(Delta(0, "x", (120,), (TokenLogprobs(120, -2.0),), "length", None))
    assert choice["text"] == "hix"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -2.0]


def test_later_answers_wait_for_the_logprobs_of_the_prompt() -> None:
    """Only the first answer brings them; whatever the engine's order, no choice begins without its prompt."""
    info = ModelInfo("m", TOKENIZER, None, TOKENIZER.vocab_size, 512, (EOS_ID,))
    prepared = Frontend(info).prepare("r", "hi", SamplingParams(n=2, prompt_logprobs=0, max_tokens=2))
    scored = (TokenLogprobs(105, -1.0),)
    news = [
        [EngineOutput("r#1", (97,))],
        [EngineOutput("r#1", (98,), finish_reason=FinishReason.LENGTH)],
        [EngineOutput("r#0", (97,), prompt_logprobs=scored)],
        [EngineOutput("r#0", (99,), finish_reason=FinishReason.LENGTH)],
    ]

    class Stream(OutputStream):
        async def __anext__(self) -> list[EngineOutput]:
            return news.pop(0)

    async def read() -> list[list[tuple[int, str]]]:
        answers = Answers([prepared], Stream(["r#0", "r#1"], lambda ids: None), info, Metrics("m"), 0.0)
        await answers.first()
        assert answers.prompts[0].prompt_logprobs == [None, *scored], "a response must not begin before its prompt is known"
        return [[(delta.index, delta.text) for delta in deltas] async for deltas in answers]

    assert asyncio.run(read()) == [[(0, "a"), (1, "a"), (1, "b")], [(0, "c")]]
