"""The HTTP side of a dialect: who calls, what they sent, and which answer they get to follow.

a new request            -> admitted, a turn starts
one that runs already    -> attaches to the running turn
one that was answered, but whose answer did not arrive -> the recorded bytes again
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from rollout.blobs import digest_of
from rollout.proxy.dialects.base import Dialect, Refused
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

    async def models(self, request: Request) -> Response:
        """GET of the models: the rollout's own."""
        rollout_id = request.path_params["rollout_id"]
        self._sessions.identify(key_of(request.headers), rollout_id)
        rollout = self._sessions.store.rollouts.get(rollout_id)
        name = rollout.model.name if rollout else ""
        body = {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "openforge"}]}
        return Response(json.dumps(body), media_type="application/json")

    async def _call(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout_id"]
        phase = self._sessions.identify(key_of(request.headers), rollout_id)
        if phase != AGENT:
            raise Refused(403, "wrong_phase", f"a key of the phase {phase} may not call the model")
        body = await read_body(request)
        asked = Asked(self._dialect, body, digest_of(body), self._dialect.parse(body))
        session = await self._sessions.session(rollout_id)
        if (running := session.running.get(asked.digest)) is not None:
            return _follow(running)
        if again := session.replayable(asked.digest, retried=_is_retry(request.headers)):
            return await self._replay(session, asked, again)
        try:
            admission = session.admit(asked.request)
        except Refused as refused:
            if refused.code.endswith("_cap"):
                await asyncio.to_thread(self._sessions.store.rollouts.note_end, rollout_id, refused.code)
            raise
        return _follow(Turn(self._sessions.store, session, asked, admission))

    async def _replay(self, session: Session, asked: Asked, call: Recorded) -> Response:
        store = self._sessions.store
        outlet = Outlet(stream=asked.request.stream)
        outlet.write(await asyncio.to_thread(store.blobs.get, call.response))
        outlet.end()

        async def sent() -> None:
            if not call.delivered:
                call.delivered = True
                await flag_delivered(store, session.rollout.id, call.index)

        return OutletResponse(outlet, b"", sent, lambda: None)


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
