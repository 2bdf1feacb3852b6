"""The proxy's routes. Only wiring: every concept has its own file.

POST /rollouts/<id>/v1/chat/completions   dialects/chat through surface -> turn
GET  /rollouts/<id>/v1/models
POST /rollouts/<id>/tools/<service>/<tool>   gateway
anything else: a fast JSON 404 or 405, never the model
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout.proxy.dialects.base import Refused
from rollout.proxy.dialects.chat import ChatDialect
from rollout.proxy.gateway import Gateway, ToolHost
from rollout.proxy.session import EngineSource, Sessions
from rollout.proxy.surface import Surface
from rollout.store import Store


@dataclass(frozen=True)
class ProxyContext:
    """What the proxy is made of. `store` and `engines` are closed by whoever opened them."""

    store: Store
    services: ToolHost
    engines: EngineSource


def create_proxy(ctx: ProxyContext) -> Starlette:
    """The app; `app.state.sessions.forget(rollout_id)` ends a rollout's session at once."""
    sessions = Sessions(ctx.store, ctx.engines)
    chat = Surface(ChatDialect(), sessions)
    gateway = Gateway(ctx.services, sessions)
    base = "/rollouts/{rollout_id}"
    app = Starlette(
        routes=[
            Route(f"{base}/v1/chat/completions", chat.call, methods=["POST"]),
            Route(f"{base}/v1/models", chat.models, methods=["GET"]),
            Route(f"{base}/tools/{{service}}/{{tool}}", gateway.call, methods=["POST"]),
        ],
        exception_handlers={Refused: _refused, HTTPException: _no_route},
    )
    app.state.sessions = sessions
    return app


async def _refused(_: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return Response(ChatDialect().refusal(refused), refused.status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = Refused(error.status_code, "no_route", f"{request.method} {request.url.path}: {error.detail}")
    return Response(ChatDialect().refusal(refused), refused.status, error.headers, "application/json")
