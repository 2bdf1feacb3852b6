"""Request bodies on their way in: bounded one by one, and all together.

A body of many megabytes costs several times its size while it is read, parsed and recorded. Those that declare more
than `LARGE` share `ROOM`: one that finds none waits for it, so that memory stays bounded however many come at once.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.proxy.dialects.base import Refused

LARGE = 2**20
"""Bytes. Smaller bodies never wait, and are read on the event loop itself."""
UNDECLARED_MAX = 16 * 2**20
"""Bytes of a body whose length is not declared."""
ROOM = 256 * 2**20
WAIT_S = 120.0
READ_S = 300.0
"""A client that has not sent its whole body by then is given up."""


class Intake:
    """ASGI middleware: holds room for a large body as long as its request is served; 503 after `WAIT_S` without."""

    def __init__(self, app: ASGIApp, room: int = ROOM) -> None:
        self._app = app
        self._room = self._free = room
        self._freed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = min(declared(scope), self._room)
        if size <= LARGE:
            await self._app(scope, receive, send)
            return
        if not await self._take(size):
            text = b'{"error": {"code": "busy", "message": "too many large requests at once; try again"}}'
            await Response(text, 503, {"retry-after": "5"}, "application/json")(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._free += size
            async with self._freed:
                self._freed.notify_all()

    async def _take(self, size: int) -> bool:
        try:
            async with asyncio.timeout(WAIT_S), self._freed:
                await self._freed.wait_for(lambda: self._free >= size)
                self._free -= size
        except TimeoutError:
            return False
        return True


def declared(scope: Scope) -> int:
    """Content-Length, or 0. What is no number is refused when the body is read."""
    for name, value in scope.get("headers", ()):
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def read_body(request: Request, most: int = UNDECLARED_MAX) -> bytes:
    """Raises Refused: 413 beyond `most` bytes, 415 compressed, 408 after `READ_S`, 499 for a client that left."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "compressed", "a compressed request body is not read here; send it plain")
    told = request.headers.get("content-length")
    if told is None:
        most = min(most, UNDECLARED_MAX)
    elif not told.isdigit() or int(told) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(READ_S):
            return await _read(request, most)
    except TimeoutError as error:
        raise Refused(408, "too_slow", f"the request body did not arrive within {READ_S:.0f} s") from error
    except ClientDisconnect as error:
        raise Refused(499, "client_gone", "the client left before its request had arrived") from error


async def _read(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> Refused:
    return Refused(413, "too_large", f"a request body may have {most} bytes; shorten the history")
