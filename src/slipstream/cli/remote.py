"""A model behind a server that speaks OpenAI's API: the other thing `chat` can talk to."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import httpx

from slipstream.cli.events import EventData
from slipstream.cli.tally import Tally
from slipstream.errors import ConfigError, EngineError, InvalidRequest, SlipstreamError, shown

CONNECT_S = 10.0
SILENCE_S = 600.0  # a long prompt on a slow machine says nothing for minutes


class RemoteModel:
    """Streams chat completions. Also a context manager, which closes the connection.

    Args:
        url: the server, with or without /v1.
        api_key: bearer token, where the server asks for one.
        model: name to ask for; None: the first one the server lists.

    Raises `ConfigError` where no such server answers.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base = url.rstrip("/").removesuffix("/v1")
        try:
            self._client = httpx.Client(
                base_url=f"{base}/v1", headers=headers, timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S)
            )
            self.name = model or self._first_model()
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            hint = None if "://" in url else f"--url http://{url}"
            raise ConfigError(f"--url must be an http address, but got {url!r}: {error}", hint=hint) from None

    def reply(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any], tally: Tally) -> Iterator[str]:
        """The reply to a conversation, as it arrives. Raises `InvalidRequest` where the server refuses it, else `EngineError`."""
        body = {"model": self.name, "messages": list(messages), **fields, "stream": True}
        body["stream_options"] = {"include_usage": True}
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, response.read())
                events = EventData()
                for data in itertools.chain.from_iterable(map(events.feed, response.iter_bytes())):
                    if data == "[DONE]":
                        return
                    if data:
                        yield from _text(json.loads(data), tally)
            raise EngineError("the server must end its stream with [DONE], but cut it off")
        except httpx.HTTPError as error:
            raise EngineError(f"the server must keep answering, but got {type(error).__name__}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"the server must stream OpenAI's events, but got {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _first_model(self) -> str:
        try:
            response = self._client.get("/models")
        except httpx.UnsupportedProtocol:
            raise
        except httpx.HTTPError as error:
            raise ConfigError(
                f"a server must answer at {self._client.base_url}, but got {type(error).__name__}: {error}",
                hint="--url names the server; slipstream serve starts one",
            ) from None
        if response.status_code != 200:
            hint = "--api-key KEY or OPENAI_API_KEY" if response.status_code in (401, 403) else "--model names one without asking"
            said = shown(response.text)
            raise ConfigError(f"the server must list its models, but got HTTP {response.status_code}: {said}", hint=hint)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"the server must list its models, but got {shown(response.text)}", hint="--model names one without asking"
            ) from None


def _text(event: Mapping[str, Any], tally: Tally) -> Iterator[str]:
    """The text of one event; what it tells of usage is noted."""
    if error := event.get("error"):
        raise EngineError(f"the server must finish its answer, but got: {_message(error)}")
    if usage := event.get("usage"):
        tally.num_prompt_tokens, tally.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        tally.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in event.get("choices") or ():
        if text := choice["delta"].get("content"):
            tally.arrived()
            yield text


def _refusal(status: int, body: bytes) -> SlipstreamError:
    try:
        said = _message(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        said = shown(body.decode(errors="replace"))
    text, _, hint = said.partition("\nhint: ")  # our own servers end with one
    kind = InvalidRequest if 400 <= status < 500 else EngineError
    return kind(f"the server must accept the request, but got HTTP {status}: {text}", hint=hint or None)


def _message(error: Any) -> str:
    return str(error["message"]) if isinstance(error, dict) and "message" in error else shown(error)
