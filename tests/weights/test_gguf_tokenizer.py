"""Tokenizers made from GGUF metadata: where each family cuts words, and SentencePiece merging against its definition."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from slipstream.errors import ModelError
from slipstream.weights.gguf_tokenizer import gguf_tokenizer
from slipstream.weights.tokenizer_files import FastTokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ("1 2", "12 3", "123 4", "a b", "ab !", "Ġ a", "Ġa b", "Ċ Ċ", "' s", "' S")


def byte_level(pre: str, **metadata: Any) -> FastTokenizer:
    tokens = ["<bos>", "<eos>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "xyz", "<user>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 3), 4],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return gguf_tokenizer({**values, **metadata}, "m.gguf")


def pieces(tokenizer: FastTokenizer, text: str) -> list[str]:
    """Tokens as texts; whatever the family, they join to the text again."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    return [tokenizer.token_text(one) for one in ids]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("gpt-2", "ab!", ["ab", "!"]),
        ("llama-bpe", " ab", [" ab"]),  # a whole word, taken as it is
        ("smollm", " ab", [" ", "ab"]),  # by its merges, "a b" comes first
        ("gpt-2", "\n\na", ["\n", "\n", "a"]),
        ("qwen2", "\n\na", ["\n\n", "a"]),
        ("gpt-2", "a's", ["a", "'s"]),
        ("gpt-2", "a'S", ["a", "'", "S"]),  # only gpt-2 takes contractions in lower case alone
        ("llama-bpe", "a'S", ["a", "'S"]),
        ("qwen2", "a'S", ["a", "'S"]),
        ("llama-bpe", "xyz", ["xyz"]),
        ("gpt-2", "xyz", ["x", "y", "z"]),
    ],
)
def test_where_each_family_cuts(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(byte_level(pre), text) == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_any_text_survives(pre: str) -> None:
    tokenizer = byte_level(pre)
    for text in ("", " ", "ÜÉ你好😀", "\t\r\n  x  ", "<bos>a<eos>", "١٢½Ⅷ"):
        pieces(tokenizer, text)


def test_qwen2_composes_characters_first() -> None:
    assert byte_level("qwen2").encode("e\u0301") == byte_level("qwen2").encode("\u00e9")
    assert byte_level("gpt-2").encode("e\u0301") != byte_level("gpt-2").encode("\u00e9")


def test_special_and_user_defined_tokens() -> None:
    tokenizer = byte_level("gpt-2")
    assert tokenizer.special_ids == {0, 1}
    user = tokenizer.vocab_size - 1
    assert tokenizer.encode("<bos>a<user>") == [0, *tokenizer.encode("a"), user]
    assert tokenizer.decode([0, user, 1], skip_special_tokens=True) == "<user>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize(
    ("pre", "metadata", "adds"),
    [
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
        ("llama-bpe", {"tokenizer.ggml.bos_token_id": None}, False),
    ],
)
def test_bos(pre: str, metadata: dict[str, Any], adds: bool) -> None:
    tokenizer = byte_level(pre, **metadata)
    assert tokenizer.encode("a") == [0] * adds + tokenizer.encode("a", add_special_tokens=False)


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.tokens": "abc"},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.merges": [3]},
        {"tokenizer.ggml.merges": ["ab"]},
        {"tokenizer.ggml.bos_token_id": -1},
        {"tokenizer.ggml.bos_token_id": "0"},
        {"tokenizer.ggml.pre": 7},
    ],
)
def test_nonsense_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml"):
        byte_level("gpt-2", **metadata)


# SentencePiece: score of each piece; among the adjacent pairs whose union is a piece, the best union is merged, leftmost first.
SPM = {
    "▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -5.0, "bc": -4.5, "▁a": -6.0, "abc": -7.0, "▁ab": -5.5, "cc": -8.0,
    "ca": -8.5, "bca": -9.0, "▁▁": -3.5,
}  # fmt: skip


def sentence_piece(prefix: bool = True) -> FastTokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(SPM.values()),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return gguf_tokenizer(metadata, "m.gguf")


def merged_by_definition(text: str) -> list[str]:
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(-SPM[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in SPM]
        if not unions:
            return parts
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_sentence_piece_merges_by_its_definition() -> None:
    tokenizer = sentence_piece()
    rng = random.Random(5)
    for _ in range(500):
        text = "".join(rng.choice("abc ") for _ in range(rng.randrange(1, 15)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.inner.id_to_token(one) for one in ids] == merged_by_definition(text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentence_piece_falls_back_to_bytes() -> None:
    tokenizer = sentence_piece()
    ids = tokenizer.encode("aé😀", add_special_tokens=False)
    assert [tokenizer.token_bytes(one) for one in ids] == [b" a", *(bytes([byte]) for byte in "é😀".encode())]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "aé😀"


def test_sentence_piece_adds_bos_and_a_leading_space() -> None:
    assert sentence_piece().encode("ab") == [1, *sentence_piece(prefix=False).encode(" ab", add_special_tokens=False)]
