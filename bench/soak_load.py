"""The mixed load of bench.soak: what clients ask, in every way they can, and what must hold of each answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from slipstream.cli.events import EventData
from slipstream.cli.measure import Timeline

MAX_ERRORS = 50  # then something is broken for good
WORDS = (
    "the",
    "sea",
    "river",
    "stone",
    "light",
    "north",
    "under",
    "small",
    "bridge",
    "answer",
    "quiet",
    "engine",
    "paper",
    "window",
)


class Unexpected(Exception):
    """An answer that should not be."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the requests ask for. `long`, `short`: characters of prompts. `exact`: equal seeds must give equal text."""

    long: int
    short: int
    max_tokens: int
    exact: bool


@dataclass(slots=True)
class Tally:
    """What has happened. `timelines` of answered calls by kind; `differences`: seeds whose two answers were not the same."""

    counts: Counter[str] = field(default_factory=Counter)
    timelines: dict[str, list[Timeline]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    num_output_tokens: int = 0
    differences: int = 0


class Load:
    """Clients that ask until it is time to stop.

    Args:
        http: a client whose base is the server's address.
        model: what the server calls its model.
        sizes: of the requests.
        seed: of everything that is drawn.
    """

    def __init__(self, http: httpx.AsyncClient, model: str, sizes: Sizes, seed: int) -> None:
        self.tally = Tally()
        self._http = http
        self._model = model
        self._sizes = sizes
        self._seed = seed
        rng = random.Random(seed)
        self._prefixes = [_text(rng, sizes.long) for _ in range(4)]
        self._kinds: dict[str, tuple[int, Callable[[random.Random, str], Awaitable[None]]]] = {
            "completion": (4, self._completion),
            "chat": (3, self._chat),
            "completion stream": (4, self._completion_stream),
            "chat stream": (3, self._chat_stream),
            "long prompt": (2, self._long_prompt),
            "shared prefix": (4, self._shared_prefix),
            "n": (2, self._several),
            "same seed": (2, self._same_seed),
            "logprobs": (2, self._logprobs),
            "hang up": (2, self._hang_up),
            "abort": (2, self._abort),
            "refused": (1, self._refused),
        }

    async def fill(self, count: int) -> None:
        """Ask for `count` long answers at once, so that every page and buffer has been touched before memory is looked at."""
        rng = random.Random(f"{self._seed}/fill")
        bodies = [self._body(rng, prompt=_text(rng, self._sizes.long), ignore_eos=True, stop=None) for _ in range(count)]
        try:
            await asyncio.gather(*(self._whole("fill", "completions", body) for body in bodies))
        except (Unexpected, httpx.HTTPError) as error:
            self.tally.errors.append(f"fill: {type(error).__name__}: {error}")

    async def client(self, number: int, until_s: float) -> None:
        """One client: asks, checks, asks again, until that time (`time.monotonic`) or until too much has gone wrong."""
        rng = random.Random(f"{self._seed}/{number}")
        kinds = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while time.monotonic() < until_s and len(self.tally.errors) < MAX_ERRORS:
            kind = rng.choices(kinds, weights)[0]
            self.tally.counts[kind] += 1
            try:
                await self._kinds[kind][1](rng, kind)
            except (Unexpected, httpx.HTTPError) as error:
                self.tally.errors.append(f"{kind}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    # -- kinds ------------------------------------------------------------------------------------------------------

    async def _completion(self, rng: random.Random, kind: str) -> None:
        await self._whole(kind, "completions", self._body(rng, prompt=_text(rng, self._sizes.short)))

    async def _chat(self, rng: random.Random, kind: str) -> None:
        await self._whole(kind, "chat/completions", self._body(rng, messages=_messages(rng, self._sizes.short)))

    async def _completion_stream(self, rng: random.Random, kind: str) -> None:
        await self._stream(kind, "completions", self._body(rng, prompt=_text(rng, self._sizes.short)))

    async def _chat_stream(self, rng: random.Random, kind: str) -> None:
        await self._stream(kind, "chat/completions", self._body(rng, messages=_messages(rng, self._sizes.short)))

    async def _long_prompt(self, rng: random.Random, kind: str) -> None:
        await self._whole(
            kind, "completions", self._body(rng, prompt=_text(rng, rng.randint(self._sizes.short, self._sizes.long)))
        )

    async def _shared_prefix(self, rng: random.Random, kind: str) -> None:
        prompt = rng.choice(self._prefixes)[: -rng.randint(1, self._sizes.short)] + rng.choice(WORDS)
        await self._stream(kind, "completions", self._body(rng, prompt=prompt))

    async def _several(self, rng: random.Random, kind: str) -> None:
        await self._whole(kind, "completions", self._body(rng, prompt=_text(rng, self._sizes.short), n=rng.randint(2, 4)))

    async def _same_seed(self, rng: random.Random, kind: str) -> None:
        body = self._body(rng, prompt=_text(rng, self._sizes.short), seed=rng.randrange(2**31), temperature=1.0)
        one, other = await asyncio.gather(self._whole(kind, "completions", body), self._whole(kind, "completions", body))
        if [choice["text"] for choice in one["choices"]] != [choice["text"] for choice in other["choices"]]:
            self.tally.differences += 1
            if self._sizes.exact:
                raise Unexpected(f"equal seeds must give equal answers, but did not for {json.dumps(body)}")

    async def _logprobs(self, rng: random.Random, kind: str) -> None:
        answer = await self._whole(kind, "completions", self._body(rng, prompt=_text(rng, self._sizes.short), logprobs=3, n=1))
        got, wanted = len(answer["choices"][0]["logprobs"]["tokens"]), answer["usage"]["completion_tokens"]
        if got != wanted:
            raise Unexpected(f"each of {wanted} tokens must have logprobs, but {got} have")

    async def _hang_up(self, rng: random.Random, kind: str) -> None:
        body = self._body(rng, prompt=_text(rng, self._sizes.short), max_tokens=4 * self._sizes.max_tokens, ignore_eos=True)
        left = rng.randint(0, 6)
        async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise Unexpected(f"a stream must begin, but got {response.status_code}: {(await response.aread())[:200]!r}")
            async for _ in response.aiter_raw():
                if (left := left - 1) < 0:
                    break

    async def _abort(self, rng: random.Random, kind: str) -> None:
        """Give up soon, often before the first token."""
        body = self._body(rng, prompt=_text(rng, self._sizes.long), max_tokens=4 * self._sizes.max_tokens, ignore_eos=True)
        try:
            async with asyncio.timeout(rng.choice((0.0, 0.005, 0.05, 0.2))):
                await self._whole(kind, "completions", body)
        except TimeoutError:
            self.tally.counts["abort, given up"] += 1

    async def _refused(self, rng: random.Random, kind: str) -> None:
        wrong: dict[str, Any] = rng.choice(
            ({"temperature": -1}, {"max_tokens": 0}, {"prompt": ""}, {"prompt": [10**9]}, {"n": "two"}, {"logit_bias": {"x": 1}})
        )
        response = await self._http.post("/v1/completions", json={**self._body(rng, prompt="x"), **wrong})
        if response.status_code != 400:
            raise Unexpected(f"{wrong} must be refused with 400, but got {response.status_code}: {response.text[:200]}")

    # -- calls ------------------------------------------------------------------------------------------------------

    def _body(self, rng: random.Random, **fields: Any) -> dict[str, Any]:
        """A request with sampling parameters drawn at random, and the given fields."""
        drawn: dict[str, Any] = {
            "model": self._model,
            "max_tokens": rng.randint(1, self._sizes.max_tokens),
            "temperature": rng.choice((0, 0.7, 1.0)),
        }
        for chance, more in (
            (0.2, {"top_p": 0.9}),
            (0.2, {"top_k": 20}),
            (0.1, {"repetition_penalty": 1.2}),
            (0.1, {"presence_penalty": 0.5, "frequency_penalty": 0.5}),
            (0.2, {"seed": rng.randrange(1000)}),
            (0.2, {"stop": ["e", "zz"]}),
            (0.1, {"min_tokens": 1}),
        ):
            if rng.random() < chance:
                drawn |= more
        return {**drawn, **fields}

    async def _whole(self, kind: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
        timeline = Timeline(time.monotonic())
        response = await self._http.post(f"/v1/{route}", json=body)
        if response.status_code != 200:
            raise Unexpected(f"status must be 200, but got {response.status_code}: {response.text[:200]}")
        answer: dict[str, Any] = response.json()
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        self._done(kind, body, timeline, reasons, answer["usage"])
        timeline.arrivals_s.append(time.monotonic())
        return answer

    async def _stream(self, kind: str, route: str, body: dict[str, Any]) -> None:
        timeline, reasons, usage = Timeline(time.monotonic()), [], None
        async for event in self._events(f"/v1/{route}", {**body, "stream": True, "stream_options": {"include_usage": True}}):
            timeline.arrivals_s.append(time.monotonic())
            usage = event.get("usage") or usage
            reasons += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
        if usage is None:
            raise Unexpected("a stream must end with its usage, but did not")
        self._done(kind, body, timeline, reasons, usage)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        is_done = False
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise Unexpected(f"status must be 200, but got {response.status_code}: {(await response.aread())[:200]!r}")
            lines = EventData()
            async for piece in response.aiter_bytes():
                for data in lines.feed(piece):
                    if data == "[DONE]":
                        is_done = True
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise Unexpected(f"a stream must not be cut off, but got {event['error']}")
                    yield event
        if not is_done:
            raise Unexpected("a stream must end with [DONE], but did not")

    def _done(self, kind: str, body: dict[str, Any], timeline: Timeline, reasons: list[str], usage: dict[str, Any]) -> None:
        wanted = body.get("n", 1)
        if len(reasons) != wanted or not set(reasons) <= {"stop", "length"}:
            raise Unexpected(f"{wanted} answers must end with stop or length, but got {reasons}")
        timeline.num_prompt_tokens, timeline.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not wanted <= timeline.num_tokens <= wanted * body["max_tokens"]:
            raise Unexpected(
                f"{wanted} answers of 1 to {body['max_tokens']} tokens must come, but got {timeline.num_tokens} tokens"
            )
        self.tally.num_output_tokens += timeline.num_tokens
        self.tally.timelines.setdefault(kind, []).append(timeline)


def _text(rng: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += rng.choice(WORDS) + " "
    return text[: rng.randint(max(1, length // 2), length)]


def _messages(rng: random.Random, length: int) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": _text(rng, length)}]
    if rng.random() < 0.3:
        turns += [{"role": "assistant", "content": _text(rng, length // 2)}, {"role": "user", "content": rng.choice(WORDS)}]
    return turns
