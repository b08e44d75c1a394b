"""Counters of the engine, read by metrics, health and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.types import DraftCounts


@dataclass(slots=True)
class DraftStats(DraftCounts):
    """Totals of one drafter over all requests, and its time in seconds."""

    propose_s: float = 0.0
    observe_s: float = 0.0


@dataclass(slots=True)
class EngineStats:
    """Totals since start, gauges of now. Times in seconds; `last_progress_s` is on the monotonic clock.

    `num_free_pages` hold nothing, `num_evictable_pages` only cached work that nobody uses now; the rest is held by requests.
    `num_prompt_tokens` were computed, `num_cached_tokens` found in the prefix cache instead. `num_paused` running requests were
    left out of the last step for want of a page. `num_drafts`: rows of steps that verified a draft. `drafting`: by drafter.

    `host_s` is what the scheduler thread spent planning and settling, `wait_s` what it waited for results, `device_s` what the
    device spent in steps.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_evictable_pages: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafting: dict[str, DraftStats] = field(default_factory=dict)
    device_s: float = 0.0
    host_s: float = 0.0
    wait_s: float = 0.0
    last_progress_s: float = 0.0

    def drafter(self, name: str) -> DraftStats:
        """Totals of a drafter."""
        return self.drafting.setdefault(name, DraftStats())
