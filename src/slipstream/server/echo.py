"""`echo`: a completion that begins with its prompt.

    text       [ prompt ......... ][ answer ....... ]
    logprobs   null  -1.2  -0.3     -0.7  -2.0              the first token of the prompt has nothing before it
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.frontend.assemble import Assembler
from slipstream.server.logprobs import Json, completion_logprobs
from slipstream.text.detokenize import IncrementalDecoder
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import TokenLogprobs


class Echo:
    """A prompt as a completion repeats it.

    The text is the client's own; where it sent token ids, or had the prompt truncated, what the tokens spell, special ones too.

    Args:
        prompt: the prompt, its logprobs known where they are shown.
        num_top: None, or how many of the most likely tokens to list at each place.
        tokenizer: spells tokens.

    Attributes:
        text: of the whole prompt.
        logprobs: `logprobs` of its tokens, or None.
    """

    def __init__(self, prompt: Assembler, num_top: int | None, tokenizer: Tokenizer) -> None:
        prepared = prompt.prepared
        ids = prepared.prompt_token_ids
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        pieces = [decoder.push((token,)) for token in ids]
        spelled = "".join(pieces) + decoder.finish()
        own = prepared.prompt if prepared.params.truncate_prompt_tokens is None else None
        self.text = spelled if own is None else own
        self.logprobs = None if num_top is None else self._logprobs(prompt, num_top, pieces, tokenizer)

    def _logprobs(self, prompt: Assembler, num_top: int, pieces: list[str], tokenizer: Tokenizer) -> Json:
        assert prompt.prompt_logprobs is not None
        ids = prompt.prepared.prompt_token_ids
        entries = [TokenLogprobs(ids[0], 0.0), *(_best(one, num_top) for one in prompt.prompt_logprobs if one is not None)]
        out = completion_logprobs(entries, tokenizer, _offsets(self.text, ids, pieces, tokenizer))
        out["token_logprobs"][0] = out["top_logprobs"][0] = None  # nothing comes before the first token
        return out


def _offsets(text: str, ids: Sequence[int], pieces: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Where in the text each token begins. A special token that the text does not spell (BOS, put in front) takes no room."""
    offsets, at = [], 0
    for token, piece in zip(ids, pieces, strict=True):
        offsets.append(at)
        if token not in tokenizer.special_ids or text.startswith(piece, at):
            at = min(at + len(piece), len(text))
    return offsets


def _best(one: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(one.token_id, one.logprob, one.top_ids[:num_top], one.top_logprobs[:num_top], one.rank)
