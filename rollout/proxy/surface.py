"""The HTTP side of a dialect: who calls, what they sent, and which answer they get to follow.

a new request            -> admitted, a turn starts
one that runs already    -> attaches to the running turn
one that was answered, but whose answer did not arrive -> the recorded bytes again
one beyond a cap         -> the end of the session, as its harness takes it: a 400, or an answer that ends the turn
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout.blobs import digest_of
from rollout.proxy.attribution import attribute
from rollout.proxy.dialects.base import Answer, CallRequest, Dialect, Head, Piece, Refused
from rollout.proxy.history import Recorded
from rollout.proxy.intake import read_body
from rollout.proxy.outlet import EVENTS, Outlet, OutletResponse
from rollout.proxy.session import CAPS, Session, Sessions
from rollout.proxy.turn import Asked, Turn, flag_delivered
from rollout.types import CallTag

AGENT = "agent"
INLINE = 32 * 2**10
"""Bytes. Larger bodies are parsed and rendered in a thread: the event loop streams all other answers meanwhile."""
ENDED = "The limit of this session is reached."
T = TypeVar("T")


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
        if going := await self._going(session, asked, request):
            return going
        _refuse_what_it_cannot(session, asked.request)
        try:
            session.check_caps()
            prompt = await _aside(asked.body, lambda: session.prompt(asked.request, asked.tagged))
            if going := await self._going(session, asked, request):  # a twin may have come while this one was rendered
                return going
            admission = session.admit(asked.request, prompt, asked.tagged)
        except Refused as refused:
            if refused.code not in CAPS or asked.tagged.tag is CallTag.UNATTRIBUTED:
                raise
            return await self._end(session, asked, refused)
        return _follow(Turn(self._sessions.store, session, asked, admission))

    async def _asked(self, request: Request) -> tuple[Session, Asked]:
        """Who asks, and what. Raises Refused."""
        rollout_id = request.path_params["rollout_id"]
        phase = self._sessions.identify(key_of(request.headers), rollout_id)
        if phase != AGENT:
            raise Refused(403, "wrong_phase", f"a key of the phase {phase} may not call the model")
        session = await self._sessions.session(rollout_id)
        body = await read_body(request, session.manner.body_max)
        digest, call = await _aside(body, lambda: (digest_of(body), self._dialect.parse(body)))
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = request.url.path.removeprefix(f"/rollouts/{rollout_id}")
        tagged = attribute(session.manner.tagger, self._dialect.name, path, headers, call)
        return session, Asked(self._dialect, body, digest, call, tagged)

    async def _going(self, session: Session, asked: Asked, request: Request) -> Response | None:
        """The answer that this request has already, or is being given."""
        if (running := session.running.get(asked.key)) is not None:
            return _follow(running)
        again = session.replayable(*asked.key, retried=_is_retry(request.headers))
        return await self._replay(session, asked, again) if again else None

    async def _end(self, session: Session, asked: Asked, refused: Refused) -> Response:
        """Notes why the session ended, and ends it. No model call is made and none is recorded."""
        await asyncio.to_thread(self._sessions.store.rollouts.note_end, session.rollout.id, refused.code)
        if session.manner.stop == "refuse":
            raise refused
        head = Head(f"{session.rollout.id}-end", session.rollout.model.name, int(time.time()))
        answer = Answer(ENDED, "", (), False, "stop", 0, 0)
        if not asked.request.stream:
            return Response(self._dialect.whole(head, asked.request, answer), media_type="application/json")
        writer = self._dialect.writer(head, asked.request)
        body = writer.piece(Piece("content", ENDED)) + writer.finish(answer)
        return Response(body, headers={"content-type": EVENTS.decode(), "cache-control": "no-cache"})

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


async def _aside(body: bytes, work: Callable[[], T]) -> T:
    """Work that grows with the body: in place, or in a thread for a large one."""
    return work() if len(body) <= INLINE else await asyncio.to_thread(work)


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
