"""Vocabulary entries to bytes: what a token adds to a text, for the two spellings that language models use.

    byte-level (GPT-2, Llama 3, Qwen, SmolLM2)   'Ġhello' -> b' hello'      'Ã' -> b'\\xc3'
    sentencepiece-like (Llama 2, Mistral, Gemma)  '▁hello' -> b' hello'   '<0xC3>' -> b'\\xc3'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


@lru_cache(maxsize=1)
def byte_level_alphabet() -> Mapping[str, int]:
    """Character -> byte of the byte-level spelling: printable Latin-1 stands for itself, the rest is moved to U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return alphabet


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level entry. An added token with other characters in it (a space, say) is taken literally."""
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """Bytes of a sentencepiece-like entry: '▁' is a space, '<0xC3>' a byte."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE, " ").encode()


def spelling(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes] | None:
    """Which of the two a tokenizer.json's `decoder` section undoes; None where it is neither."""
    steps = decoder["decoders"] if decoder and decoder.get("type") == "Sequence" else [decoder or {}]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if "Metaspace" in kinds or any(step.get("type") == "Replace" and step.get("content") == " " for step in steps):
        return sentencepiece_bytes
    return None
