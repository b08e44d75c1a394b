"""K06: a client that hangs up in the middle of its prompt's chunks, on `slipstream serve` with the real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import serve_real
from tests.server.live import LiveServer, in_thread
from tests.server.test_hang_up import Call, aborts, busy
from tests.tiny_checkpoints import save, tiny

PROMPT = "".join(chr(97 + i * i % 23) for i in range(2000))
HANG_UPS_S = (0.005, 0.02, 0.06)
NUM_TURNS = 20


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for 2,000 prompt tokens, and no EOS that anything would hit."""
    return save(tiny("llama", max_position_embeddings=4096, eos_token_id=[2]), tmp_path_factory.mktemp("long"))


@pytest.fixture(params=["cached", "uncached"])
def patient(request: pytest.FixtureRequest, long_folder: Path) -> Iterator[LiveServer]:
    """A server that computes prompts in chunks of 64, with the prefix cache and without."""
    caching = "--enable-prefix-caching" if request.param == "cached" else "--no-enable-prefix-caching"
    with serve_real(long_folder, "--max-num-batched-tokens", 64, "--num-pages", 512, caching) as live:
        yield live


def pages(server: LiveServer, state: str) -> float:
    return server.gauge(f'kv_cache_pages{{state="{state}"}}')


def test_k06_hung_up_in_the_middle_of_a_prompt(patient: LiveServer, request: pytest.FixtureRequest) -> None:
    """Twenty hang-ups 5, 20 and 60 ms behind the request, beside one long answer: that, and the same prompt later, are right."""
    fields = {"temperature": 0, "ignore_eos": True}
    wanted_beside = patient.complete("beside", max_tokens=600, **fields).json()["choices"][0]["text"]
    wanted = patient.complete(PROMPT, max_tokens=8, cache_salt="alone", **fields).json()
    assert wanted["usage"]["prompt_tokens"] >= 1900
    patient.until_idle()
    computed = patient.gauge("engine_prompt_tokens_total")

    beside, results = in_thread(lambda: patient.complete("beside", max_tokens=600, **fields))
    busy(patient, running=1)
    for turn in range(NUM_TURNS):
        # Its own prefix, or one that others have begun to compute.
        call = Call(patient, "/v1/completions", prompt=PROMPT, max_tokens=8, stream=True, cache_salt=str(turn % 7), **fields)
        time.sleep(HANG_UPS_S[turn % len(HANG_UPS_S)])
        call.hang_up()
    patient.until(lambda: aborts(patient) == NUM_TURNS, "the end of all that hung up")
    beside.join()
    patient.until_idle()
    assert results[0].json()["choices"][0]["text"] == wanted_beside
    spent = patient.gauge("engine_prompt_tokens_total") - computed
    assert 64 <= spent < NUM_TURNS * 2000 * 0.9, "the hang-ups must fall into prompts"

    again = patient.complete(PROMPT, max_tokens=8, cache_salt="0", **fields).json()
    assert again["choices"][0]["text"] == wanted["choices"][0]["text"]
    patient.until_idle()
    assert pages(patient, "used") == 0 and pages(patient, "free") + pages(patient, "evictable") == 512
    assert (pages(patient, "evictable") > 0) == ("[cached]" in request.node.name)
    assert patient.http.get("/health").status_code == 200
