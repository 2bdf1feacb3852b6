"""The HTTP side of a dialect: who calls, what they sent, and which answer they get to follow.

a new request            -> admitted, a turn starts
one that runs already    -> attaches to the running turn
one that was answered, but whose answer did not arrive -> the recorded bytes again
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout.blobs import digest_of
from rollout.proxy.dialects.base import CallRequest, Dialect, Refused
from rollout.proxy.history import Recorded
from rollout.proxy.outlet import Outlet, OutletResponse
from rollout.proxy.session import Session, Sessions
from rollout.proxy.turn import Asked, Turn, flag_delivered

BODY_MAX = 16 * 2**20
AGENT = "agent"


class Surface:
    """Serves one dialect to the agents of all rollouts."""

    def __init__(self, dialect: Dialect, sessions: Sessions) -> None:
        self._dialect = dialect
        self._sessions = sessions

    async def call(self, request: Request) -> Response:
        """POST of a model call."""
        try:
            return await self._call(request)
        except Refused as refused:
            return Response(self._dialect.refusal(refused), refused.status, media_type="application/json")

    async def count_tokens(self, request: Request) -> Response:
        """POST of a request that is only to be measured: rendered, answered, not recorded."""
        session, asked = await self._asked(request)
        _refuse_what_it_cannot(session, asked.request)
        ids = await asyncio.to_thread(session.codec.render, asked.request.messages, asked.request.tools)
        return JSONResponse({"input_tokens": len(ids)})

    async def _call(self, request: Request) -> Response:
        session, asked = await self._asked(request)
        if (running := session.running.get(asked.digest)) is not None:
            return _follow(running)
        if again := session.replayable(asked.digest, retried=_is_retry(request.headers)):
            return await self._replay(session, asked, again)
        _refuse_what_it_cannot(session, asked.request)
        try:
            admission = session.admit(asked.request)
        except Refused as refused:
            if refused.code.endswith("_cap"):
                await asyncio.to_thread(self._sessions.store.rollouts.note_end, session.rollout.id, refused.code)
            raise
        return _follow(Turn(self._sessions.store, session, asked, admission))

    async def _asked(self, request: Request) -> tuple[Session, Asked]:
        """Who asks, and what. Raises Refused."""
        rollout_id = request.path_params["rollout_id"]
        phase = self._sessions.identify(key_of(request.headers), rollout_id)
        if phase != AGENT:
            raise Refused(403, "wrong_phase", f"a key of the phase {phase} may not call the model")
        body = await read_body(request)
        asked = Asked(self._dialect, body, digest_of(body), self._dialect.parse(body))
        return await self._sessions.session(rollout_id), asked

    async def _replay(self, session: Session, asked: Asked, call: Recorded) -> Response:
        store = self._sessions.store
        outlet = Outlet(stream=asked.request.stream)
        outlet.write(await asyncio.to_thread(store.blobs.get, call.response))
        outlet.end()

        async def sent() -> None:
            if not call.delivered:
                call.delivered = True
                await flag_delivered(store, session.rollout.id, call.index)

        return OutletResponse(outlet, lambda: b"", sent, lambda: None)


async def list_models(sessions: Sessions, request: Request) -> Response:
    """GET of the models, or of one by name: there is the rollout's own. Raises Refused."""
    rollout_id = request.path_params["rollout_id"]
    sessions.identify(key_of(request.headers), rollout_id)
    rollout = sessions.store.rollouts.get(rollout_id)
    model = rollout.model.name if rollout else ""
    asked = request.path_params.get("name")
    if asked not in (None, model):
        raise Refused(404, "no_model", f"there is no model {asked}; this rollout has {model}")
    if "anthropic-version" in request.headers:
        row = {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
        page = {"data": [row], "has_more": False, "first_id": model, "last_id": model}
        return JSONResponse(row if asked else page)
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "openforge"}
    return JSONResponse(entry if asked else {"object": "list", "data": [entry]})


def _refuse_what_it_cannot(session: Session, request: CallRequest) -> None:
    """Raises Refused (400) that names what this model or its engine cannot do."""
    images = [image for message in request.messages for image in message.images]
    if images and not session.codec.vision:
        raise Refused(400, "unsupported_value", f"{images[0].at} is a picture, and this model reads text", images[0].at)
    if request.schema is None:
        return
    name = request.schema.field
    if not session.engine.structured_outputs:
        raise Refused(400, "unsupported_value", f"{name}: this engine cannot hold an answer to a schema", name)
    if request.tools:
        raise Refused(400, "unsupported_value", f"{name} cannot be honoured beside tools; send one of the two", name)


def _follow(turn: Turn) -> Response:
    return OutletResponse(turn.outlet, turn.ping, turn.delivered, turn.abandon)


def _is_retry(headers: Mapping[str, str]) -> bool:
    """The OpenAI and Anthropic clients count their retries in a header."""
    return headers.get("x-stainless-retry-count", "0") not in ("", "0")


def key_of(headers: Mapping[str, str]) -> str:
    """The key of a request, wherever its client puts keys; empty when there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("api-key", "") or headers.get("x-api-key", "")


async def read_body(request: Request) -> bytes:
    """Raises Refused: 413 beyond `BODY_MAX`, 415 for a compressed body."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "compressed", "a compressed request body is not read here; send it plain")
    told = request.headers.get("content-length", "0")
    parts, size = [], 0
    if not told.isdigit() or int(told) > BODY_MAX:
        raise _too_large()
    async for part in request.stream():
        size += len(part)
        if size > BODY_MAX:
            raise _too_large()
        parts.append(part)
    return b"".join(parts)


def _too_large() -> Refused:
    return Refused(413, "too_large", f"a request body may have {BODY_MAX} bytes; shorten the history")
