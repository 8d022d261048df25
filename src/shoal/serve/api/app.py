"""The HTTP API: OpenAI's chat completions and completions, health, figures, and the chat page."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.serve.api.completion import Answer, prompts_of
from shoal.serve.api.requests import Asked, read_chat, read_completion, read_json
from shoal.serve.api.responses import Form, event
from shoal.serve.batching import BatchingEngine, Finished, GenerationJob, JobEvent, QueueFullError
from shoal.serve.load_model import ServedModel
from shoal.web.auth import RefusedError
from shoal.web.pages import show_page

_LARGEST_BODY = 4 * 2**20
_READY_S = 10.0
"""How long a token that went through the model says that it works."""


class Metrics:
    """Requests by status, beside what the engine knows itself, in the form that Prometheus reads."""

    def __init__(self, engine: BatchingEngine) -> None:
        self.engine = engine
        self.answered: Counter[int] = Counter()

    def text(self) -> str:
        engine = self.engine
        lines = ["# TYPE shoal_requests_total counter"]
        lines += [f'shoal_requests_total{{status="{status}"}} {count}' for status, count in sorted(self.answered.items())]
        for name, kind, value in (
            ("shoal_prompt_tokens_total", "counter", engine.tokens_read),
            ("shoal_reused_tokens_total", "counter", engine.tokens_reused),
            ("shoal_kept_tokens", "gauge", engine.prefixes.tokens),
            ("shoal_written_tokens_total", "counter", engine.tokens_written),
            ("shoal_requests_running", "gauge", len(engine.running)),
            ("shoal_requests_waiting", "gauge", len(engine.waiting)),
            ("shoal_places", "gauge", engine.most_running),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"


class Api:
    """What the routes share."""

    def __init__(self, served: ServedModel, engine: BatchingEngine) -> None:
        self.served, self.engine = served, engine
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self._probing: asyncio.Task[bool] | None = None

    async def models(self) -> Response:
        entry = {"id": self.served.name, "object": "model", "created": self.created, "owned_by": "shoal"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def status(self) -> Response:
        """What the chat page shows of the machines and of what they do."""
        engine = self.engine
        machines = [one._asdict() for one in engine.stages.machines()]
        figures = {"running": len(engine.running), "waiting": len(engine.waiting), "tokens": engine.tokens_written}
        return JSONResponse({"model": self.served.name, "machines": machines, **figures})

    async def health(self) -> Response:
        return JSONResponse({"status": "ok", "model": self.served.name})

    async def ready(self) -> Response:
        """Ready is a server through which a token really went a moment ago."""
        if self.engine.clock() - self.engine.wrote_at > _READY_S and not await self._probed():
            return JSONResponse({"status": "not ready"}, 503)
        return JSONResponse({"status": "ready", "running": len(self.engine.running), "waiting": len(self.engine.waiting)})

    async def _probed(self) -> bool:
        """However many ask at once, and without a key: one token goes through the model for all of them."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> bool:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        heard: list[JobEvent] = []

        def hear(one: JobEvent) -> bool:
            heard.append(one)
            loop.call_soon_threadsafe(done.set)
            return True

        try:
            numbers = self.engine.submit(
                GenerationJob([0], 1, TokenDraws(0, [0]), hear, Warp(0.0), deadline=self.engine.clock() + _READY_S)
            )
        except QueueFullError:
            return False
        try:
            await asyncio.wait_for(done.wait(), _READY_S)
        except TimeoutError:
            self.engine.cancel(numbers)
            return False
        return not isinstance(heard[0], Finished) or heard[0].reason == "stop"

    async def answer(self, request: Request, read: Callable[[dict[str, Any]], Asked]) -> Response:
        asked = read(read_json(await _body(request)))
        if asked.model != self.served.name:
            message = f"there is no model {asked.model[:100]!r} here; this is {self.served.name!r}"
            raise RefusedError(404, message, param="model", code="model_not_found")
        prompts = await asyncio.to_thread(prompts_of, asked, self.served, self.engine.stages.vocab_size)
        answer = Answer(self.engine, self.served, asked, prompts)
        answer.begin()
        form = Form(answer, self.served.name, self.served.tokenizer)
        if asked.stream:
            return StreamingResponse(_stream(answer, form), media_type="text/event-stream", headers={"cache-control": "no-store"})
        return await _whole(request, answer, form)


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A form of some stranger's page can be sent without asking; JSON cannot
        raise RefusedError(415, "the body must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _LARGEST_BODY:
            raise RefusedError(413, f"the body may have {_LARGEST_BODY} bytes at most")
    return b"".join(parts)


async def _stream(answer: Answer, form: Form) -> AsyncIterator[str]:
    begun: set[int] = set()
    try:
        async for piece in answer.pieces():
            if piece.text or piece.reason or piece.choice not in begun or answer.asked.top_logprobs is not None:
                yield form.chunk(piece, piece.choice not in begun)
                begun.add(piece.choice)
        if answer.asked.include_usage:
            yield form.usage_chunk()
        yield "data: [DONE]\n\n"
    except RefusedError as refused:
        yield event(refused.body())
    finally:
        answer.leave()


async def _whole(request: Request, answer: Answer, form: Form) -> Response:
    async def collect() -> list[Any]:
        return [piece async for piece in answer.pieces()]

    collecting, hanging_up = asyncio.create_task(collect()), asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({collecting, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)
        return JSONResponse(form.whole(collecting.result()))
    finally:
        answer.leave()
        for task in (collecting, hanging_up):
            task.cancel()


async def _hang_up(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(served: ServedModel, engine: BatchingEngine) -> FastAPI:
    """All routes. FastAPI's own documentation pages are off: they load scripts from elsewhere."""
    api = Api(served, engine)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        api.metrics.answered[error.status] += 1
        return JSONResponse(error.body(), error.status, {"retry-after": "1"} if error.status == 429 else None)

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await refuse(request, RefusedError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}"))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return counted(await api.answer(request, read_chat))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return counted(await api.answer(request, read_completion))

    def counted(response: Response) -> Response:
        api.metrics.answered[response.status_code] += 1
        return response

    app.get("/v1/models")(api.models)
    app.get("/v1/status")(api.status)
    app.get("/health")(api.health)
    app.get("/ready")(api.ready)
    app.get("/metrics")(lambda: PlainTextResponse(api.metrics.text(), media_type="text/plain; version=0.0.4"))
    app.add_exception_handler(RefusedError, refuse)
    app.add_exception_handler(HTTPException, not_found)
    show_page(app, Path(__file__).parents[1] / "page")
    return app
