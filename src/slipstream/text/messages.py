"""Chat messages as clients send them, checked and brought to one form: equal meaning gives an equal prompt.

Content is a string or a list of text parts; parts are joined by a newline. Null or absent content next to tool_calls is an empty
string. The role `developer` is the newer name of `system`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import InvalidParameter, Unsupported
from slipstream.types import valid_text

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_UNSUPPORTED_FIELDS = ("function_call", "audio")


def normalised_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages for a template: role, content (a string) and, where given, name, tool_call_id, reasoning_content, tool_calls.

    Raises `InvalidParameter` or `Unsupported` naming the message and field. Other fields are left out.
    """
    if not _is_list(messages) or not messages:
        raise InvalidParameter("messages", "be a list of at least one message", messages)
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter(where, "be an object with role and content", message)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"{where}.role", f"be one of {', '.join(ROLES)}", role)
    for field in _UNSUPPORTED_FIELDS:
        if message.get(field) is not None:
            raise Unsupported(f"{where}.{field} must be left out, it is not supported here", param=f"{where}.{field}")
    out: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    has_calls = _is_list(calls) and bool(calls)
    out["content"] = _content(f"{where}.content", message.get("content"), may_lack=has_calls)
    for field in _TEXT_FIELDS:
        if (value := message.get(field)) is not None:
            out[field] = valid_text(f"{where}.{field}", value)
    if calls is not None:
        if not _is_list(calls) or role != "assistant":
            raise InvalidParameter(f"{where}.tool_calls", "be a list, in a message of the assistant", calls)
        if has_calls:
            out["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return out


def _content(where: str, content: Any, may_lack: bool) -> str:
    if content is None and may_lack:
        return ""
    if isinstance(content, str):
        return valid_text(where, content)
    if not _is_list(content) or (not content and not may_lack):
        raise InvalidParameter(where, 'be text or a list of {"type": "text", "text": ...} parts', content)
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise InvalidParameter(where, 'be a {"type": "text", "text": ...} part', part)
    if part.get("type") != "text":
        raise InvalidParameter(f"{where}.type", 'be "text"', part.get("type"), hint="this model reads text only")
    return valid_text(f"{where}.text", part.get("text"))


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidParameter(where, 'be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}', call)
    if call.get("type", "function") != "function":
        raise InvalidParameter(f"{where}.type", 'be "function"', call.get("type"))
    name = valid_text(f"{where}.function.name", function.get("name"))
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(f"{where}.function.arguments", function.get("arguments"))},
    }
    if call.get("id") is not None:
        out["id"] = valid_text(f"{where}.id", call["id"])
    return out


def _arguments(where: str, arguments: Any) -> Any:
    """Clients send the arguments as JSON text; templates write out the object itself."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    text = valid_text(where, "{}" if arguments is None else arguments)
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text  # what a model once wrote need not be JSON
    return value if isinstance(value, dict) else text


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
