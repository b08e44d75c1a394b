"""When the news of one answer came, and the three times that follow from it.

arrived ── queue ──► slot ──── first output ── ITL ──► output ── ITL ──► last output
   └──────────── TTFT ────────────────┘└────────────── TPOT * tokens behind the first ──┘
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.types import EngineOutput


@dataclass(slots=True)
class AnswerTimes:
    """Times of one answer, in seconds on one clock.

    Under speculation one output brings several tokens: ITL is the time between two outputs, what somebody who reads along waits;
    TPOT is the time a token.

    Attributes:
        arrived_s: when its call came in.
        first_s, last_s: when its first and last tokens came; 0 before there are any.
        num_tokens: so far. num_first: of these, those that came first, together.
        queue_s: what the engine said it waited for its first slot.
        num_retractions: how often it lost its slot.
    """

    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_first: int = 0
    queue_s: float = 0.0
    num_retractions: int = 0

    def note(self, output: EngineOutput, now_s: float) -> float | None:
        """Take news; returns the seconds since its last tokens, or None where these are the first, or there are none."""
        self.queue_s, self.num_retractions = output.queue_s, output.num_retractions
        num_tokens = len(output.token_ids)
        if not num_tokens:
            return None
        last_s, self.last_s = self.last_s, now_s
        if self.num_tokens:
            self.num_tokens += num_tokens
            return now_s - last_s
        self.first_s, self.num_first = now_s, num_tokens
        self.num_tokens = num_tokens
        return None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first output; None before there is one."""
        return self.first_s - self.arrived_s if self.num_tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token behind the first output; None where there is none."""
        num_later = self.num_tokens - self.num_first
        return (self.last_s - self.first_s) / num_later if num_later else None
