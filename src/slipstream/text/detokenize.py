"""Token ids to text, one token at a time. What has been handed out never changes.

    tokens   [ Hel ] [ lo ] [ \\xf0\\x9f ] [ \\x98 ] [ \\x80! ]
    text       Hel     lo        -            -        😀!
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from slipstream.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Decodes one answer. Constant work a token: only an unfinished UTF-8 sequence (at most 3 bytes) is remembered.

    The concatenation of everything it returns is the UTF-8 decoding of the tokens' bytes, invalid sequences replaced by U+FFFD,
    however the tokens are dealt out to `push`. The first token keeps its leading space: it follows a prompt.

    Args:
        tokenizer: gives the bytes of a token.
        skip_special_tokens: special tokens add no text (and do not interrupt a sequence).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Feed tokens; returns the text that is certain now. A sequence whose end is still to come is kept back."""
        data = b"".join(self._tokenizer.token_bytes(token) for token in token_ids if token not in self._skipped)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The answer is over: an unfinished sequence becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
