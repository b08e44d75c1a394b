"""Right requests get right answers, whole and streamed, through HTTP and the engine process."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.events import complete_events, finish_reasons, texts
from tests.server.fake_engine import VOCAB_SIZE
from tests.server.live import DEADLINE_S, LiveServer


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)


def test_openai_client(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="fake", prompt="say(hi there)", logprobs=1)
    assert completion.choices[0].text == "hi there" and completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None and completion.usage.completion_tokens == len("hi there") + 1
    assert completion.choices[0].logprobs is not None and completion.choices[0].logprobs.text_offset == list(range(9))
    chat = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "say(héllo)"}], logprobs=True, top_logprobs=2, seed=1, stop=["zzz"]
    )
    assert chat.choices[0].message.content == "héllo" and chat.choices[0].message.role == "assistant"
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert len(chat.choices[0].logprobs.content) == len("héllo".encode()) + 1
    assert [model.id for model in client.models.list()] == ["fake"] and client.models.retrieve("fake").id == "fake"


def test_openai_client_streams(client: openai.OpenAI) -> None:
    text, finish, usage, roles = "", [], None, []
    for chunk in client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "say(one two) [run=3]"}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            finish += [choice.finish_reason] if choice.finish_reason else []
    assert text == "one two" and finish == ["stop"] and roles == ["assistant"]
    assert usage is not None and usage.completion_tokens == 8


def test_errors_reach_the_openai_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.completions.create(model="fake", prompt="hi", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="hi")
    with pytest.raises(openai.APIError, match="finite"):
        list(client.completions.create(model="fake", prompt="[nan=3]", stream=True))


def test_prompts_in_all_forms(server: LiveServer) -> None:
    ids = [ord(char) for char in "say(abc)"]
    for prompt, wanted in [
        ("say(abc)", ["abc"]),
        (["say(a)", "say(b)"], ["a", "b"]),
        (ids, ["abc"]),
        ([ids, ids], ["abc", "abc"]),
    ]:
        body = server.complete(prompt).json()
        assert [choice["text"] for choice in body["choices"]] == wanted
        assert [choice["index"] for choice in body["choices"]] == list(range(len(wanted)))


def test_max_tokens_has_the_defaults_of_each_route(server: LiveServer) -> None:
    long = "say(" + "x" * 50 + ")"
    completion = server.complete(long).json()
    assert completion["usage"]["completion_tokens"] == 16 and completion["choices"][0]["finish_reason"] == "length"
    chat = server.chat(long).json()
    assert chat["usage"]["completion_tokens"] == 51 and chat["choices"][0]["finish_reason"] == "stop"
    random = server.chat("[random]").json()["usage"]
    assert random["total_tokens"] == 512


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens(server: LiveServer, name: str) -> None:
    assert server.chat("say(hello)", **{name: 2}).json()["choices"][0]["message"]["content"] == "he"
    assert server.chat("say(hello)", max_tokens=2, max_completion_tokens=2).status_code == 200


def test_null_is_the_default(server: LiveServer) -> None:
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "max_tokens",
        "stop",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "max_completion_tokens",
        "response_format",
        "tools",
        "best_of",
        "echo",
    )
    assert server.chat("say(ok)", **dict.fromkeys(names)).json()["choices"][0]["message"]["content"] == "ok"


def test_unknown_fields_are_ignored(server: LiveServer) -> None:
    assert server.chat("say(ok)", my_own={"a": 1}, user="me", metadata={}).status_code == 200


@pytest.mark.parametrize("run", [1, 2, 7])
@pytest.mark.parametrize("ending", ["eos", "string", "length"])
def test_usage_is_the_same_in_all_forms(server: LiveServer, run: int, ending: str) -> None:
    """S06."""
    endings: dict[str, dict[str, Any]] = {"eos": {}, "string": {"stop": "lo w"}, "length": {"max_tokens": 5}}
    fields = endings[ending]
    wanted = {"eos": ("hello world", "stop", 12), "string": ("hel", "stop", 7), "length": ("hello", "length", 5)}[ending]
    prompt = f"say(hello world) [run={run}]"
    whole = server.complete(prompt, logprobs=0, **fields).json()
    choice, usage = whole["choices"][0], whole["usage"]
    assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == wanted
    assert len(choice["logprobs"]["tokens"]) == usage["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == len(prompt) + wanted[2]
    plain = complete_events(server.complete(prompt, stream=True, logprobs=0, **fields))
    assert texts(plain) == {0: wanted[0]} and finish_reasons(plain) == {0: wanted[1]}
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in plain) == wanted[2]
    assert all("usage" not in event for event in plain)
    events = complete_events(server.complete(prompt, stream=True, stream_options={"include_usage": True}, **fields))
    assert [event["usage"] for event in events if event["usage"]] == [usage]
    assert events[-1]["usage"] == usage and events[-1]["choices"] == []
    assert texts(events) == {0: wanted[0]}


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stop, wanted",
    [
        ("nine ten eleven", "seven eight "),
        (["nine ten apple"], "seven eight nine ten eleven"),
        (["eleven", "nine ten eleven", "zz"], "seven eight "),
        ([], "seven eight nine ten eleven"),
        (None, "seven eight nine ten eleven"),
    ],
)
def test_stop_strings_of_many_tokens(server: LiveServer, run: int, stream: bool, stop: Any, wanted: str) -> None:
    """A10, n = 2."""
    response = server.complete(f"say(seven eight nine ten eleven) [run={run}]", stop=stop, stream=stream, n=2, max_tokens=64)
    if not stream:
        assert [choice["text"] for choice in response.json()["choices"]] == [wanted] * 2
        return
    events = complete_events(response)
    assert texts(events) == {0: wanted, 1: wanted} and finish_reasons(events) == {0: "stop", 1: "stop"}
    if wanted == "seven eight ":
        sent = ""
        for event in events:
            sent += event["choices"][0]["text"] if event["choices"][0]["index"] == 0 else ""
            assert wanted.startswith(sent), "a part of the stop string was sent"


def test_an_empty_stop_string_is_refused(server: LiveServer) -> None:
    assert server.complete(stop=["a", ""]).status_code == 400


def test_characters_of_many_tokens_are_sent_whole(server: LiveServer) -> None:
    for run in (1, 2, 3):
        events = complete_events(server.chat(f"say(a€😀é) [run={run}]", stream=True))
        assert texts(events) == {0: "a€😀é"}
        assert "�" not in str(events)


def test_no_character_of_an_answer_ends_the_line_of_its_event(server: LiveServer) -> None:
    """U+2028 and U+0085 end lines for `str.splitlines`, and so for many clients."""
    text = "a\u2028b\x85c\u2029d"
    lines = [line for line in server.complete(f"say({text}) [run=50]", stream=True).text.splitlines() if line]
    said = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    assert "".join(event["choices"][0]["text"] for event in said) == text


class TestSeveralAnswers:
    """A14."""

    def test_a_seed_gives_four_different_answers_twice(self, server: LiveServer) -> None:
        first, second = (server.complete("[random]", n=4, seed=1, temperature=1).json() for _ in range(2))
        answers = [choice["text"] for choice in first["choices"]]
        assert len(set(answers)) == 4 and answers == [choice["text"] for choice in second["choices"]]
        assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
        assert server.complete("[random]", seed=1, temperature=1).json()["choices"][0]["text"] == answers[0]

    def test_greedy_answers_are_equal(self, server: LiveServer) -> None:
        answers = server.complete("[random]", n=4, temperature=0).json()["choices"]
        assert len({choice["text"] for choice in answers}) == 1

    def test_usage_counts_the_prompt_once_and_sums_the_answers(self, server: LiveServer) -> None:
        usage = server.complete("[random]", n=4, max_tokens=5).json()["usage"]
        assert usage["prompt_tokens"] == len("[random]") and usage["completion_tokens"] == 20

    @pytest.mark.parametrize("route", ["chat", "complete"])
    def test_streamed(self, server: LiveServer, route: str) -> None:
        call = server.chat if route == "chat" else server.complete
        whole = call("[random]", n=3, seed=5, temperature=1, max_tokens=9).json()
        events = complete_events(
            call("[random]", n=3, seed=5, temperature=1, max_tokens=9, stream=True, stream_options={"include_usage": True})
        )
        wanted = {choice["index"]: choice.get("text") or choice["message"]["content"] for choice in whole["choices"]}
        assert texts(events) == wanted and finish_reasons(events) == dict.fromkeys(range(3), "length")
        assert events[-1]["usage"] == whole["usage"]
        if route == "chat":
            roles = [choice["index"] for event in events for choice in event["choices"] if "role" in choice["delta"]]
            assert sorted(roles) == [0, 1, 2]

    def test_more_than_run_at_once(self, server: LiveServer) -> None:
        answers = server.complete(["[random]", "say(x)"], n=16, max_tokens=4).json()["choices"]
        assert [choice["index"] for choice in answers] == list(range(32))
        assert [choice["text"] for choice in answers[16:]] == ["x"] * 16
        assert all(len(choice["text"]) == 4 for choice in answers[:16])


def test_sixteen_at_once(server: LiveServer) -> None:
    def one(number: int) -> dict[int, str]:
        if number % 2:
            body = server.complete(f"say(number {number}) [run={number % 3 + 1}]").json()
            return {choice["index"]: choice["text"] for choice in body["choices"]}
        return texts(complete_events(server.chat(f"say(number {number}) [run={number % 3 + 1}]", stream=True)))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [{0: f"number {number}"} for number in range(16)]
    server.until_idle()


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_two_spellings_of_a_message(server: LiveServer, role: str) -> None:
    """A16."""

    def usage(content: Any) -> Any:
        messages = [{"role": "user", "content": "x"}, {"role": role, "content": content, "tool_call_id": "1"}]
        response = server.http.post("/v1/chat/completions", json={"model": "fake", "messages": messages})
        assert response.status_code == 200, response.text
        return response.json()["usage"]

    assert usage("hi") == usage([{"type": "text", "text": "hi"}])
    assert usage("hi\nho") == usage([{"type": "text", "text": "hi"}, {"type": "text", "text": "ho"}])


def test_the_last_real_id_works(server: LiveServer) -> None:
    """A02."""
    last = VOCAB_SIZE - 1
    assert server.complete(logit_bias={str(last): 1}, stop_token_ids=[last]).status_code == 200
    assert server.complete([ord("a"), last]).status_code == 200


def test_stop_token_ids(server: LiveServer) -> None:
    choice = server.complete("say(abc)", stop_token_ids=[ord("b")]).json()["choices"][0]
    assert choice["text"] == "a" and choice["finish_reason"] == "stop" and choice["stop_reason"] == ord("b")
    choice = server.complete("say(abc)", ignore_eos=True, skip_special_tokens=False, max_tokens=5).json()["choices"][0]
    assert choice["text"] == "abc<eos><eos>" and choice["finish_reason"] == "length"


def test_request_ids(server: LiveServer) -> None:
    given = server.http.get("/health", headers={"X-Request-Id": "abc-1"}).headers
    assert given["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 200, ""):
        drawn = server.http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert drawn.startswith("req-")
    assert server.complete("x", temperature=-1).headers["x-request-id"].startswith("req-")


def test_docs(server: LiveServer) -> None:
    page = server.http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(paths)
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "temperature", "stop", "stream"} <= set(body["properties"])
    for path in paths:
        assert path in page.text
    for field in (*body["properties"], "messages"):
        assert f"<code>{field}</code>" in page.text


def test_types_read_well(server: LiveServer) -> None:
    text = re.sub(r"<[^>]+>", " ", server.http.get("/docs").text)
    assert re.search(r" top_logprobs +integer, 0 to 20 ", text) and re.search(r" max_tokens +integer or null +16 ", text)
    assert re.search(r" prompt +string or list of integer or list of \(string or list of integer\) +required ", text)


def test_docs_need_no_internet(server: LiveServer) -> None:
    page = server.http.get("/docs")
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", page.text)
    assert re.findall(r"(?:src|href)=\S+?>", page.text) == ['href="/openapi.json">']
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


def test_metrics(server: LiveServer) -> None:
    server.until_idle()
    before = {
        name: server.gauge(name) for name in ("prompt_tokens_total", "generation_tokens_total", "engine_output_tokens_total")
    }
    stops = server.gauge('request_success_total{finished_reason="stop"}')
    firsts = server.gauge("time_to_first_token_seconds_count")
    gaps = server.gauge("inter_token_latency_seconds_count")
    complete_events(server.complete("say(12345) [run=2]", stream=True, n=2))
    assert server.gauge("prompt_tokens_total") == before["prompt_tokens_total"] + len("say(12345) [run=2]")
    assert server.gauge("generation_tokens_total") == before["generation_tokens_total"] + 12
    assert server.gauge("engine_output_tokens_total") == before["engine_output_tokens_total"] + 12
    assert server.gauge('request_success_total{finished_reason="stop"}') == stops + 2
    assert server.gauge("time_to_first_token_seconds_count") == firsts + 2
    assert server.gauge("inter_token_latency_seconds_count") == gaps + 2 * 2  # three outputs of two tokens
    assert server.gauge("kv_cache_usage_perc") == 0
