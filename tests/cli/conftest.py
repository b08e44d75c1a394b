"""The command line with the echo engine behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.cli.local import LocalModel
from slipstream.config import EngineConfig
from tests.cli.echo_engine import EchoEngine, byte_info

Install = Callable[..., EchoEngine]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make `LocalModel.load` return the given engine, or an `EchoEngine`; the configuration it was called with is kept on it."""

    def install(engine: EchoEngine | None = None, chat: bool = True) -> EchoEngine:
        engine = engine or EchoEngine()

        def load(config: EngineConfig) -> LocalModel:
            engine.config = config
            return LocalModel(engine, byte_info() if chat else byte_info(None))

        monkeypatch.setattr(LocalModel, "load", load)
        return engine

    return install
