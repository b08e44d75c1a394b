"""Names and seconds of start-up."""

from __future__ import annotations

from slipstream.observe.phases import Phases


def test_each_phase_takes_its_seconds() -> None:
    phases = Phases("starting", 10.0)
    assert phases.enter("fetching", 10.01) == ("starting", phases.seconds["starting"])
    assert phases.enter("fetching", 10.5) is None and phases.current == "fetching"
    assert phases.enter("reading weights", 11.01) == ("fetching", 1.0)
    assert phases.elapsed_s(12.0) == 2.0
    phases.enter("fetching", 13.01)
    assert phases.enter("building engine", 13.51) == ("fetching", 0.5) and phases.seconds["fetching"] == 1.5
    assert phases.enter(None, 14.01) == ("building engine", 0.5)
    assert phases.enter(None, 20.0) is None and phases.elapsed_s(20.0) == 14.01 - 10.0
    assert phases.summary(20.0) == "4.0 s (fetching 1.5 s, reading weights 2.0 s, building engine 0.5 s)"


def test_nothing_worth_a_word() -> None:
    phases = Phases("starting", 0.0)
    phases.enter(None, 0.01)
    assert phases.summary(0.01) == "0.0 s"
