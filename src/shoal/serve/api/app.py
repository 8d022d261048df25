"""The HTTP API: OpenAI's chat completions and completions, health, metrics, their documentation, and the chat page."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Match

from shoal.runs.monitoring.prometheus import exposition
from shoal.serve.api import responses as schema
from shoal.serve.api.completion import Generation, TextDelta, check_tokens, prompt_ids, tokens_of
from shoal.serve.api.embedding import embed, in_base64, input_ids
from shoal.serve.api.grammars import constraint_for, tool_use
from shoal.serve.api.json_body import JsonRoute
from shoal.serve.api.metrics import pool_metrics
from shoal.serve.api.openapi import describe, error_responses, generated_responses
from shoal.serve.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    TokenizeRequest,
    refusal_of,
)
from shoal.serve.batching.batching_engine import BatchingEngine, QueueFullError
from shoal.serve.batching.generation_job import JobEvent, is_answer, probe_job
from shoal.serve.model_pool import ModelPool, ModelState
from shoal.transports.metrics_page import CONTENT_TYPE
from shoal.version import __version__
from shoal.web.auth import RefusedError
from shoal.web.pages import show_page

_Result = TypeVar("_Result")
_READY_S = 10.0
"""For this long after a token was generated, the model counts as working."""
_PAGES = Path(__file__).parents[1]


class Api:
    """The routes' handlers, and the state that they share."""

    def __init__(self, models: ModelPool) -> None:
        self.models = models
        self.answered: Counter[int] = Counter()
        """Requests by status."""
        self.created = int(time.time())
        self._probing: asyncio.Task[bool] | None = None

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(exposition(pool_metrics(self.models.states(), self.answered)), headers={"content-type": CONTENT_TYPE})

    async def list_models(self) -> schema.ModelList:
        """The models and adapters that are served."""
        return schema.ModelList(data=[self._entry(state) for state in self.models.states()])

    async def model(self, model: str) -> schema.ModelEntry:
        """The model of this name."""
        return self._entry(self.models.state(model))

    def _entry(self, state: ModelState) -> schema.ModelEntry:
        return schema.ModelEntry(id=state.name, created=self.created, parent=state.parent, loaded=state.loaded is not None)

    async def status(self, model: str | None = None) -> schema.Status:
        """The machines that hold a model, how busy they are, and the values of requests that name none; of the first model where `model` is
        not given. The chat page shows this."""
        states = self.models.states()
        state = states[0] if model is None else self.models.state(model)
        engine = state.loaded.engine if state.loaded else None
        settings = state.loaded.served.settings if state.loaded else self.models.settings
        return schema.Status(
            model=state.name,
            models=[self._entry(one) for one in states],
            machines=engine.backend.machines() if engine else [],
            max_running=state.loaded.limit.answers if state.loaded else None,
            max_running_reason=state.loaded.limit.reason if state.loaded else "",
            running=len(engine.running) if engine else 0,
            waiting=len(engine.waiting) if engine else 0,
            tokens=state.counts["written"] + (engine.tokens_written if engine else 0),
            defaults=schema.defaults_of(settings),
        )

    async def health(self) -> schema.Health:
        """Whether the process answers."""
        return schema.Health(model=self.models.states()[0].name)

    async def ready(self) -> Response:
        """Whether a model works: a token was generated in the last ten seconds, or is now."""
        engines = self._engines()
        wrote_at = max((engine.wrote_at for engine in engines), default=float("-inf"))
        is_ready = bool(engines) and (engines[0].clock() - wrote_at <= _READY_S or await self._probed())
        running, waiting = sum(len(one.running) for one in engines), sum(len(one.waiting) for one in engines)
        body = schema.Readiness(status="ready" if is_ready else "not ready", running=running, waiting=waiting)
        return JSONResponse(body.model_dump(), 200 if is_ready else 503)

    def _engines(self) -> list[BatchingEngine]:
        """Those of all loaded models."""
        return [state.loaded.engine for state in self.models.states() if state.loaded is not None and state.parent is None]

    async def _probed(self) -> bool:
        """One token goes through the model for all clients that ask at the same time: they need no key."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> bool:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        events: list[JobEvent] = []

        def on_event(event: JobEvent) -> bool:
            events.append(event)
            loop.call_soon_threadsafe(done.set)
            return True

        engine = self._engines()[0]
        try:
            numbers = engine.submit(probe_job(on_event, engine.clock() + _READY_S))
        except QueueFullError:
            return False
        try:
            await asyncio.wait_for(done.wait(), _READY_S)
        except TimeoutError:
            engine.cancel(numbers)
            return False
        return is_answer(events[0])

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        return await self._generate(body, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await self._generate(body, request)

    async def embed(self, body: EmbeddingRequest, request: Request) -> Response:
        """A vector of length 1 for each text, from the model's last hidden states."""
        async with self.models.use(body.model) as (served, engine, _, _):
            texts = await asyncio.to_thread(input_ids, body, served, engine)
            vectors = await _unless_disconnected(request, embed(body, texts, served, engine))
        if vectors is None:
            return Response(status_code=499)
        self.answered[200] += 1
        coded: Sequence[Any] = vectors if body.encoding_format == "float" else [in_base64(vector) for vector in vectors]
        data = [schema.Embedding(index=i, embedding=one) for i, one in enumerate(coded)]
        count = sum(map(len, texts))
        usage = schema.EmbeddingUsage(prompt_tokens=count, total_tokens=count)
        answer = schema.EmbeddingList(data=data, model=served.name, usage=usage)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def tokenize(self, body: TokenizeRequest) -> schema.Tokenized:
        """The token ids of a text as /v1/completions reads it, or of a conversation as /v1/chat/completions does."""
        async with self.models.use(self._named(body.model)) as (served, engine, _, _):
            ids = await asyncio.to_thread(tokens_of, body, served)
            return schema.Tokenized(tokens=ids, count=len(ids), max_model_len=engine.backend.longest)

    async def detokenize(self, body: DetokenizeRequest) -> schema.Detokenized:
        """The text of token ids."""
        async with self.models.use(self._named(body.model)) as (served, engine, _, _):
            check_tokens(body.tokens, engine.backend.vocab_size, "tokens")
            return schema.Detokenized(prompt=await asyncio.to_thread(served.tokenizer.decode, body.tokens))

    def _named(self, model: str | None) -> str:
        """The first model where a request names none."""
        return self.models.states()[0].name if model is None else model

    async def _generate(self, body: GenerationRequest, request: Request) -> Response:
        async with self.models.use(body.model) as (served, engine, token_texts, grammars):
            tools = tool_use(body, served.tool_format)
            described = body.tools if tools is not None and isinstance(body, ChatRequest) else []
            prompts = await asyncio.to_thread(prompt_ids, body, served, engine.backend, described)
            constraint = await constraint_for(body, tools, grammars)
            generation = Generation(engine, served, body, prompts, tools, constraint)
        writer = schema.ResponseWriter(generation, served.name, served.tokenizer, token_texts)
        if body.stream:
            response: Response = StreamingResponse(
                _stream(generation, writer), media_type="text/event-stream", headers={"cache-control": "no-store"}
            )
        else:
            response = await _whole(request, generation, writer)
        self.answered[response.status_code] += 1
        return response


