"""`slipstream serve` with the real engine and a tiny model: what HTTP answers is what Python answers."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.server.events import complete_events, finish_reasons, texts
from tests.server.live import LiveServer
from tests.tiny_checkpoints import edit_json, save, tiny

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
PROMPTS = ["hello", "a", "the sea is", "01234567890123456789012345678901234567890"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tiny("llama", eos_token_id=[2, 40]), tmp_path_factory.mktemp("tiny"))
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    flags = ["--port", "0", "--dtype", "float64", "--served-model-name", "fake", "--num-threads", "1", "--max-num-seqs", "8"]
    with LiveServer(command=("-m", "slipstream.cli.main", "serve", str(folder), "--debug", *flags)) as live:
        yield live
        live.until_idle()
        assert live.gauge("kv_cache_usage_perc") == 0
        live.signal(signal.SIGTERM)
        assert live.wait() == 0


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float64", num_threads=1) as llm:
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
