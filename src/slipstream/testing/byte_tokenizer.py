"""A tokenizer without files: ids 0 to 255 are bytes, three special tokens follow."""

from __future__ import annotations

import re
from collections.abc import Sequence

BOS_ID = 256
EOS_ID = 257
PAD_ID = 258
SPECIALS = {"<bos>": BOS_ID, "<eos>": EOS_ID, "<pad>": PAD_ID}

_TEXTS = {token_id: text for text, token_id in SPECIALS.items()}
_SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")


class ByteTokenizer:
    """One token a byte; a character outside ASCII takes several, so every stream cuts characters in half.

    Args:
        add_bos: whether `encode` puts <bos> first when special tokens are asked for.
    """

    vocab_size = 256 + len(SPECIALS)
    special_ids = frozenset(SPECIALS.values())
    bos_token_id = BOS_ID
    eos_token_id = EOS_ID

    def __init__(self, add_bos: bool = False) -> None:
        self._add_bos = add_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Bytes of `text`; <bos>, <eos> and <pad> written out become their ids."""
        ids = [BOS_ID] if self._add_bos and add_special_tokens else []
        for piece in _SPLIT.split(text):
            ids.extend([SPECIALS[piece]] if piece in SPECIALS else piece.encode("utf-8"))
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`: invalid UTF-8 becomes U+FFFD, ids at or above `vocab_size` are left out."""
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """Text of one token alone."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or a special token's text."""
        if token_id < 256:
            return bytes([token_id])
        return _TEXTS.get(token_id, "").encode("utf-8")
