"""Slipstream serves language models.

>>> from slipstream import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")
>>> llm.generate(["The sea is"], SamplingParams(max_tokens=16))

Importing the package is cheap: torch comes in with the first use of `LLM`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.errors import SlipstreamError
    from slipstream.llm import LLM
    from slipstream.types import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "SlipstreamError"]

_HOMES = {
    "CompletionOutput": "slipstream.types",
    "EngineConfig": "slipstream.config",
    "LLM": "slipstream.llm",
    "RequestOutput": "slipstream.types",
    "SamplingParams": "slipstream.types",
    "SlipstreamError": "slipstream.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
