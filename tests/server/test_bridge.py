"""The front's end of a real engine process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from slipstream.config import EngineConfig
from slipstream.errors import EngineBusy, EngineDead, ModelError
from slipstream.server.bridge import EngineClient, OutputStream
from slipstream.types import EngineRequest, SamplingParams
from tests.server.fake_engine import TOKENIZER
from tests.server.live import DEADLINE_S, gone


def client_for(model: str) -> EngineClient:
    return EngineClient(EngineConfig(model=model, max_num_seqs=2, api_key="secret"), "tests.server.fake_engine:build")


def request(name: str, prompt: str) -> EngineRequest:
    return EngineRequest(name, tuple(TOKENIZER.encode(prompt)), SamplingParams(max_tokens=400), 0)


async def text_of(stream: OutputStream) -> str:
    tokens = [token async for news in stream for output in news for token in output.token_ids]
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = client_for("fake")
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


async def test_answers_go_to_their_own_streams(client: EngineClient) -> None:
    prompts = [f"say(answer {number}) [run={number % 3 + 1}]" for number in range(6)]
    streams = [client.generate([request(f"r{number}", prompt)]) for number, prompt in enumerate(prompts)]
    assert await asyncio.gather(*map(text_of, streams)) == [f"answer {number}" for number in range(6)]
    assert client.num_open == 0 and (await client.stats()).num_running == 0


async def test_a_reset_of_the_prefix_cache_returns_once_it_is_done(client: EngineClient) -> None:
    assert (await anext(client.generate([request("a", "say(x) [cached=3]")])))[0].num_cached_tokens == 3
    await client.reset_prefix_cache()
    assert (await anext(client.generate([request("b", "say(x) [cached=3]")])))[0].num_cached_tokens == 0


async def test_a_reset_that_is_not_answered_in_time_is_no_success(client: EngineClient) -> None:
    stream = client.generate([request("slow", "[freeze=1] say(x)")])
    await asyncio.sleep(0.2)
    with pytest.raises(EngineBusy, match="answer within"):
        await client.reset_prefix_cache(timeout_s=0.1)
    await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await client.reset_prefix_cache()


async def test_closing_a_stream_aborts_it_and_no_other(client: EngineClient) -> None:
    """S27."""
    hanging, other = client.generate([request("r1", "[hang]")]), client.generate([request("r10", "say(other) [delay=0.02]")])
    waiting = asyncio.create_task(text_of(hanging))
    await asyncio.sleep(0)
    hanging.close()
    hanging.close()
    assert await waiting == "" and await text_of(other) == "other"
    async with asyncio.timeout(DEADLINE_S):
        while (await client.stats()).num_running:
            pass
    again = client.generate([request("r1", "say(again)")])
    assert await text_of(again) == "again"


async def test_nothing_is_handed_out_after_closing(client: EngineClient) -> None:
    stream = client.generate([request("r1", "[random] [delay=0.01]")])
    await anext(stream)
    await asyncio.sleep(0.05)  # more has come in
    stream.close()
    assert [news async for news in stream] == []


async def test_failing_a_stream(client: EngineClient) -> None:
    stream = client.generate([request("r1", "[hang]"), request("r2", "[hang]")])
    stream.fail(EngineBusy("stopping"))
    with pytest.raises(EngineBusy):
        await anext(stream)
    assert client.num_open == 0


async def test_liveness_and_stats(client: EngineClient) -> None:
    assert client.liveness().is_alive
    assert (await client.stats()).num_pages == 2


async def test_the_process_dies(client: EngineClient) -> None:
    stream, queued = (
        client.generate([request("r1", "[hang]"), request("r2", "[hang]")]),
        client.generate([request("r3", "say(x)")]),
    )
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    for one in (stream, queued):
        with pytest.raises(EngineDead, match="SIGKILL"):
            await anext(one)
    assert isinstance(await client.died(), EngineDead) and not client.liveness().is_alive
    with pytest.raises(EngineDead):
        await anext(client.generate([request("r4", "say(x)")]))


async def test_stopping_leaves_no_process() -> None:
    client = client_for("fake")
    await client.start()
    pid = client.pid
    assert pid is not None
    await client.stop()
    assert gone(pid)


async def test_the_error_that_kept_it_from_loading() -> None:
    client = client_for("fake-damaged")
    phases: list[str] = []
    try:
        with pytest.raises(ModelError, match="must be whole") as caught:
            await client.start(lambda phase, fraction: phases.append(phase))
        assert caught.value.hint == "fetch it again" and phases == ["starting engine"]
    finally:
        await client.stop()
