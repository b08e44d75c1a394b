"""What one reply took, as `chat` shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts and times (seconds, `time.perf_counter`) of one reply, filled in as it arrives.

    Attributes:
        num_prompt_tokens, num_cached_tokens: of the prompt, and those of it that needed no computation; None: not told.
        num_tokens: of the reply; None: not told.
        num_steps: engine steps that gave tokens; None where only the server knows.
        stamps: when the first and the last tokens came.
    """

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_tokens: int | None = None
    num_steps: int | None = None
    started_s: float = field(default_factory=time.perf_counter)
    stamps: tuple[float, float] | None = None

    def arrived(self) -> None:
        """Something of the reply came in just now."""
        now = time.perf_counter()
        self.stamps = (now if self.stamps is None else self.stamps[0], now)

    def line(self) -> str:
        """All of it in a line; what nobody told is left out."""
        parts = []
        if self.num_prompt_tokens is not None:
            cached = "" if self.num_cached_tokens is None else f" ({self.num_cached_tokens} cached)"
            parts.append(f"{self.num_prompt_tokens} prompt tokens{cached}")
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens")
        if self.stamps is not None:
            first, last = self.stamps
            parts.append(f"TTFT {(first - self.started_s) * 1000:.0f} ms")
            if self.num_tokens is not None and self.num_tokens > 1 and last > first:
                parts.append(f"{(self.num_tokens - 1) / (last - first):.1f} tok/s")
        if self.num_steps and self.num_tokens:
            parts.append(f"accept length {self.num_tokens / self.num_steps:.2f}")
        return ", ".join(parts) or "no reply yet"
