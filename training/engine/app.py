"""HTTP in front of the worker: completions (unary and streamed), health, models, stats, metrics, weight update.

A client that goes away is noticed by a task that waits for the disconnect, also while its request is still queued, so
that its slot is free again before the next step.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from rollout.errors import ConfigError, EngineError
from training.engine.batcher import Event, Request
from training.engine.wire import CompletionRequest, UpdateRequest, by_version, choice, error
from training.engine.worker import EngineWorker

UPDATE_S = 300.0
KEY_VARIABLE = "OPENFORGE_ENGINE_KEY"

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Served:
    """What this process serves and under which names."""

    worker: EngineWorker
    names: tuple[str, ...]
    eos: frozenset[int]
    key: str
    """Bearer key of /update_weights; empty refuses every update."""


class EngineApp:
    """The routes' handlers."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/stats", self.stats),
            Route("/metrics", self.metrics),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/update_weights", self.update, methods=["POST"]),
        ]

    async def health(self, _request: HttpRequest) -> Response:
        failure = self._served.worker.failure
        return refuse(failure, "engine_error", 503) if failure else JSONResponse({"status": "ok"})

    async def models(self, _request: HttpRequest) -> Response:
        stats = self._served.worker.stats()
        rows = [{"id": n, "object": "model", "max_model_len": stats.max_len} for n in self._served.names]
        return JSONResponse({"object": "list", "data": rows, "weight_version": stats.version})

    async def stats(self, _request: HttpRequest) -> Response:
        return JSONResponse(asdict(self._served.worker.stats()))

    async def metrics(self, _request: HttpRequest) -> Response:
        rows = asdict(self._served.worker.stats()).items()
        return PlainTextResponse("".join(f"openforge_engine_{name} {value}\n" for name, value in rows))

    async def completions(self, request: HttpRequest) -> Response:
        try:
            wanted = await parse(request, CompletionRequest)
            asked = self._admit(wanted)
        except ConfigError as bad:
            return refuse(str(bad), "invalid_request_error", 400)
        if wanted.model and wanted.model not in self._served.names:
            message = f"no model {wanted.model!r} here; this engine serves {', '.join(self._served.names)}"
            return refuse(message, "not_found_error", 404)
        if self._served.worker.failure:
            return refuse(self._served.worker.failure, "engine_error", 503)
        return Completion(self._served.worker, wanted, asked)

    def _admit(self, wanted: CompletionRequest) -> Request:
        eos = frozenset() if wanted.ignore_eos else self._served.eos
        asked = Request(
            id=uuid.uuid4().hex,
            prompt=tuple(wanted.prompt),
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
            stop_ids=eos | frozenset(wanted.stop_token_ids),
        )
        self._served.worker.check(asked)
        return asked

    async def update(self, request: HttpRequest) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not self._served.key or not hmac.compare_digest(given.encode(), self._served.key.encode()):
            return refuse(f"/update_weights takes the bearer key of {KEY_VARIABLE}", "authentication_error", 401)
        began = time.monotonic()
        try:
            wanted = await parse(request, UpdateRequest)
            await self._served.worker.update(wanted.path, wanted.version, UPDATE_S)
        except ConfigError as bad:
            return refuse(str(bad), "invalid_request_error", 400)
        except (EngineError, TimeoutError) as failed:
            return refuse(str(failed) or "the update passed its deadline", "engine_error", 503)
        return JSONResponse({"weight_version": wanted.version, "seconds": round(time.monotonic() - began, 3)})


class Completion(Response):
    """Answers one request; cancels it when the client goes away."""

    def __init__(self, worker: EngineWorker, wanted: CompletionRequest, asked: Request) -> None:
        self._worker, self._wanted, self._asked = worker, wanted, asked
        self.background = None
        self._head = {"id": f"cmpl-{asked.id}", "object": "text_completion", "model": wanted.model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._stream(send) if self._wanted.stream else self._whole(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
        if not answer.cancelled() and (problem := answer.exception()) and not isinstance(problem, OSError):
            raise problem

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self._worker.generate(self._asked)) as events:
            async for some in events:
                yield some

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        got: list[Event] = []
        try:
            async with aclosing(self._events()) as events:
                async for some in events:
                    got.extend(some)
        except EngineError as failed:
            await refuse(str(failed), "engine_error", 503)(scope, receive, send)
            return
        body = {
            **self._head,
            "choices": [choice(got, logprobs=self._wanted.logprobs is not None)],
            "usage": usage(self._asked, len(got)),
            "weight_version": got[-1].version,
            "version_spans": [{"version": v, "tokens": len(part)} for v, part in by_version(got)],
        }
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        kind = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        try:
            async with aclosing(self._events()) as events:
                async for some in events:
                    chunks = [
                        {
                            **self._head,
                            "choices": [choice(part, logprobs=self._wanted.logprobs is not None)],
                            "weight_version": version,
                        }
                        for version, part in by_version(some)
                    ]
                    await send(sse(*chunks))
        except EngineError as failed:
            await send(sse(error(str(failed), "engine_error", 503)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(*bodies: dict[str, Any]) -> Message:
    lines = "".join(f"data: {json.dumps(body, separators=(',', ':'))}\n\n" for body in bodies)
    return {"type": "http.response.body", "body": lines.encode(), "more_body": True}


def usage(asked: Request, sampled: int) -> dict[str, int]:
    prompt = len(asked.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def refuse(message: str, kind: str, status: int) -> JSONResponse:
    return JSONResponse(error(message, kind, status), status_code=status)


async def parse(request: HttpRequest, model: type[B]) -> B:
    """The body as `model`; ConfigError names each field that is wrong."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as bad:
        rows = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in bad.errors(include_input=False))
        raise ConfigError("; ".join(rows)) from bad


def create_app(served: Served) -> Starlette:
    """The worker has been started; it is stopped with the application."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.worker.stop)

    return Starlette(routes=EngineApp(served).routes(), lifespan=lifespan)


def key_from_environment() -> str:
    return os.environ.get(KEY_VARIABLE, "")


def served_names(path: Path, *names: str) -> tuple[str, ...]:
    """Names that requests may ask for: the given ones and the folder, as given and resolved."""
    return tuple(dict.fromkeys(n for n in (*names, str(path), str(path.resolve())) if n))
