"""What is drawn on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from slipstream.terminal import loading_bar


def test_the_bar_names_its_phase_once_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    with loading_bar() as draw:
        draw("verifying", 0.5)
        assert "\rverifying:  50% |" in stderr.getvalue()
    assert stderr.getvalue().rpartition("\r")[2].strip() == "" and ": :" not in stderr.getvalue()
