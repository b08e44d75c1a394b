"""Token ids to text, one token at a time. What has been handed out never changes.

    tokens   [ Hel ] [ lo ] [ \\xf0\\x9f ] [ \\x98 ] [ \\x80! ]
    text       Hel     lo        -            -        😀!
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from slipstream.text.stops import StopMatch, StopMatcher
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import SamplingParams

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


class StopScanner:
    """Follows one answer token by token and finds where a stop string ends it. Settle and the front use this one implementation.

    A stop string is matched against the text that the client would see: special tokens count only where the request shows them.
    One that completes within the first `min_tokens` tokens is passed over.

    Args:
        tokenizer: gives the bytes of a token.
        params: stop, min_tokens and skip_special_tokens are read.

    Attributes:
        text: what the last token added to the text.
        match: the stop string the last token completed, in characters from the start of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.text = ""
        self.match: StopMatch | None = None

    def push(self, token_id: int) -> str | None:
        """Feed the next output token; returns the stop string it completes, if any."""
        self._num_tokens += 1
        self.text = self._decoder.push((token_id,))
        self.match = self._matcher.feed(self.text, counts=self._num_tokens > self._min_tokens)
        return self.match.stop if self.match else None

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that must not be sent yet: a stop string may be made of them."""
        return self._matcher.held

    def finish(self) -> str:
        """The answer is over: returns the rest of the text (an unfinished UTF-8 sequence shows as U+FFFD)."""
        return self._decoder.finish()
