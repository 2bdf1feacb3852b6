"""The server's half of the long-poll: typed operations out to runners, their results back.

    await hub.call(id, {...}) -> queued with a sequence number -> GET /runner/<id>/next?after=N
                              <- POST /runner/<id>/result?seq=N

An operation stays queued until its result has come, so a dropped connection loses nothing: the runner asks
again with the last number it saw. Keys belong to one sandbox; an unknown sandbox or a wrong key gets 404 or 401.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout.errors import SandboxError

HOLD_S = 20.0
"""How long an unanswered poll is held; below the runner's 60 s of patience."""


class _Channel:
    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self.seq = 0
        self.ops: dict[int, bytes] = {}
        self.results: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.news = asyncio.Event()


class RunnerHub:
    """Channels of this process's sandboxes. Lives in one event loop; nothing here blocks."""

    def __init__(self) -> None:
        self._channels: dict[str, _Channel] = {}

    def open(self, sandbox_id: str) -> str:
        """Returns the key for one runner. Raises SandboxError when the id is in use."""
        if sandbox_id in self._channels:
            raise SandboxError(f"sandbox {sandbox_id} runs already")
        channel = self._channels[sandbox_id] = _Channel()
        return channel.key

    def close(self, sandbox_id: str) -> None:
        """Forgets a sandbox; calls in flight raise SandboxError."""
        channel = self._channels.pop(sandbox_id, None)
        if channel:
            channel.news.set()
            self._fail(channel, f"sandbox {sandbox_id} was stopped")

    def lost(self, sandbox_id: str, why: str) -> None:
        """The runner is gone: calls in flight raise SandboxError."""
        if channel := self._channels.get(sandbox_id):
            self._fail(channel, why)

    async def call(self, sandbox_id: str, op: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one operation and waits for its result; the caller holds the deadline. Raises SandboxError."""
        channel = self._channels.get(sandbox_id)
        if channel is None:
            raise SandboxError(f"sandbox {sandbox_id} is not running")
        seq = self._queue(channel, op)
        future = channel.results[seq] = asyncio.get_running_loop().create_future()
        try:
            result: dict[str, Any] = await future
            return result
        finally:
            channel.ops.pop(seq, None)
            channel.results.pop(seq, None)

    def tell(self, sandbox_id: str, op: Mapping[str, Any]) -> None:
        """Sends an operation that has no result (`stop`)."""
        if channel := self._channels.get(sandbox_id):
            self._queue(channel, op)

    async def next(self, sandbox_id: str, after: int) -> bytes | None:
        """The first operation beyond `after`, or None when none came within HOLD_S."""
        channel = self._channels[sandbox_id]
        try:
            async with asyncio.timeout(HOLD_S):
                while self._channels.get(sandbox_id) is channel:
                    waiting = [seq for seq in channel.ops if seq > after]
                    if waiting:
                        return channel.ops[min(waiting)]
                    channel.news.clear()
                    await channel.news.wait()
        except TimeoutError:
            pass
        return None

    def deliver(self, sandbox_id: str, seq: int, result: dict[str, Any]) -> None:
        """A result; one that nobody waits for any more is dropped."""
        channel = self._channels.get(sandbox_id)
        future = channel.results.get(seq) if channel else None
        if future and not future.done():
            future.set_result(result)

    def refusal(self, sandbox_id: str, authorization: str) -> int:
        """0, or the status that a request gets."""
        channel = self._channels.get(sandbox_id)
        if channel is None:
            return 404
        return 0 if hmac.compare_digest(authorization.encode(), f"Bearer {channel.key}".encode()) else 401

    def _queue(self, channel: _Channel, op: Mapping[str, Any]) -> int:
        channel.seq += 1
        channel.ops[channel.seq] = json.dumps({"seq": channel.seq, **op}).encode()
        channel.news.set()
        return channel.seq

    def _fail(self, channel: _Channel, why: str) -> None:
        for future in channel.results.values():
            if not future.done():
                future.set_exception(SandboxError(why))


async def _next(request: Request) -> Response:
    hub, sandbox_id = request.app.state.hub, request.path_params["id"]
    if status := hub.refusal(sandbox_id, request.headers.get("authorization", "")):
        return Response(status_code=status)
    body = await hub.next(sandbox_id, int(request.query_params.get("after", "0")))
    return Response(body, media_type="application/json") if body else Response(status_code=204)


async def _result(request: Request) -> Response:
    hub, sandbox_id = request.app.state.hub, request.path_params["id"]
    body = await request.body()
    if status := hub.refusal(sandbox_id, request.headers.get("authorization", "")):
        return Response(status_code=status)
    hub.deliver(sandbox_id, int(request.query_params["seq"]), json.loads(body))
    return Response(status_code=204)


def create_hub(hub: RunnerHub) -> Starlette:
    """The app for `<home>/run/runner/runner.sock`, which no sandbox sees."""
    routes = [
        Route("/runner/{id}/next", _next, methods=["GET"]),
        Route("/runner/{id}/result", _result, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    app.state.hub = hub
    return app
