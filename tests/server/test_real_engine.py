"""`slipstream serve` with the real engine and a tiny model: what HTTP answers is what Python answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.server.events import complete_events, finish_reasons, texts
from tests.server.live import LiveServer

PROMPTS = ["hello", "a", "the sea is", "01234567890123456789012345678901234567890"]


@pytest.fixture(scope="module")
def server(real_server: LiveServer) -> LiveServer:
    return real_server


@pytest.fixture(scope="module")
def llm(real_folder: Path) -> Iterator[LLM]:
    with LLM(str(real_folder), dtype="float64", num_threads=1) as llm:
        yield llm


def answers(response: Any) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"seed": 7, "n": 3}, {"seed": 7, "stop": ["e", "0"], "logprobs": 3}, {"seed": 1, "top_k": 9}]
)
def test_http_answers_as_python_does(server: LiveServer, llm: LLM, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 24, **fields}
    wanted = llm.generate(PROMPTS, SamplingParams(**fields), use_tqdm=False)
    flat = [(one.text, one.finish_reason) for output in wanted for one in output.outputs]
    assert answers(server.complete(PROMPTS, **fields)) == flat
    assert answers(server.complete([output.prompt_token_ids for output in wanted], **fields)) == flat
    events = complete_events(server.complete(PROMPTS, stream=True, stream_options={"include_usage": True}, **fields))
    ends = finish_reasons(events)
    assert [(text, ends[index]) for index, text in sorted(texts(events).items())] == flat
    assert events[-1]["usage"]["completion_tokens"] == sum(len(one.token_ids) for output in wanted for one in output.outputs)
    assert events[-1]["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in wanted)


def test_logprobs_belong_to_their_tokens(server: LiveServer, llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(seed=5, max_tokens=12, logprobs=2), use_tqdm=False)
    one = output.outputs[0]
    assert one.logprobs is not None
    got = server.complete("hello", seed=5, max_tokens=12, logprobs=2).json()["choices"][0]["logprobs"]
    assert len(got["tokens"]) == len(one.token_ids)
    for place, mine in enumerate(one.logprobs):
        assert got["token_logprobs"][place] == pytest.approx(mine.logprob, abs=1e-6)
        top = got["top_logprobs"][place]
        assert got["tokens"][place] in top and len(top) in (2, 3)
        assert list(top.values())[:2] == pytest.approx(mine.top_logprobs[:2], abs=1e-6)
    assert got["text_offset"][0] == 0 and got["text_offset"] == sorted(got["text_offset"])


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_are_scored_as_evaluations_ask(server: LiveServer, llm: LLM, max_tokens: int, as_ids: bool) -> None:
    """K05, and what lm-eval's local-completions sends: a list of prompts, echo, logprobs, nothing or one token to generate."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
    wanted = llm.generate(PROMPTS, params, use_tqdm=False)
    prompts = [output.prompt_token_ids for output in wanted] if as_ids else PROMPTS
    asked = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1234}
    for _ in range(2):
        body = server.complete(prompts, **asked).json()
        assert body["usage"]["completion_tokens"] == max_tokens * len(PROMPTS)
        for output, choice in zip(wanted, body["choices"], strict=True):
            got, length = choice["logprobs"], len(output.prompt_token_ids)
            assert choice["finish_reason"] in ("length", "stop") and choice["text"].startswith(output.prompt or "?")
            assert got["token_logprobs"][0] is got["top_logprobs"][0] is None
            assert all(len(got[name]) == length + max_tokens for name in got)
            assert output.prompt_logprobs is not None
            for place, mine in list(enumerate(output.prompt_logprobs))[1:]:
                assert mine is not None and mine.token_id == output.prompt_token_ids[place]
                assert got["token_logprobs"][place] == pytest.approx(mine.logprob, abs=1e-6)
                # How lm-eval tells whether the continuation is the greedy one.
                is_greedy = got["token_logprobs"][place] == max(got["top_logprobs"][place].values())
                assert is_greedy == (mine.rank == 1)


def test_echo_streamed_and_whole(server: LiveServer) -> None:
    fields = {"max_tokens": 5, "seed": 3, "logprobs": 2, "echo": True, "n": 2}
    whole = server.complete(PROMPTS, **fields).json()
    events = complete_events(server.complete(PROMPTS, stream=True, stream_options={"include_usage": True}, **fields))
    assert events[-1]["usage"] == whole["usage"]
    for wanted in whole["choices"]:
        own = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == wanted["index"]]
        assert own[0]["text"] == PROMPTS[wanted["index"] // 2]
        assert "".join(piece["text"] for piece in own) == wanted["text"]
        for name in ("tokens", "text_offset", "token_logprobs"):
            pieces = [value for piece in own for value in piece["logprobs"][name]]
            assert pieces == (wanted["logprobs"][name] if name != "token_logprobs" else pytest.approx(wanted["logprobs"][name]))
        offsets, text = wanted["logprobs"]["text_offset"], wanted["text"]
        assert offsets == sorted(offsets) and offsets[-1] <= len(text)


def test_chat(server: LiveServer, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    wanted = llm.chat(messages, SamplingParams(seed=3, max_tokens=20), use_tqdm=False)[0].outputs[0]
    whole = server.chat("hello", seed=3, max_tokens=20, logprobs=True, top_logprobs=1).json()
    assert whole["choices"][0]["message"]["content"] == wanted.text
    assert len(whole["choices"][0]["logprobs"]["content"]) == len(wanted.token_ids) == whole["usage"]["completion_tokens"]
    assert texts(complete_events(server.chat("hello", seed=3, max_tokens=20, stream=True)))[0] == wanted.text
    assert server.chat("hello", seed=3).json()["usage"]["total_tokens"] <= 256


def test_many_at_once_and_some_hang_up(server: LiveServer, llm: LLM) -> None:
    wanted = llm.generate(PROMPTS * 4, [SamplingParams(seed=seed, max_tokens=30) for seed in range(16)], use_tqdm=False)

    def one(number: int) -> str:
        if number % 5 == 4:
            body = {"model": "fake", "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
            with server.http.stream("POST", "/v1/completions", json=body) as stream:
                next(stream.iter_raw())
        return str(server.complete((PROMPTS * 4)[number], seed=number, max_tokens=30).json()["choices"][0]["text"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [output.outputs[0].text for output in wanted]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory map of a process")
def test_only_the_engine_process_has_torch(server: LiveServer) -> None:
    assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "torch" in Path(f"/proc/{server.engine_pid}/maps").read_text()


def test_what_the_engine_refuses(server: LiveServer) -> None:
    response = server.complete("x" * 300)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    json.loads(response.text)
    assert answers(server.complete("hello", temperature=0, max_tokens=1))[0][1] in ("length", "stop")
