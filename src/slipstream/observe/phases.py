"""Start-up as a row of named phases, each with the seconds it took.

starting ─► fetching ─► starting engine ─► reading weights ─► building engine ─► ready in 6.2 s (reading weights 3.1 s, ...)
"""

from __future__ import annotations

LEAST_S = 0.05  # what took less is not worth a word


class Phases:
    """Which phase start-up is in, and how long those before it took. A phase that comes again goes on.

    Args:
        first: the phase it begins with.
        now_s: when, in seconds on the clock of all later calls.
    """

    def __init__(self, first: str, now_s: float) -> None:
        self.current: str | None = first
        self.seconds: dict[str, float] = {}
        self._began_s = self._entered_s = now_s

    def enter(self, phase: str | None, now_s: float) -> tuple[str, float] | None:
        """Go on to a phase, or to none: all is done. Returns the one that ends here with its seconds, if one does."""
        if phase == self.current:
            return None
        ended, took_s = self.current, now_s - self._entered_s
        self.current, self._entered_s = phase, now_s
        if ended is None:
            return None
        self.seconds[ended] = self.seconds.get(ended, 0.0) + took_s
        return ended, took_s

    def elapsed_s(self, now_s: float) -> float:
        """Seconds since the start; once all is done, those it took."""
        return now_s - self._began_s if self.current is not None else self._entered_s - self._began_s

    def summary(self, now_s: float) -> str:
        """`6.2 s (starting engine 2.0 s, reading weights 3.1 s, building engine 0.9 s)`, without what took next to nothing."""
        parts = [f"{phase} {took_s:.1f} s" for phase, took_s in self.seconds.items() if took_s >= LEAST_S]
        return f"{self.elapsed_s(now_s):.1f} s" + (f" ({', '.join(parts)})" if parts else "")
