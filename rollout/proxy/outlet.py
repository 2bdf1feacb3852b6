"""What a call says to its client, kept so that an identical request can attach to it and hear all of it.

A call runs on its own; HTTP responses only follow its outlet. When the last one that follows is gone before the end,
the call is abandoned. A stream that is silent for `PING_S` gets a keep-alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout.proxy.dialects.base import Refused

PING_S = 10.0
EVENTS = b"text/event-stream; charset=utf-8"
JSON = b"application/json"


class Outlet:
    """Pieces of a body in order, then an end. `stream` says whether they are events or one JSON body."""

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream
        self.pieces: list[bytes] = []
        self.ended = False
        self.status = 200
        self.error_body = b""
        """What a client gets that has been sent nothing yet when the call fails."""
        self.followers = 0
        self._change = asyncio.Event()

    def write(self, piece: bytes) -> None:
        if piece:
            self.pieces.append(piece)
            self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def fail(self, refused: Refused, body: bytes, event: bytes) -> None:
        """Ends with an error: as `body` with its status, or as `event` where a stream has begun."""
        self.status, self.error_body = refused.status, body
        if self.stream:
            self.pieces.append(event)
        self.end()

    async def wait(self, seen: int, seconds: float) -> bool:
        """True once there is more than `seen` pieces, or the end; False when `seconds` passed before."""
        while len(self.pieces) <= seen and not self.ended:
            try:
                async with asyncio.timeout(seconds):
                    await self._change.wait()
            except TimeoutError:
                return False
        return True

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


class OutletResponse(Response):
    """Follows an outlet to its end, or until the client goes away.

    `ping` gives a keep-alive; what it writes to the outlet is one as well. `sent` is awaited after the last byte of a
    complete answer was written; `left` is called when nobody follows any more although the outlet has not ended.
    """

    def __init__(
        self, outlet: Outlet, ping: Callable[[], bytes], sent: Callable[[], Awaitable[None]], left: Callable[[], None]
    ) -> None:
        self._outlet = outlet
        self._ping = ping
        self._sent = sent
        self._left = left
        self._begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet.followers += 1
        gone = asyncio.create_task(_disconnected(receive))
        follow = asyncio.create_task(self._follow(send))
        try:
            await asyncio.wait({gone, follow}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._outlet.followers -= 1
            if not self._outlet.followers and not self._outlet.ended:
                self._left()
            complete = follow.done() and not follow.cancelled() and follow.exception() is None
            for task in (gone, follow):
                task.cancel()
            _, outcome = await asyncio.gather(gone, follow, return_exceptions=True)
        if isinstance(outcome, Exception) and not isinstance(outcome, OSError):  # an OSError is the client's end
            raise outcome
        if complete and self._outlet.status == 200:
            await self._sent()

    async def _follow(self, send: Send) -> None:
        seen = 0
        while True:
            if not await self._outlet.wait(seen, PING_S):
                ping = self._ping() if self._outlet.stream else b""
                if ping and len(self._outlet.pieces) == seen:
                    await self._send(send, ping, last=False)
                continue
            if self._outlet.status != 200 and not self._begun:
                await self._whole(send, self._outlet.status, self._outlet.error_body)
                return
            body = b"".join(self._outlet.pieces[seen:])
            seen, last = len(self._outlet.pieces), self._outlet.ended
            if not self._outlet.stream:
                await self._whole(send, 200, body)
                return
            await self._send(send, body, last=last)
            if last:
                return

    async def _send(self, send: Send, body: bytes, *, last: bool) -> None:
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", EVENTS), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _whole(self, send: Send, status: int, body: bytes) -> None:
        headers = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _disconnected(receive: Receive) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
