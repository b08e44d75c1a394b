"""S06, A10, A13, A14, S27 over HTTP with drafts: what `slipstream serve --speculate` answers is what it answers without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import serve_real
from tests.server.events import complete_events, finish_reasons, texts
from tests.server.live import LiveServer
from tests.server.test_hang_up import Call, busy

PROMPT = "alpha beta gamma " * 4
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module", params=["draft_model", "ngram"])
def drafting(request: pytest.FixtureRequest, real_folder: Path) -> Iterator[LiveServer]:
    """Seven tokens a step, as often as may be; the draft model is the target."""
    spec = {"draft_model": f"draft_model:model={real_folder},width=7", "ngram": "ngram:width=7"}[request.param]
    with serve_real(real_folder, "--speculate", spec, "--no-adaptive-speculation") as live:
        yield live
        live.until_idle()
        assert live.gauge("kv_cache_usage_perc") == 0
        drafted, accepted = (live.gauge(f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted"))
        assert 0 < accepted <= drafted
        if request.param == "draft_model":
            assert accepted > 0.5 * live.gauge("engine_output_tokens_total")


def whole(server: LiveServer, **fields: Any) -> Any:
    body = server.complete(PROMPT, **fields).json()
    return [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]], without_cached(body["usage"])


def without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    """Usage but for what depends on the calls before, and on the drafter."""
    return {name: value for name, value in usage.items() if not name.endswith("_details")}


def an_end(server: LiveServer) -> str:
    """A piece of the greedy answer that occurs in it for the first time, as a stop string."""
    ((_, text, _),), _ = whole(server, temperature=0, max_tokens=40, ignore_eos=True)
    pieces = [(at, text[at : at + 4]) for at in range(8, len(text) - 4)]
    return next(piece for at, piece in pieces if text.find(piece) == at and "\ufffd" not in piece)


@pytest.mark.parametrize("end", ["length", "eos", "stop", "stop kept", "min_tokens"])
def test_s06_one_answer_and_one_count_in_all_forms(real_server: LiveServer, drafting: LiveServer, end: str) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": end != "eos"}
    if end == "eos":
        fields |= {"logit_bias": {"40": 6}, "temperature": 1, "seed": 3}
    elif end != "length":
        fields |= {"stop": an_end(real_server), "include_stop_str_in_output": end == "stop kept"}
    if end == "min_tokens":
        fields["min_tokens"] = 30
    wanted, usage = whole(real_server, **fields)
    ((_, text, reason),) = wanted
    assert reason == ("length" if end in ("length", "min_tokens") else "stop") and usage["completion_tokens"] > 1
    assert whole(drafting, **fields) == (wanted, usage)
    plain = complete_events(drafting.complete(PROMPT, stream=True, **fields))
    assert texts(plain) == {0: text} and finish_reasons(plain) == {0: reason}
    events = complete_events(drafting.complete(PROMPT, logprobs=0, **USAGE, **fields))
    assert texts(events) == {0: text} and finish_reasons(events) == {0: reason}
    assert [without_cached(event["usage"]) for event in events if event["usage"]] == [usage] and events[-1]["choices"] == []
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events[:-1]) == usage["completion_tokens"]


def test_usage_says_what_drafts_came_to(real_server: LiveServer, drafting: LiveServer) -> None:
    """Whole and in a stream, over all choices, by drafter where it was asked for; plain decoding says nothing of drafts."""
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "n": 2}
    usage = drafting.complete(PROMPT, include_draft_details=True, **fields).json()["usage"]
    totals, details = usage["completion_tokens_details"], usage["draft_details"]
    ((name, mine),) = details.items()
    assert name in ("draft_model", "ngram") and mine["accepted"] == sum(mine["accepted_by_position"])
    assert totals == {
        "accepted_prediction_tokens": mine["accepted"],
        "rejected_prediction_tokens": mine["drafted"] - mine["accepted"],
    }
    if name == "draft_model":
        assert 0.5 * 80 < mine["accepted"] < 80 and len(mine["accepted_by_position"]) == 7
    events = complete_events(drafting.complete(PROMPT, include_draft_details=True, **USAGE, **fields))
    assert set(events[-1]["usage"]) == set(usage) and events[-1]["usage"]["completion_tokens"] == 80
    assert events[-1]["usage"]["draft_details"][name]["accepted"] > 0
    chat = drafting.chat("hello", max_tokens=20, ignore_eos=True, speculate=False, include_draft_details=True).json()["usage"]
    assert chat["draft_details"] == {} and set(chat["completion_tokens_details"].values()) == {0}
    assert "draft_details" not in drafting.complete(PROMPT, **fields).json()["usage"]
    plain = real_server.complete(PROMPT, **fields).json()["usage"]
    assert "completion_tokens_details" not in plain and "draft_details" not in plain


def test_a13_ignore_eos_on_chat(drafting: LiveServer) -> None:
    for seed in range(4):
        body = drafting.chat("hello", seed=seed, ignore_eos=True, max_tokens=50).json()
        assert body["usage"]["completion_tokens"] == 50 and body["choices"][0]["finish_reason"] == "length"


def test_a14_several_answers(real_server: LiveServer, drafting: LiveServer) -> None:
    fields = {"n": 4, "seed": 1, "temperature": 1, "max_tokens": 30}
    wanted = whole(real_server, **fields)
    assert whole(drafting, **fields) == whole(drafting, **fields) == wanted
    assert len({text for _, text, _ in wanted[0]}) == 4
    greedy, _ = whole(drafting, n=4, temperature=0, max_tokens=30)
    assert len({text for _, text, _ in greedy}) == 1
    events = complete_events(drafting.complete(PROMPT, **{**fields, "n": 2}, **USAGE))
    assert texts(events) == {index: text for index, text, _ in wanted[0][:2]}
    assert without_cached(events[-1]["usage"]) == whole(real_server, **{**fields, "n": 2})[1]


@pytest.mark.parametrize("stream", [False, True])
def test_s27_hung_up_in_the_middle_of_four_answers(real_server: LiveServer, drafting: LiveServer, stream: bool) -> None:
    """Soon nothing runs any more, and who asks the same at once gets the answer."""
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    call = Call(drafting, "/v1/completions", **fields, n=4, max_tokens=180, stream=stream)
    if stream:
        call.until(b'"index":3,', 2)
    else:
        busy(drafting, running=4)
    call.hang_up()
    began = time.monotonic()
    assert whole(drafting, temperature=0, max_tokens=9) == whole(real_server, temperature=0, max_tokens=9)
    drafting.until_idle()
    assert time.monotonic() - began < 10, "about two seconds, on a machine that may be slow"
