"""Load for a server that speaks OpenAI's API: streams requests and notes when their tokens arrive."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from slipstream.cli.events import EventData
from slipstream.cli.measure import Timeline
from slipstream.errors import ConfigError

# Common words, so that a random prompt of N words is about N tokens for every tokenizer.
_WORDS = (  # noqa: SIM905 - a list of a hundred strings would be a screen long
    "the of and to in is that it was for on are as with they be at one have this from or had by hot word but what some we "
    "can out other were all there when up use your how said an each she which do their time if will way about many then them "
    "write would like so these her long make thing see him two has look more day could go come did number sound no most people"
).split()


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. `request_rate` is in requests a second (None: as fast as `concurrency` allows), with random gaps."""

    base_url: str
    endpoint: Literal["completions", "chat"]
    concurrency: int
    max_tokens: int
    api_key: str | None = None
    model: str | None = None
    request_rate: float | None = None
    ignore_eos: bool = False
    seed: int = 0


@dataclass(slots=True)
class Measured:
    """What came back. `errors` has one text for each request that failed; the others are in `timelines`."""

    model: str
    wall_s: float = 0.0
    timelines: list[Timeline] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def measure(load: Load, prompts: Sequence[str]) -> Measured:
    """Send one request a prompt, after one that is not counted. Raises `ConfigError` where no server answers."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.concurrency)
    # trust_env=False: a proxy between us and the server would be measured with it.
    async with httpx.AsyncClient(
        base_url=load.base_url, headers=headers, timeout=httpx.Timeout(600, connect=10), limits=limits, trust_env=False
    ) as client:
        measured = Measured(load.model or await _first_model(client))
        await _one(client, load, prompts[0], Measured(measured.model))
        gate = asyncio.Semaphore(load.concurrency)
        started = time.perf_counter()
        tasks = []
        async for prompt in _paced(prompts, load):
            await gate.acquire()
            task = asyncio.create_task(_one(client, load, prompt, measured))
            task.add_done_callback(lambda _: gate.release())
            tasks.append(task)
        await asyncio.gather(*tasks)
        measured.wall_s = time.perf_counter() - started
    return measured


def random_words(count: int, num_words: int, seed: int) -> list[str]:
    """Prompts of random common words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS, k=num_words)) for _ in range(count)]


async def _paced(prompts: Sequence[str], load: Load) -> AsyncIterator[str]:
    draw = random.Random(load.seed)
    due = time.perf_counter()
    for prompt in prompts:
        if load.request_rate is not None:
            due += draw.expovariate(load.request_rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield prompt


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise ConfigError(
            f"the server must list its models, but got HTTP {error.response.status_code}: {error.response.text[:200]}",
            hint="--api-key KEY or OPENAI_API_KEY where it asks for a key",
        ) from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"a server must answer at {client.base_url}, but got {type(error).__name__}: {error}",
            hint="--base-url names the server; slipstream serve starts one",
        ) from None


async def _one(client: httpx.AsyncClient, load: Load, prompt: str, measured: Measured) -> None:
    """Send one request and note its tokens, or its error, in `measured`."""
    body: dict[str, Any] = {
        "model": measured.model,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.endpoint == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
    else:
        path, body["prompt"] = "/v1/completions", prompt
    timeline = Timeline(time.perf_counter())
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise ValueError(f"HTTP {response.status_code}: {text[:200]}")
            events = EventData()
            async for piece in response.aiter_bytes():
                for data in events.feed(piece):
                    if data != "[DONE]":
                        _note(timeline, json.loads(data))
        if not timeline.arrivals_s:
            raise ValueError("no token")
    except (httpx.HTTPError, ValueError) as error:
        measured.errors.append(f"{type(error).__name__}: {error}" if isinstance(error, httpx.HTTPError) else str(error))
        return
    measured.timelines.append(timeline)


def _note(timeline: Timeline, event: dict[str, Any]) -> None:
    """Take one event of a stream. Usage, which comes last, is the true count; before it each event with text counts as one."""
    if "error" in event:
        raise ValueError(f"an error event: {json.dumps(event['error'])[:200]}")
    if usage := event.get("usage"):
        timeline.num_prompt_tokens, timeline.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            timeline.arrivals_s.append(time.perf_counter())
            timeline.num_tokens += 1
