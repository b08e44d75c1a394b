"""The throughput line: what the engine did since the last one. A pure function of two readings of its counters."""

from __future__ import annotations

from slipstream.observe.metrics import EngineCounters, num_used_pages


def throughput(before: EngineCounters, now: EngineCounters, seconds: float) -> dict[str, object] | None:
    """Fields of the line; None where nothing happened and nothing is there to happen, so that an idle server is silent.

    Args:
        before, now: the engine's counters at two times.
        seconds: between the two.
    """
    steps = now.num_steps - before.num_steps
    if not (steps or now.num_running or now.num_waiting):
        return None
    prompt, cached = now.num_prompt_tokens - before.num_prompt_tokens, now.num_cached_tokens - before.num_cached_tokens
    drafts = now.num_drafts - before.num_drafts
    return {
        "prompt_tokens_per_s": round(prompt / seconds, 1),
        "output_tokens_per_s": round((now.num_output_tokens - before.num_output_tokens) / seconds, 1),
        "running": now.num_running,
        "waiting": now.num_waiting,
        "paused": now.num_paused,
        "pages_used_percent": round(100 * num_used_pages(now) / now.num_pages, 1) if now.num_pages else 0.0,
        "cache_hit_rate": round(cached / (prompt + cached), 3) if prompt + cached else None,
        "accept_length": round(1 + (now.num_accepted - before.num_accepted) / drafts, 2) if drafts else None,
        "retractions": now.num_retractions - before.num_retractions,
    }
