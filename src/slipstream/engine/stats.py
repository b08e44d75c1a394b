"""Counters of the engine, read by metrics, health and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftStats:
    """Totals of one drafter; times in seconds. `accepted_at[i]`: drafts of which i + 1 tokens or more were accepted and kept."""

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    propose_s: float = 0.0
    observe_s: float = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A draft of `num_drafted` nodes was verified."""
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.accepted_at.extend([0] * (num_accepted - len(self.accepted_at)))
        for position in range(num_accepted):
            self.accepted_at[position] += 1


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