async def _stream(generation: Generation, writer: schema.ResponseWriter) -> AsyncIterator[str]:
    try:
        async for delta in generation.deltas():
            chunk = await asyncio.to_thread(writer.chunk, delta) if writer.has_prompt(delta) else writer.chunk(delta)
            if chunk is not None:
                yield chunk
        if generation.request.stream_options.include_usage:
            yield writer.usage_chunk()
        yield "data: [DONE]\n\n"
    except RefusedError as refused:
        yield schema.error_event(refused)
    finally:
        generation.cancel()


async def _whole(request: Request, generation: Generation, writer: schema.ResponseWriter) -> Response:
    async def collect() -> list[TextDelta]:
        return [delta async for delta in generation.deltas()]

    try:
        deltas = await _unless_disconnected(request, collect())
        if deltas is None:
            return Response(status_code=499)
        # With the probabilities of many tokens this takes seconds, in which the other requests go on
        return Response(await asyncio.to_thread(writer.whole, deltas), media_type="application/json")
    finally:
        generation.cancel()


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of the work. If the client closes the connection before, the work is cancelled, and the result is None."""
    working, disconnecting = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, disconnecting):
            task.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(models: ModelPool) -> FastAPI:
    """All routes. `/docs` is a page of our own, made from `/openapi.json`: FastAPI's pages load scripts from other servers."""
    api = Api(models)
    description = "Language models that Shoal serves, in OpenAI's form."
    app = FastAPI(title="Shoal", version=__version__, description=description, docs_url=None, redoc_url=None)
    _add_routes(app, api, needs_key=models.settings.api_key is not None)
    _add_error_handlers(app, api)
    document = describe(app, schema.ChatCompletionChunk)
    app.openapi = lambda: document  # type: ignore[method-assign]
    show_page(app, _PAGES / "api_page", at="/docs")
    show_page(app, _PAGES / "page")
    return app


