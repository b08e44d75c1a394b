"""Stop strings against a naive search of the whole text."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text.detokenize import IncrementalDecoder, StopScanner
from slipstream.text.stops import StopMatch, StopMatcher
from slipstream.types import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams
from tests.text.vocabularies import END, FakeTokenizer

few_letters = st.text("ab", min_size=1, max_size=5)
texts = st.text("abc", max_size=40)


def naive_match(text: str, stops: list[str], after: int = 0) -> StopMatch | None:
    """The first stop string complete behind `after` characters; the longest at that character."""
    for end in range(after + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def naive_held(text: str, stops: list[str]) -> int:
    """Longest end of the text that is a real beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@given(texts, st.lists(few_letters, min_size=1, max_size=4), st.lists(st.integers(0, 40), max_size=10))
def test_the_matcher_finds_what_a_search_of_the_whole_text_finds(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    for start, end in pairwise(bounds):
        match = matcher.feed(text[start:end])
        assert match == (wanted if (wanted := naive_match(text, stops)) and wanted.end <= end else None)
        if match:
            return
        assert matcher.held == naive_held(text[:end], stops)


@given(texts, st.lists(few_letters, min_size=1, max_size=3), st.integers(0, 40))
def test_passed_over_completions_do_not_blind_the_matcher(text: str, stops: list[str], blind: int) -> None:
    matcher = StopMatcher(stops)
    blind = min(blind, len(text))
    assert matcher.feed(text[:blind], counts=False) is None
    assert matcher.held == naive_held(text[:blind], stops)
    assert matcher.feed(text[blind:]) == naive_match(text, stops, after=blind)


@pytest.mark.parametrize(
    ("stops", "text", "wanted"),
    [
        (["abc", "b"], "xabc", StopMatch("b", 2, 3)),  # complete first
        (["b", "ab"], "xab", StopMatch("ab", 1, 3)),  # at the same character: the longest
        (["ab", "b"], "xab", StopMatch("ab", 1, 3)),
        (["aab"], "aaab", StopMatch("aab", 1, 4)),
        (["abab"], "ababab", StopMatch("abab", 0, 4)),
        (["x"], "abc", None),
        ([], "abc", None),
        (["a", "a"], "a", StopMatch("a", 0, 1)),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, wanted: StopMatch | None) -> None:
    whole, single = StopMatcher(stops), StopMatcher(stops)
    assert whole.feed(text) == wanted
    assert next((match for char in text if (match := single.feed(char))), None) == wanted


def test_long_stop_strings_cost_neither_time_nor_memory_before_they_match() -> None:
    tracemalloc.start()
    try:
        matcher = StopMatcher(["a" * (MAX_STOP_CHARS - 1) + chr(0x4E00 + i) for i in range(MAX_STOP_STRINGS)])
        for _ in range(100):
            assert matcher.feed("bcd") is None
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_STOP_STRINGS * MAX_STOP_CHARS
    finally:
        tracemalloc.stop()


PIECES = [b"ab", b"ba", b"abc", b"\xc3\xa9a", b"b\xc3", b"\xa9b"]
token_ids = st.lists(
    st.one_of(st.integers(259, 259 + len(PIECES) - 1), st.sampled_from([3 + ord("a"), 3 + ord("b"), 3 + 0xA9, END])), max_size=25
)


@given(token_ids, st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 6), st.booleans())
def test_the_scanner_stops_at_the_earliest_token_behind_min_tokens(
    ids: list[int], stops: list[str], min_tokens: int, skip: bool
) -> None:
    tokenizer = FakeTokenizer(PIECES)
    params = SamplingParams(max_tokens=None, min_tokens=min_tokens, stop=tuple(stops), skip_special_tokens=skip)
    scanner, decoder = StopScanner(tokenizer, params), IncrementalDecoder(tokenizer, skip)
    text = ""
    for count, token in enumerate(ids, 1):
        before = len(text)
        text += decoder.push([token])
        wanted = naive_match(text, stops, after=before) if count > min_tokens else None
        assert scanner.push(token) == (wanted.stop if wanted else None)
        assert scanner.match == wanted
        assert scanner.text == text[before:]
        if wanted:
            return
        assert scanner.held == naive_held(text, stops)


@given(st.text("abé c", max_size=30), st.lists(st.text("abé", min_size=1, max_size=3), min_size=1, max_size=3))
def test_where_an_answer_is_cut_does_not_depend_on_how_tokens_cut_the_text(text: str, stops: list[str]) -> None:
    cuts = set()
    for pieces in ([], PIECES, [b"abab", b" c", b"c a"]):
        tokenizer = FakeTokenizer(pieces)
        scanner = StopScanner(tokenizer, SamplingParams(stop=tuple(stops)))
        cuts.add(next((scanner.match for token in tokenizer.encode(text) if scanner.push(token)), None))
    assert len(cuts) == 1
