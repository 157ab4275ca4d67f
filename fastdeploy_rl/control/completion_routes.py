"""OpenAI's routes: /v1/completions, /v1/chat/completions and the cards of models.

Owns the way of a request from its body to its answer. Refuses to know OpenAI's JSON and the engine. Invariant: what a
client that went away asked for is cancelled at once, queued, streamed or whole.

    GET  /v1/models                  the model and the live version
    GET  /v1/models/NAME             the same of one model; 404 for any other
    POST /v1/completions             OpenAI; streamed or whole
    POST /v1/chat/completions        OpenAI; streamed or whole
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from fastdeploy_rl.control.api_page import ApiRoutes
from fastdeploy_rl.control.completions import CompletionService, RunningCompletion
from fastdeploy_rl.control.http_messages import json_answer, read_body
from fastdeploy_rl.control.openai_format import model_card
from fastdeploy_rl.control.openai_schema import Body, ChatBody, CompletionBody, parse_chat, parse_completion
from fastdeploy_rl.control.weights_service import WeightsService


def add_completion_routes(routes: ApiRoutes, completions: CompletionService, weights: WeightsService) -> None:
    _add_model_routes(routes, completions, weights)
    watches: set[asyncio.Task[None]] = set()  # the event loop itself does not keep a task alive
    codes = (200, 400, 404, 429, 503, 504)

    async def complete(request: Request, parse: Callable[[bytes], Body]) -> Response:
        body = parse(await read_body(request))
        # In a thread: making tokens of megabytes of text takes seconds, in which nobody else would be answered.
        running = await asyncio.to_thread(completions.prepare, body)
        if body.weight_version_wait_s:
            await weights.check_may_wait()
        else:
            await weights.check_serving()
        running.start()
        watch = asyncio.create_task(_cancel_when_gone(request, running))
        watches.add(watch)
        watch.add_done_callback(watches.discard)
        if body.stream:
            return StreamingResponse(await running.stream(), media_type="text/event-stream")
        return json_answer(await running.whole())

    @routes.post("/v1/completions", "OpenAI's; streamed or whole", takes=CompletionBody, codes=codes)
    async def text_completions(request: Request) -> Response:
        return await complete(request, parse_completion)

    @routes.post("/v1/chat/completions", "OpenAI's; streamed or whole", takes=ChatBody, codes=codes)
    async def chat_completions(request: Request) -> Response:
        return await complete(request, parse_chat)


async def _cancel_when_gone(request: Request, running: RunningCompletion) -> None:
    """Until the client hung up, or has its response: then there is nothing left to cancel."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    running.cancel()


def _add_model_routes(routes: ApiRoutes, completions: CompletionService, weights: WeightsService) -> None:
    started = int(time.time())

    async def card() -> dict[str, Any]:
        status = await weights.status()
        return model_card(completions.model_name, started, status, completions.engine.max_model_len)

    @routes.get("/v1/models", "the model, and which weights of it are live")
    async def models() -> Response:
        return json_answer({"object": "list", "data": [await card()]})

    @routes.get("/v1/models/{name:path}", "the same of one model", codes=(200, 404))
    async def model(name: str) -> Response:
        completions.check_model(name)
        return json_answer(await card())
