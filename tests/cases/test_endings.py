"""Reported failures of how answers end and of several answers at once, as tests: stop strings, min_tokens, ignore_eos, n."""

from __future__ import annotations

from functools import cache

import pytest

from slipstream.models.base import CausalLM
from slipstream.testing.byte_tokenizer import EOS_ID
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.types import SamplingParams
from tests.cases.stage import WITH_OFF, Parrot, Streamed, generated, greedy, streamed, text_ids

PROMPT = "one two three four five six"
SAID = " seven eight nine nine ten eleven, ten euro: 10 €€. The end"
BEYOND = "!" * 200  # what it would go on with
each_mode = pytest.mark.parametrize(
    "mode, k", [("off", 0), ("ngram", 7), ("self_chain", 1), ("self_chain", 7), ("self_tree", 3), ("rand", 7)]
)
each_lag = pytest.mark.parametrize("lag", [0, 1])


@cache
def saying(said: str) -> CausalLM:
    """A model that answers PROMPT with `said`, EOS, and then goes on."""
    script = [*text_ids(PROMPT), *text_ids(said), EOS_ID, *text_ids(BEYOND), EOS_ID, *text_ids(BEYOND)]
    return Parrot(HashLM(vocab_size=259, context_len=512), script[:512])


def cut_at(text: str, stops: tuple[str, ...], first: int = 0) -> tuple[str, str | None]:
    """The definition: the text before the stop string that is complete first, behind `first` characters."""
    ends = [(end, -len(stop), stop) for stop in stops for end in range(first + 1, len(text) + 1) if text[:end].endswith(stop)]
    if not ends:
        return text, None
    end, length, stop = min(ends)
    return text[: end + length], stop


# A10

STOPS = [
    ("nine ten eleven",),
    ("nine ten apple",),  # never complete
    ("nine nine nine", "nine ten"),  # one fails where the other goes on
    ("ten eleven, ten", "eleven, ten euro"),
    ("eleven", "nine ten eleven"),  # both at once: the longest
    ("€.", "€€"),
    ("€€.",),
    (" ",),
    (" seven",),  # nothing is left
    ("The end", "end of"),
    ("The end of",),  # half of it when the answer ends
    ("zz", "q"),
]


@pytest.mark.parametrize("stop", STOPS, ids=" | ".join)
@each_mode
def test_a10_no_part_of_a_stop_string_is_sent(mode: str, k: int, stop: tuple[str, ...]) -> None:
    """Streamed and whole, twice at once: what was held back comes once it is no stop string, or the answer ends."""
    text, reason = cut_at(SAID, stop)
    cell = {"lag": 1, "eos": (EOS_ID,), "drafters": {mode: WITH_OFF[mode](k)}}
    params = greedy(150, stop=stop, n=2)
    stream = streamed(saying(SAID), PROMPT, params, **cell)
    for index, output in enumerate(stream.output.outputs):
        assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", reason)
        assert_never_beyond(stream, index, text)
    if mode.startswith("self"):
        assert stream.num_accepted >= len(text) // 2, "the ends must fall into drafted runs"
    assert generated(saying(SAID), [PROMPT], params, **cell | {"lag": 0})[0].outputs == stream.output.outputs


def assert_never_beyond(stream: Streamed, index: int, text: str) -> None:
    sent = ""
    for delta in stream.deltas:
        if delta.index == index:
            sent += delta.text
            assert text.startswith(sent), (sent, text)
    assert sent == text


@pytest.mark.parametrize("max_tokens", range(1, len(SAID.encode()) + 1, 4))
@pytest.mark.parametrize("mode, k", [("off", 0), ("self_chain", 7)])
def test_a10_the_cap_falls_into_half_a_stop_string(mode: str, k: int, max_tokens: int) -> None:
    """Wherever the answer is cut off: half a match is flushed, and half a character shows as one U+FFFD."""
    stop = ("nine ten eleven", "€€. The", "end.")
    said = SAID.encode()[:max_tokens].decode(errors="replace")
    text, reason = cut_at(said, stop)
    cell = {"lag": 1, "eos": (EOS_ID,), "drafters": {mode: WITH_OFF[mode](k)}}
    stream = streamed(saying(SAID), PROMPT, greedy(max_tokens, stop=stop), **cell)
    assert (stream.text, stream.deltas[-1].finish_reason) == (text, "stop" if reason else "length")
    assert_never_beyond(stream, 0, text)


