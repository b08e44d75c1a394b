"""Logprobs as the OpenAI routes write them.

    completions       {"tokens": [], "token_logprobs": [], "top_logprobs": [{token: logprob}], "text_offset": []}
    chat              [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}]
    prompt_logprobs   [null, {"17": {"logprob": -0.2, "rank": 1, "decoded_token": " a"}, ...}, ...]         as vLLM has it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.text.tokenizer import Tokenizer
from slipstream.types import TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own stand-in

Json = dict[str, Any]


def token_name(data: bytes) -> str:
    """A token's bytes as text; where they are no whole characters, spelled out as OpenAI does (`bytes:\\xe2\\x82`)."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A logprob that JSON can write."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # also for NaN


def completion_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, text_offset: list[int]) -> Json:
    """The `logprobs` of a completion."""
    return {
        "tokens": [token_name(tokenizer.token_bytes(one.token_id)) for one in entries],
        "token_logprobs": [finite(one.logprob) for one in entries],
        "top_logprobs": [_top(one, tokenizer) for one in entries],
        "text_offset": text_offset,
    }


def joined(first: Json, second: Json) -> Json:
    """`logprobs` of two pieces of one text."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer) -> list[Json | None]:
    """The `prompt_logprobs` of a response: for each prompt token its own entry and the `num_top` best, by token id."""
    return [None if one is None else _by_id(one, num_top, tokenizer) for one in entries]


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[Json]:
    """The `logprobs.content` of a chat completion."""
    return [
        {
            **_token(one.token_id, one.logprob, tokenizer),
            "top_logprobs": [_token(*pair, tokenizer) for pair in zip(one.top_ids, one.top_logprobs, strict=True)],
        }
        for one in entries
    ]


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    data = tokenizer.token_bytes(token_id)
    return {"token": token_name(data), "logprob": finite(logprob), "bytes": list(data)}


def _top(one: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Best first, and the chosen token in any case. Of two tokens that are spelled alike the better one counts."""
    top: dict[str, float] = {}
    for token_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
        top.setdefault(token_name(tokenizer.token_bytes(token_id)), finite(logprob))
    top.setdefault(token_name(tokenizer.token_bytes(one.token_id)), finite(one.logprob))
    return top


def _by_id(one: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> Json:
    best = zip(one.top_ids[:num_top], one.top_logprobs[:num_top], strict=True)
    listed = [(token_id, logprob, place) for place, (token_id, logprob) in enumerate(best, 1)]
    if one.token_id not in one.top_ids[:num_top]:
        listed.insert(0, (one.token_id, one.logprob, one.rank))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": token_name(tokenizer.token_bytes(token_id)),
        }
        for token_id, logprob, rank in listed
    }
