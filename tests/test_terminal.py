"""What is drawn on a terminal."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from slipstream.terminal import deferred_stops, loading_bar


def test_the_bar_names_its_phase_once_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    with loading_bar() as draw:
        draw("verifying", 0.5)
        assert "\rverifying:  50% |" in stderr.getvalue()
    assert stderr.getvalue().rpartition("\r")[2].strip() == "" and ": :" not in stderr.getvalue()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_one_does_not_wait(which: signal.Signals) -> None:
    before = signal.getsignal(which)
    with pytest.raises(KeyboardInterrupt), deferred_stops() as stopped:
        os.kill(os.getpid(), which)
        assert stopped.wait(5)
        os.kill(os.getpid(), which)
        pytest.fail("the second signal must not be deferred")
    assert signal.getsignal(which) is before