# A13


@pytest.mark.parametrize("min_tokens", [1, 2, 20, 21])
@each_mode
def test_a13_a_stop_string_before_min_tokens_is_passed_over(mode: str, k: int, min_tokens: int) -> None:
    """The first newline comes as token 2 and then again and again; the first one behind min_tokens ends it."""
    said = "a\n" * 3 + "long\n" * 9
    text, reason = cut_at(said, ("\n",), first=min_tokens)
    cell = {"lag": 1, "eos": (EOS_ID,), "drafters": {mode: WITH_OFF[mode](k)}}
    stream = streamed(saying(said), PROMPT, greedy(100, stop=("\n",), min_tokens=min_tokens), **cell)
    assert (stream.text, stream.deltas[-1].stop_reason) == (text, reason)
    assert stream.num_output_tokens == len(text) + 1 > min_tokens
    assert_never_beyond(stream, 0, text)


@pytest.mark.parametrize("stop", [("ab",), ("b",), ()])
@each_mode
def test_a13_min_tokens_and_every_kind_of_end(mode: str, k: int, stop: tuple[str, ...]) -> None:
    """EOS and stop ids cannot even be sampled before; a stop string that begins before and is complete behind it counts."""
    said = "x" * 19 + "ab" + "y" * 20
    cell = {"lag": 1, "eos": (EOS_ID,), "drafters": {mode: WITH_OFF[mode](k)}}
    stream = streamed(saying(said), PROMPT, greedy(100, stop=stop, min_tokens=20), **cell)
    assert stream.num_output_tokens == (21 if stop else len(said) + 1)
    early = streamed(saying("xy"), PROMPT, greedy(100, min_tokens=20, stop_token_ids=(ord("x"), ord("y"))), **cell)
    assert early.num_output_tokens > 20 and EOS_ID not in early.output.outputs[0].token_ids[:20]
    assert not {ord("x"), ord("y")} & set(early.output.outputs[0].token_ids[:20])


@each_mode
def test_a13_ignore_eos_goes_on_to_the_cap(mode: str, k: int) -> None:
    """Exactly max_tokens, through every id that would end an answer, and their text is left out as special tokens' is."""
    cell = {"lag": 1, "eos": (EOS_ID, ord("!")), "drafters": {mode: WITH_OFF[mode](k)}}
    for said in ("", "ab", "a" * 49):
        output = generated(saying(said), [PROMPT], greedy(50, ignore_eos=True), **cell)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (50, "length", None)
        assert output.text == (said + BEYOND)[: 50 - (EOS_ID in output.token_ids)]


# A14


@pytest.mark.parametrize("num_pages", [256, 8], ids=["room", "pressure"])
@each_lag
@each_mode
def test_a14_n_answers_differ_and_come_again(mode: str, k: int, lag: int, num_pages: int) -> None:
    """Of one seed: different answers, the same ones again, and each what it is alone; greedy ones are equal."""
    cell = {"lag": lag, "page_size": 16, "num_pages": num_pages, "batch": 8, "drafters": {mode: WITH_OFF[mode](k)}}
    cell["admission_headroom_tokens"] = 0 if num_pages < 16 else 64
    model = tiny_model("llama")
    many = SamplingParams(n=8, seed=1, temperature=1.0, max_tokens=20, ignore_eos=True)
    first = streamed(model, PROMPT, many, **cell)
    assert (first.num_retractions > 0) == (num_pages < 16), "pressure must retract somebody"
    ids = [tuple(output.token_ids) for output in first.output.outputs]
    assert len(set(ids)) == 8 and [output.index for output in first.output.outputs] == list(range(8))
    assert ids == wanted_of_a14()
    ends = [delta.index for delta in first.deltas if delta.finish_reason is not None]
    assert sorted(ends) == list(range(8)), "each ends once"
    assert first.num_prompt_tokens == len(PROMPT) and first.num_output_tokens == 160
    equal = generated(model, [PROMPT], greedy(20, n=4), **cell)[0].outputs
    assert len({tuple(output.token_ids) for output in equal}) == 1


@cache
def wanted_of_a14() -> list[tuple[int, ...]]:
    params = SamplingParams(n=8, seed=1, temperature=1.0, max_tokens=20, ignore_eos=True)
    return [tuple(output.token_ids) for output in generated(tiny_model("llama"), [PROMPT], params, batch=1)[0].outputs]
