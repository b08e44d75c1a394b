"""Is it alive, does it take work, what has it done: /health, /ready and /metrics. No key is asked for these.

POST /reset_prefix_cache, which does ask for it, makes the engine forget all cached prompts.

/health   200 while the engine process lives and, where it has work, makes progress; also while loading and draining.
          503 once it has made none for --stall-timeout-s: restart it.
/ready    200 while new requests are taken, else 503; while loading with the phase, how far it is, and for how long.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from slipstream.server.errors import error_object
from slipstream.server.serving import Phase, Serving

SCRAPE_S = 0.5  # how long a scrape waits for the engine's counters; then it shows the last known ones


def health_routes(serving: Serving) -> APIRouter:
    """The routes of whoever operates a server."""
    router = APIRouter(tags=["Operation"])

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """Whether the server is worth keeping."""
        return _report(serving, is_good=True)

    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """Whether new requests are taken."""
        return _report(serving, is_good=serving.phase is Phase.READY)

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Counters and times, for Prometheus."""
        counters = await serving.client.stats(SCRAPE_S) if serving.ready is not None else None
        return Response(serving.metrics.render(counters), media_type=CONTENT_TYPE_LATEST)

    @router.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache() -> Response:
        """Forget all cached prompts; what runs is not disturbed."""
        serving.check_open()
        await serving.client.reset_prefix_cache()
        return Response(b'{"success":true}', media_type="application/json")

    return router


def _report(serving: Serving, is_good: bool) -> Response:
    body: dict[str, Any] = {"status": serving.phase.value}
    if serving.phase is Phase.LOADING:
        phases, percent = serving.phases, round(100 * serving.progress, 1)
        body.update(phase=phases.current, percent=percent, elapsed_s=round(phases.elapsed_s(time.monotonic()), 1))
    elif (problem := serving.problem()) is not None:
        body.update(status="failed", error=error_object(problem))
        is_good = False
    return Response(msgspec.json.encode(body), 200 if is_good else 503, media_type="application/json")
