"""The names of the package, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import slipstream


def loaded_modules(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after running `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines())


def test_the_exported_names() -> None:
    assert slipstream.__all__ == ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "SlipstreamError"]
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__name__ == name
        assert name in dir(slipstream)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LLMs'"):
        _ = slipstream.LLMs


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_modules("import slipstream")
    assert not loaded & {"torch", "numpy", "pydantic", "transformers"}


@pytest.mark.parametrize(
    "module",
    [
        "slipstream.types",
        "slipstream.config",
        "slipstream.config_sources",
        "slipstream.frontend.prepare",
        "slipstream.frontend.assemble",
        "slipstream.engine.scheduler",
        "slipstream.engine.plan",
        "slipstream.llm",
    ],
)
def test_policy_and_the_front_load_no_torch(module: str) -> None:
    assert "torch" not in loaded_modules(f"import {module}")
