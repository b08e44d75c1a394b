"""The one cut: where an answer ends. A pure function over the whole accepted run of a step.

    output so far        run
    t t t t t t t  |  t t t t t t
                          ^ the first token at which anything ends it is the last one kept

The earliest end wins. At one and the same token the order is: grammar end, EOS, stop id, stop string, length. So a stop that
completes exactly at the cap is a stop, and one that would complete behind the cap is not seen at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slipstream.types import FinishReason


@dataclass(frozen=True, slots=True)
class Cut:
    """What a step's run leaves of itself.

    Attributes:
        num_tokens: tokens of the run that belong to the answer, the one that ended it included.
        finish_reason: STOP or LENGTH, or None when the answer goes on.
        stop_reason: the stop string or stop id that ended it; None for EOS, a closed grammar and length.
    """

    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def cut(
    run: Sequence[int],
    *,
    num_before: int,
    max_output: int,
    eos_token_ids: Collection[int] = (),
    stop_token_ids: Collection[int] = (),
    stop_hits: Sequence[tuple[int, str]] = (),
    grammar_end: int = -1,
    min_tokens: int = 0,
    ignore_eos: bool = False,
) -> Cut:
    """Cut a step's accepted run.

    Args:
        run: the committed tokens, bonus included; may be empty.
        num_before: output tokens settled before this step.
        max_output: most output tokens the answer may have: min(max_tokens, context - prompt length).
        eos_token_ids: the model's EOS ids.
        stop_token_ids: the request's own stop ids; they count with ignore_eos too, even where they are EOS ids.
        stop_hits: (index in run of the completing token, stop string), in order; text/detokenize.py finds them.
        grammar_end: tokens of the run up to and with the one that closed the grammar, as in `StepResult.grammar_ends`; -1: open.
        min_tokens: EOS, stop ids and stop strings count only from output token min_tokens + 1 on. A closed grammar ends the
            answer at once: nothing can follow it.
        ignore_eos: EOS ids do not end the answer.
    """
    room = max_output - num_before
    if room <= 0:
        return Cut(0, FinishReason.LENGTH)
    hits = dict(reversed(stop_hits))  # of several at one token the first counts
    for index, token in enumerate(run):
        kept = index + 1
        if kept == grammar_end:
            return Cut(kept, FinishReason.STOP)
        if num_before + kept > min_tokens:
            if token in eos_token_ids and not ignore_eos:
                return Cut(kept, FinishReason.STOP)
            if token in stop_token_ids:
                return Cut(kept, FinishReason.STOP, int(token))
            if index in hits:
                return Cut(kept, FinishReason.STOP, hits[index])
        if kept == room:
            return Cut(kept, FinishReason.LENGTH)
    return Cut(len(run))
