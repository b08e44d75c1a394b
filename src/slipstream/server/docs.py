"""What /docs says about request bodies: made from the fields of `SamplingParams`, so that it names exactly what is read."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.types import SamplingParams

_TEXT_OR_IDS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
_COMMON: dict[str, Any] = {
    "model": {"type": "string"},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "include_draft_details": {"type": "boolean", "default": False, "description": "usage says how each drafter has fared"},
    "max_completion_tokens": {"type": "integer", "description": "another name of max_tokens"},
    "priority": {"type": "integer", "default": 0, "description": "lower runs earlier"},
    "cache_salt": {"type": "string", "description": "only requests with the same salt share cached prompts"},
}


def _sampling() -> dict[str, Any]:
    _, components = msgspec.json.schema_components([SamplingParams])
    return dict(components["SamplingParams"]["properties"])


def _body(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": {**_COMMON, **_sampling(), **properties}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


COMPLETION_DOCS = _body(
    ["model", "prompt"],
    {
        "prompt": {"anyOf": [*_TEXT_OR_IDS["anyOf"], {"type": "array", "items": _TEXT_OR_IDS}]},
        "echo": {"type": "boolean", "default": False},
    },
)
CHAT_DOCS = _body(
    ["model", "messages"],
    {
        "messages": {"type": "array", "items": {"type": "object"}},
        "logprobs": {"type": "boolean", "default": False},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "add_generation_prompt": {"type": "boolean", "default": True},
        "chat_template_kwargs": {"type": "object"},
    },
)
