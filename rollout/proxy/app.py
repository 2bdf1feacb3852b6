"""The proxy's routes. Only wiring: every concept has its own file.

POST /rollouts/<id>/v1/chat/completions       dialects/chat through surface -> turn
POST /rollouts/<id>/v1/responses              dialects/responses; GET and WebSocket upgrades: 426
POST /rollouts/<id>/v1/messages               dialects/anthropic
POST /rollouts/<id>/v1/messages/count_tokens
GET  /rollouts/<id>/v1/models, .../<name>     in the caller's shape
POST /rollouts/<id>/tools/<service>/<tool>   gateway
anything else: a fast JSON 404 or 405, never the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from rollout.proxy.attribution import Adapters
from rollout.proxy.dialects.anthropic import MessagesDialect
from rollout.proxy.dialects.base import Dialect, Refused
from rollout.proxy.dialects.chat import ChatDialect
from rollout.proxy.dialects.responses import ResponsesDialect
from rollout.proxy.gateway import Gateway, ToolHost
from rollout.proxy.intake import Intake
from rollout.proxy.session import EngineSource, Sessions
from rollout.proxy.surface import Surface, list_models
from rollout.store import Store


@dataclass(frozen=True)
class ProxyContext:
    """What the proxy is made of. `store` and `engines` are closed by whoever opened them."""

    store: Store
    services: ToolHost
    engines: EngineSource
    adapters: Adapters | None = None
    """How each harness's calls are told apart and stopped; None: all are the agent's own."""


def create_proxy(ctx: ProxyContext) -> Starlette:
    """The app; `app.state.sessions.forget(rollout_id)` ends a rollout's session at once."""
    sessions = Sessions(ctx.store, ctx.engines, ctx.adapters)
    chat = Surface(ChatDialect(), sessions)
    responses = Surface(ResponsesDialect(), sessions)
    messages = Surface(MessagesDialect(), sessions)
    models = partial(list_models, sessions)
    gateway = Gateway(ctx.services, sessions)
    base = "/rollouts/{rollout_id}"
    app = Starlette(
        routes=[
            Route(f"{base}/v1/chat/completions", chat.call, methods=["POST"]),
            Route(f"{base}/v1/responses", responses.call, methods=["POST"]),
            Route(f"{base}/v1/responses", _no_socket, methods=["GET"]),
            WebSocketRoute(f"{base}/v1/responses", _deny_socket),
            Route(f"{base}/v1/messages", messages.call, methods=["POST"]),
            Route(f"{base}/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
            Route(f"{base}/v1/models", models, methods=["GET"]),
            Route(f"{base}/v1/models/{{name:path}}", models, methods=["GET"]),
            Route(f"{base}/tools/{{service}}/{{tool}}", gateway.call, methods=["POST"]),
        ],
        middleware=[Middleware(Intake)],
        exception_handlers={Refused: _refused, HTTPException: _no_route},
    )
    app.state.sessions = sessions
    return app


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Whose error shape a caller reads: told by the path, else by the header that Anthropic's clients always send."""
    if "/v1/messages" in path or "anthropic-version" in headers:
        return MessagesDialect()
    return ResponsesDialect() if path.endswith("/v1/responses") else ChatDialect()


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return _error(request, refused, {})


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = Refused(error.status_code, "no_route", f"{request.method} {request.url.path}: {error.detail}")
    return _error(request, refused, error.headers or {})


async def _no_socket(request: Request) -> Response:
    """426 makes clients that try a WebSocket first go on by POST at once."""
    return _error(request, Refused(426, "no_route", "responses are not served over WebSockets; POST the request"), {})


async def _deny_socket(socket: WebSocket) -> None:
    await socket.send_denial_response(Response("responses are not served over WebSockets; POST the request", 426))


def _error(request: Request, refused: Refused, headers: Mapping[str, str]) -> Response:
    body = dialect_of(request.url.path, request.headers).refusal(refused)
    return Response(body, refused.status, dict(headers), "application/json")