def _add_routes(app: FastAPI, api: Api, needs_key: bool) -> None:
    """`needs_key` only describes: `AuthMiddleware` checks the key before a request comes here."""
    bearer = HTTPBearer(auto_error=False, scheme_name="key", description="The key of `serving.api_key` or SHOAL_API_KEY.")
    secured: dict[str, Any] = {"dependencies": [Depends(bearer)]} if needs_key else {}

    def post(path: str, handler: Callable[..., Any], **more: Any) -> None:
        app.router.add_api_route(path, handler, methods=["POST"], route_class_override=JsonRoute, **more, **secured)

    chats = generated_responses(schema.ChatCompletion, schema.ChatCompletionChunk)
    texts = generated_responses(schema.TextCompletion, schema.TextCompletion)
    post("/v1/chat/completions", api.chat, response_class=Response, responses=chats)
    post("/v1/completions", api.complete, response_class=Response, responses=texts)
    errors = error_responses(400, 404, 413, 415)
    busy = error_responses(429, 503, 504)
    post("/v1/embeddings", api.embed, response_class=Response, responses={200: {"model": schema.EmbeddingList}, **errors, **busy})
    post("/tokenize", api.tokenize, responses=errors)
    post("/detokenize", api.detokenize, responses=errors)
    app.get("/v1/models", **secured)(api.list_models)
    app.get("/v1/models/{model:path}", responses=error_responses(404), **secured)(api.model)
    app.get("/v1/status", responses=error_responses(404), **secured)(api.status)
    app.get("/health")(api.health)
    app.get("/ready", responses={200: {"model": schema.Readiness}, 503: {"model": schema.Readiness}})(api.ready)
    app.get("/metrics", response_class=PlainTextResponse, **secured)(api.metrics)


def _add_error_handlers(app: FastAPI, api: Api) -> None:
    """Every error is answered in OpenAI's form."""

    async def refuse(request: Request, error: Exception) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, RequestValidationError):
            error = refusal_of(error.errors())
        elif isinstance(error, HTTPException):
            error, headers = _no_such_path(app, request, error)
        assert isinstance(error, RefusedError)
        api.answered[error.status] += 1
        if error.status == 429:
            headers = {"retry-after": "1"}
        return JSONResponse(error.body(), error.status, headers)

    for kind in (RefusedError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refuse)


def _no_such_path(app: FastAPI, request: Request, error: HTTPException) -> tuple[RefusedError, dict[str, str]]:
    """The refusal of a request that no route has answered, and its headers. The files of the page have every path that no route has."""
    asked = f"{request.method} {request.url.path[:200]}"
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.matches(request.scope)[0] is Match.PARTIAL]
    methods = sorted({method for route in routes for method in route.methods or ()})
    if methods:
        return RefusedError(405, f"{asked}: this path takes {', '.join(methods)}"), {"allow": ", ".join(methods)}
    if error.status_code in (404, 405):
        return RefusedError(404, f"{asked}: there is no such path; GET /docs lists all"), {}
    return RefusedError(error.status_code, f"{asked}: {error.detail}"), {}
