"""What the rest of the program asks of a tokenizer. Concrete ones come with the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The ids the tokenizer knows, added tokens included, lie below this."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special (control) tokens."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """Id of the begin-of-sequence token."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's own end-of-sequence token."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; ids the tokenizer does not know are left out."""
        ...

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; an incomplete UTF-8 sequence shows as U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text wherever it stands behind other text; empty for an id the tokenizer does not know.

        A text is the UTF-8 decoding of its tokens' bytes: that is what makes streaming exact. text/pieces.py derives the bytes
        from a vocabulary entry for byte-level and for sentencepiece-like vocabularies.
        """
        ...
