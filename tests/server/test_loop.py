"""The engine process's loop, turned by hand: what it answers, when it stops, what counts as progress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from slipstream.server import wire
from slipstream.server.engine_process import Loop
from slipstream.types import EngineOutput, EngineRequest, FinishReason, SamplingParams
from tests.server.fake_engine import TOKENIZER, FakeEngine

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as back:
        front.bind("inproc://test")
        back.connect("inproc://test")
        yield front, back


def request(name: str, prompt: str, **params: object) -> EngineRequest:
    return EngineRequest(name, tuple(TOKENIZER.encode(prompt)), SamplingParams(**{"max_tokens": 99, **params}), 0)


def run(pair: Pair, *messages: wire.ToEngine) -> list[wire.ToFront]:
    """Send these, turn the loop until it stops, and return what it sent."""
    front, back = pair
    for message in messages:
        front.send(wire.encode(message))
    Loop(FakeEngine(2), back).run()
    sent = []
    while front.poll(0):
        sent.append(wire.decode_to_front(front.recv()))
    return sent


def outputs(sent: list[wire.ToFront]) -> dict[str, list[EngineOutput]]:
    by_id: dict[str, list[EngineOutput]] = {}
    for message in sent:
        if isinstance(message, wire.Outputs):
            for output in message.outputs:
                by_id.setdefault(output.request_id, []).append(output)
    return by_id


def text(news: list[EngineOutput]) -> str:
    return TOKENIZER.decode([token for output in news for token in output.token_ids], skip_special_tokens=True)


def test_stop_with_drain_finishes_what_was_added(pair: Pair) -> None:
    sent = run(
        pair,
        wire.Add((request("a", "say(x)"), request("b", "say(yy) [run=3]"))),
        wire.Add((request("c", "say(z)"),)),
        wire.Stop(drain=True),
    )
    news = outputs(sent)
    assert {name: text(one) for name, one in news.items()} == {"a": "x", "b": "yy", "c": "z"}
    assert all(one[-1].finish_reason is FinishReason.STOP for one in news.values())
    assert len(sent[0].outputs) == 2, "the news of a step travel together"


def test_stop_without_drain_does_not_wait(pair: Pair) -> None:
    assert run(pair, wire.Add((request("a", "[hang]"),)), wire.Stop()) == []


def test_aborts(pair: Pair) -> None:
    """S27: "r1" is not "r10", an empty id is nobody's, twice is once."""
    sent = run(
        pair,
        wire.Add((request("r1", "[hang]"), request("r10", "say(ok)"))),
        wire.Abort(("r1", "", "r1")),
        wire.Abort(("r1", "unknown")),
        wire.Stop(drain=True),
    )
    news = outputs(sent)
    assert [output.finish_reason for output in news["r1"]] == [FinishReason.ABORT] and text(news["r10"]) == "ok"


def test_a_reset_of_the_prefix_cache_is_done_before_what_comes_behind_it(pair: Pair) -> None:
    cached = wire.Add((request("a", "say(x) [cached=3]"),))
    assert outputs(run(pair, cached, wire.Stop(drain=True)))["a"][0].num_cached_tokens == 3
    assert outputs(run(pair, wire.ResetPrefixCache(), cached, wire.Stop(drain=True)))["a"][0].num_cached_tokens == 0


def test_stats_of_an_idle_loop(pair: Pair) -> None:
    (stats,) = run(pair, wire.GetStats(7), wire.Stop())
    assert isinstance(stats, wire.Stats) and stats.number == 7 and stats.stalled_s == 0 and stats.stats.num_pages == 2


def test_an_idle_hour_is_no_stall_but_a_working_hour_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("slipstream.server.engine_process.time.monotonic", lambda: now)
    front, back = pair
    engine = FakeEngine(2)
    loop = Loop(engine, back)

    def stalled_s() -> float:
        front.send(wire.encode(wire.GetStats(1)))
        loop._read_inbox(0)
        message = wire.decode_to_front(front.recv())
        assert isinstance(message, wire.Stats)
        return message.stalled_s

    now += 3600
    assert stalled_s() == 0
    front.send(wire.encode(wire.Add((request("a", "[hang]"),))))
    loop._read_inbox(0)
    assert stalled_s() == 0
    now += 3600
    loop._note_progress(has_news=False)
    assert stalled_s() == 3600
    loop._note_progress(has_news=True)
    assert stalled_s() == 0


def test_an_id_that_is_still_running_harms_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.errors import InvalidParameter

    add, seen = FakeEngine.add, set[str]()

    def strict(engine: FakeEngine, one: EngineRequest) -> None:
        if one.request_id in seen:
            raise InvalidParameter("request_id", "be unique among unfinished requests", one.request_id)
        seen.add(one.request_id)
        add(engine, one)

    monkeypatch.setattr(FakeEngine, "add", strict)
    sent = run(pair, wire.Add((request("a", "say(first)"), request("a", "say(second)"))), wire.Stop(drain=True))
    assert text(outputs(sent)["a"]) == "first"


def test_what_the_engine_raises_comes_through(pair: Pair) -> None:
    with pytest.raises(ValueError, match="boom"):
        run(pair, wire.Add((request("a", "[boom=1]"),)))
