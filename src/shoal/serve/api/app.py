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

from shoal.data import TokenTexts
from shoal.runs.monitoring.prometheus import Metric, MetricSample, exposition
from shoal.serve.api import responses as schema
from shoal.serve.api.completion import Generation, TextDelta, check_tokens, prompt_ids, tokens_of
from shoal.serve.api.embedding import embed, in_base64, input_ids
from shoal.serve.api.openapi import describe, error_responses, generated_responses
from shoal.serve.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    JsonRoute,
    TokenizeRequest,
    refusal_of,
)
from shoal.serve.batching import BatchingEngine, JobEvent, QueueFullError, is_answer, probe_job
from shoal.serve.load_model import ServedModel
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

    def __init__(self, served: ServedModel, engine: BatchingEngine) -> None:
        self.served, self.engine = served, engine
        self.token_texts = TokenTexts(served.tokenizer)
        self.answered: Counter[int] = Counter()
        """Requests by status."""
        self.created = int(time.time())
        self._probing: asyncio.Task[bool] | None = None

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        engine = self.engine
        by_status = [MetricSample(count, {"status": str(status)}) for status, count in sorted(self.answered.items())]
        counters = (
            ("shoal_prompt_tokens_total", "counter", "Tokens of prompts that the model has read.", engine.tokens_read),
            ("shoal_reused_tokens_total", "counter", "Tokens of prompts from the prefix cache.", engine.tokens_reused),
            ("shoal_kept_tokens", "gauge", "Tokens in the prefix cache.", engine.prefixes.tokens),
            ("shoal_written_tokens_total", "counter", "Tokens that were generated.", engine.tokens_written),
            ("shoal_requests_running", "gauge", "Answers that are being generated.", len(engine.running)),
            ("shoal_requests_waiting", "gauge", "Answers that wait to be generated.", len(engine.waiting)),
            ("shoal_places", "gauge", "Answers that can be generated at once.", engine.most_running),
        )
        metrics = [Metric(name, kind, help, [MetricSample(value)]) for name, kind, help, value in counters]
        text = exposition([Metric("shoal_requests_total", "counter", "Requests by HTTP status.", by_status), *metrics])
        return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})

    async def models(self) -> schema.ModelList:
        """The model that is served."""
        return schema.ModelList(data=[await self.model(self.served.name)])

    async def model(self, model: str) -> schema.ModelEntry:
        """The model of this name."""
        self._check_model(model)
        return schema.ModelEntry(id=self.served.name, created=self.created)

    def _check_model(self, name: str) -> None:
        """Raises RefusedError where another model is asked for."""
        if name != self.served.name:
            message = f"there is no model {name[:100]!r} here; this is {self.served.name!r}"
            raise RefusedError(404, message, param="model", code="model_not_found")

    async def status(self) -> schema.Status:
        """The machines that hold the model, how busy they are, and the values of requests that name none. The chat page shows this."""
        engine = self.engine
        machines, running, waiting = engine.backend.machines(), len(engine.running), len(engine.waiting)
        return schema.Status(
            model=self.served.name,
            machines=machines,
            running=running,
            waiting=waiting,
            tokens=engine.tokens_written,
            defaults=schema.defaults_of(self.served.settings),
        )

    async def health(self) -> schema.Health:
        """Whether the process answers."""
        return schema.Health(model=self.served.name)

    async def ready(self) -> Response:
        """Whether the model works: a token was generated in the last ten seconds, or is now."""
        is_ready = self.engine.clock() - self.engine.wrote_at <= _READY_S or await self._probed()
        running, waiting = len(self.engine.running), len(self.engine.waiting)
        body = schema.Readiness(status="ready" if is_ready else "not ready", running=running, waiting=waiting)
        return JSONResponse(body.model_dump(), 200 if is_ready else 503)

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

        try:
            numbers = self.engine.submit(probe_job(on_event, self.engine.clock() + _READY_S))
        except QueueFullError:
            return False
        try:
            await asyncio.wait_for(done.wait(), _READY_S)
        except TimeoutError:
            self.engine.cancel(numbers)
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
        self._check_model(body.model)
        texts = await asyncio.to_thread(input_ids, body, self.served, self.engine)
        vectors = await _unless_disconnected(request, embed(body, texts, self.served, self.engine))
        if vectors is None:
            return Response(status_code=499)
        self.answered[200] += 1
        coded: Sequence[Any] = vectors if body.encoding_format == "float" else [in_base64(vector) for vector in vectors]
        data = [schema.Embedding(index=i, embedding=one) for i, one in enumerate(coded)]
        count = sum(map(len, texts))
        usage = schema.EmbeddingUsage(prompt_tokens=count, total_tokens=count)
        answer = schema.EmbeddingList(data=data, model=self.served.name, usage=usage)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def tokenize(self, body: TokenizeRequest) -> schema.Tokenized:
        """The token ids of a text as /v1/completions reads it, or of a conversation as /v1/chat/completions does."""
        if body.model is not None:
            self._check_model(body.model)
        ids = await asyncio.to_thread(tokens_of, body, self.served)
        return schema.Tokenized(tokens=ids, count=len(ids), max_model_len=self.engine.backend.longest)

    async def detokenize(self, body: DetokenizeRequest) -> schema.Detokenized:
        """The text of token ids."""
        if body.model is not None:
            self._check_model(body.model)
        check_tokens(body.tokens, self.engine.backend.vocab_size, "tokens")
        return schema.Detokenized(prompt=await asyncio.to_thread(self.served.tokenizer.decode, body.tokens))

    async def _generate(self, body: GenerationRequest, request: Request) -> Response:
        self._check_model(body.model)
        prompts = await asyncio.to_thread(prompt_ids, body, self.served, self.engine.backend.vocab_size)
        generation = Generation(self.engine, self.served, body, prompts)
        writer = schema.ResponseWriter(generation, self.served.name, self.served.tokenizer, self.token_texts)
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
            if (chunk := writer.chunk(delta)) is not None:
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
        return Response(status_code=499) if deltas is None else Response(writer.whole(deltas), media_type="application/json")
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


def make_app(served: ServedModel, engine: BatchingEngine) -> FastAPI:
    """All routes. `/docs` is a page of our own, made from `/openapi.json`: FastAPI's pages load scripts from other servers."""
    api = Api(served, engine)
    description = "A language model that Shoal serves, in OpenAI's form."
    app = FastAPI(title="Shoal", version=__version__, description=description, docs_url=None, redoc_url=None)
    _add_routes(app, api, needs_key=served.settings.api_key is not None)
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
    app.get("/v1/models", **secured)(api.models)
    app.get("/v1/models/{model:path}", responses=error_responses(404), **secured)(api.model)
    app.get("/v1/status", **secured)(api.status)
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
