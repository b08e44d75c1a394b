"""Decoding token by token: exact, stable, and in constant work a token."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text.detokenize import IncrementalDecoder
from slipstream.text.pieces import byte_level_alphabet, byte_level_bytes, sentencepiece_bytes, spelling
from slipstream.weights.tokenizer_files import FastTokenizer
from tests.text.vocabularies import BOS, END, FakeTokenizer, byte_level, sentence_piece

PIECES = [b"\xf0\x9f", b"\x98\x80!", b" the", b"\xe4\xbd", b"\xa0\xe5", b"a\xc3", b"\xa9b"]


def pieces_of(tokenizer: object, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    """What the decoder hands out when the ids arrive in chunks, and its rest."""
    decoder = IncrementalDecoder(tokenizer, skip)
    bounds = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [*(decoder.push(ids[a:b]) for a, b in pairwise(bounds)), decoder.finish()]


ids_and_cuts = st.tuples(st.lists(st.integers(0, 300), max_size=40), st.lists(st.integers(0, 100), max_size=8), st.booleans())


@given(ids_and_cuts)
def test_any_cuts_give_the_full_decoding_of_a_fake_vocabulary(case: tuple[list[int], list[int], bool]) -> None:
    ids, cuts, skip = case
    tokenizer = FakeTokenizer(PIECES)
    assert "".join(pieces_of(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip)


@given(ids_and_cuts)
def test_any_cuts_give_what_the_library_decodes_byte_level(case: tuple[list[int], list[int], bool]) -> None:
    # Invalid UTF-8 included: both replace each maximal broken part by one U+FFFD.
    ids, cuts, skip = case
    assert "".join(pieces_of(byte_level(), ids, cuts, skip)) == byte_level().decode(ids, skip)


@given(st.text(max_size=30), st.text(max_size=30), st.lists(st.integers(0, 100), max_size=8))
def test_sentencepiece_text_behind_a_prompt_keeps_its_spaces(prompt: str, answer: str, cuts: list[int]) -> None:
    tokenizer = sentence_piece()
    ids = tokenizer.encode(answer, add_special_tokens=False)
    prompt_ids = tokenizer.encode(f"x{prompt}", add_special_tokens=False)
    whole, before = tokenizer.decode(prompt_ids + ids, True), tokenizer.decode(prompt_ids, True)
    assert "".join(pieces_of(tokenizer, ids, cuts, True)) == whole.removeprefix(before)


@given(st.lists(st.integers(0, 300), max_size=30))
def test_what_was_handed_out_never_changes(ids: list[int]) -> None:
    tokenizer = FakeTokenizer(PIECES)
    decoder = IncrementalDecoder(tokenizer)
    sent = ""
    for count, token in enumerate(ids, 1):
        sent += decoder.push([token])
        for longer in range(count, len(ids) + 1):
            assert tokenizer.decode(ids[:longer], True).startswith(sent)


def test_half_a_character_is_kept_back_until_it_is_whole() -> None:
    tokenizer = FakeTokenizer()
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([token]) for token in tokenizer.encode("a😀é")] == ["a", "", "", "", "😀", "", "é"]
    assert decoder.finish() == ""


def test_a_broken_sequence_shows_once_it_is_known_to_be_broken() -> None:
    tokenizer = FakeTokenizer()
    decoder = IncrementalDecoder(tokenizer)
    broken = [3 + 0xF0, 3 + 0x9F, 3 + ord("a")]
    assert [decoder.push([token]) for token in broken] == ["", "", "\ufffda"]
    assert decoder.push([3 + 0xE4]) == ""
    assert decoder.finish() == "\ufffd"


def test_special_tokens_add_no_text_and_do_not_break_a_character() -> None:
    tokenizer = FakeTokenizer()
    first, second = tokenizer.encode("é")
    assert pieces_of(tokenizer, [first, END, second], [1, 2], True) == ["", "", "é", ""]
    assert "".join(pieces_of(tokenizer, [first, END, second], [1, 2], False)) == "\ufffd<|end|>\ufffd"


def test_ids_outside_the_vocabulary_add_no_text() -> None:
    assert pieces_of(byte_level(), [10_000_000, byte_level().encode("a")[0]], [], True) == ["a", ""]


def test_the_work_of_a_token_does_not_grow_with_the_answer() -> None:
    tokenizer = byte_level()
    one = tokenizer.encode("😀")

    def calls_of(count: int) -> int:
        decoder, calls = IncrementalDecoder(tokenizer), 0

        def count_call(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count_call)
        try:
            for _ in range(count):
                for token in one:
                    decoder.push([token])
        finally:
            sys.setprofile(None)
        return calls

    calls_of(1)  # fills the table of bytes
    few, many = calls_of(100), calls_of(1000)
    assert many <= 10 * few


def test_spellings() -> None:
    assert byte_level_bytes("Ġhello") == b" hello"
    assert byte_level_bytes("Ã©") == "é".encode()
    assert byte_level_bytes("<a b>") == b"<a b>"
    assert sentencepiece_bytes("▁the") == b" the"
    assert sentencepiece_bytes("<0xC3>") == b"\xc3"
    assert sentencepiece_bytes("<0xC3>x") == b"<0xC3>x"
    assert sorted(byte_level_alphabet().values()) == list(range(256))


@pytest.mark.parametrize(
    ("decoder", "wanted"),
    [
        ({"type": "ByteLevel"}, byte_level_bytes),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}, byte_level_bytes),
        ({"type": "Metaspace"}, sentencepiece_bytes),
        ({"type": "Sequence", "decoders": [{"type": "Replace", "content": " "}, {"type": "ByteFallback"}]}, sentencepiece_bytes),
        ({"type": "WordPiece"}, None),
        (None, None),
    ],
)
def test_the_spelling_follows_from_the_decoder(decoder: dict[str, object] | None, wanted: object) -> None:
    assert spelling(decoder) is wanted


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()], ids=["byte-level", "sentencepiece"])
def test_bytes_of_every_entry_agree_with_the_library(tokenizer: FastTokenizer) -> None:
    # Behind a letter, so that nothing is stripped. Lone bytes show as U+FFFD on both sides.
    letter = tokenizer.encode("x", add_special_tokens=False)
    before = tokenizer.decode(letter, False)
    for token in range(tokenizer.vocab_size):
        behind = tokenizer.decode([*letter, token], False).removeprefix(before)
        assert tokenizer.token_bytes(token).decode(errors="replace") == behind
    assert tokenizer.token_bytes(BOS) == b"<bos>"
