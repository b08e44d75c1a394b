"""The HTTP application, and `run_server`, which serves it until it is told to stop."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

import slipstream
from slipstream.config import EngineConfig
from slipstream.errors import SlipstreamError
from slipstream.server.docs_page import HEADERS, docs_page
from slipstream.server.errors import ClientGone, error_response, from_http, internal_error
from slipstream.server.health import health_routes
from slipstream.server.middleware import CLIENT_GONE, RequireKey, Surround, note
from slipstream.server.openai import openai_routes
from slipstream.server.serving import Serving


def create_app(serving: Serving) -> ASGIApp:
    """All routes over one served model."""
    app = FastAPI(title="Slipstream", version=slipstream.__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.include_router(openai_routes(serving))
    app.include_router(health_routes(serving))

    @app.get("/docs", include_in_schema=False, response_model=None)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers=HEADERS)

    @app.exception_handler(SlipstreamError)
    async def ours(request: Request, error: SlipstreamError) -> Response:
        note(request.scope, error=error)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def frameworks(request: Request, error: HTTPException) -> Response:
        in_our_words = from_http(error, request.method, request.url.path)
        note(request.scope, error=in_our_words)
        response = error_response(in_our_words)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def nobodys(request: Request, error: ClientGone) -> Response:
        note(request.scope, hung_up=True)
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return error_response(internal_error(error))  # and the framework raises it again, for the log

    guarded: ASGIApp = app if serving.config.api_key is None else RequireKey(app, serving.config.api_key)
    return Surround(guarded, serving.metrics)


def run_server(config: EngineConfig) -> int:
    """Serve `config.model` until SIGTERM or Ctrl-C; see `lifecycle.run`."""
    from slipstream.server.lifecycle import run

    return run(config)
