"""The OpenAI routes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.body import read_object
from slipstream.server.docs import CHAT_DOCS, COMPLETION_DOCS
from slipstream.server.logprobs import Json
from slipstream.server.middleware import note
from slipstream.server.protocol import Call, Prompt, chat_call, completion_call
from slipstream.server.serving import Serving, new_id
from slipstream.server.shapes import ChatShape, CompletionShape, Shape, usage_object
from slipstream.server.stream import EventStream
from slipstream.types import SamplingParams


def openai_routes(serving: Serving) -> APIRouter:
    """/v1/completions, /v1/chat/completions and /v1/models for one served model."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.post("/completions", openapi_extra=COMPLETION_DOCS, response_model=None)
    async def completions(request: Request) -> Response:
        """Continue text or token ids."""
        arrived = time.monotonic()
        serving.check_open()
        call = completion_call(await read_object(request, serving.config.max_body_bytes))
        serving.check_model(call.model)
        params = serving.frontend.sampling_params(call.sampling)
        shape = partial(CompletionShape, echo=call.echo)
        return await _answer(serving, request, call, call.prompts, params, shape, new_id("cmpl"), arrived)

    @router.post("/chat/completions", openapi_extra=CHAT_DOCS, response_model=None)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived = time.monotonic()
        serving.check_open()
        call = chat_call(await read_object(request, serving.config.max_body_bytes))
        serving.check_model(call.model)
        frontend = serving.frontend
        params = frontend.sampling_params(call.sampling, {"max_tokens": None})  # a reply may be as long as the context
        prompt = frontend.chat_prompt(call.messages, call.add_generation_prompt, template_kwargs=call.template_kwargs)
        return await _answer(serving, request, call, (prompt,), params, ChatShape, new_id("chatcmpl"), arrived)

    @router.get("/models", response_model=None)
    async def models() -> Response:
        """List the served model."""
        serving.check_open()
        return _json({"object": "list", "data": [_model_object(serving)]})

    @router.get("/models/{model:path}", response_model=None)
    async def one_model(model: str) -> Response:
        """Describe the served model."""
        serving.check_model(model)
        return _json(_model_object(serving))

    return router


async def _answer(
    serving: Serving,
    request: Request,
    call: Call,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    make_shape: Callable[..., Shape],
    response_id: str,
    arrived: float,
) -> Response:
    info = serving.frontend.info
    prepared = await serving.prepare(response_id, prompts, params, priority=call.priority, cache_salt=call.cache_salt)
    answers = serving.submit(prepared, arrived)
    shape = make_shape(response_id, info.name, params, info.tokenizer, answers.prompts, call.num_prompt_logprobs)
    note(request.scope, response=response_id, answers=answers)

    def usage() -> Json:
        counts = answers.num_prompt_tokens, answers.num_output_tokens, answers.num_cached_tokens
        return usage_object(*counts, answers.drafting() if serving.config.can_draft else None, call.include_draft_details)

    handed_over = False
    try:
        async with answers.until_hang_up(request.receive):
            await answers.first()
            if call.stream:
                handed_over = True
                return EventStream(answers, shape, usage if call.include_usage else None, serving.release)
            async for _ in answers:
                pass
        return _json(shape.whole(answers.whole(), usage()))
    finally:
        if not handed_over:
            serving.release(answers)


def _model_object(serving: Serving) -> dict[str, Any]:
    info = serving.frontend.info
    return {
        "id": info.name,
        "object": "model",
        "created": serving.started,
        "owned_by": "slipstream",
        "max_model_len": info.context_len,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
