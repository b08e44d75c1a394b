"""The byte tokenizer: every text comes back, special tokens are special."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.testing.byte_tokenizer import BOS_ID, EOS_ID, ByteTokenizer


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_special_tokens_are_recognised_and_skipped() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    ids = tokenizer.encode("a<eos>b")
    assert ids == [BOS_ID, 97, EOS_ID, 98]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>a<eos>b"


def test_half_a_character_shows_as_the_replacement_character() -> None:
    tokenizer = ByteTokenizer()
    first, second = tokenizer.encode("é")
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.decode([first], skip_special_tokens=True) == "\ufffd"
    assert tokenizer.decode([first, second, 999], skip_special_tokens=True) == "é"
