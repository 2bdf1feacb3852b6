"""Real servers for the tests of the sandbox, the harness and the verifier: the runners' hub, and a scripted proxy."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rollout.config import Home
from rollout.sandbox.base import SandboxSpec
from rollout.sandbox.hub import RunnerHub, create_hub
from rollout.sandbox.limits import Cgroups
from rollout.sandbox.local import LocalSandbox


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        return nullcontext()


class Listening:
    """A starlette app on a unix socket, in this event loop."""

    def __init__(self, app: Starlette, path: Path) -> None:
        self.app, self.path = app, path

    async def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(self.path))
        sock.listen(64)
        config = uvicorn.Config(self.app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=60)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([sock]))
        for _ in range(500):
            if self._server.started:
                return
            await asyncio.sleep(0.01)
        raise TimeoutError(f"nothing listens on {self.path}")

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await asyncio.wait_for(self._task, 10)


class Hosted:
    """A hub, and sandboxes that talk to it."""

    def __init__(self, home: Home, cgroups: Cgroups | None) -> None:
        self.home, self.hub, self._cgroups = home, RunnerHub(), cgroups
        self.server = Listening(create_hub(self.hub), home.run / "runner" / "runner.sock")

    def make(self) -> LocalSandbox:
        return LocalSandbox(self.hub, self.home, self._cgroups)

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[LocalSandbox]:
        sandbox = self.make()
        try:
            await sandbox.start(spec)
            yield sandbox
        finally:
            await sandbox.stop()

    async def restart(self, pause: float) -> None:
        await self.server.stop()
        await asyncio.sleep(pause)
        await self.server.start()

    async def status(self, sandbox_id: str, authorization: str) -> int:
        transport = httpx.AsyncHTTPTransport(uds=str(self.server.path))
        async with httpx.AsyncClient(transport=transport, base_url="http://runner") as client:
            answer = await client.get(f"/runner/{sandbox_id}/next", headers={"authorization": authorization})
            return answer.status_code


@asynccontextmanager
async def hosted(home: Home, cgroups: Cgroups | None = None) -> AsyncIterator[Hosted]:
    host = Hosted(home, cgroups)
    await host.server.start()
    try:
        yield host
    finally:
        await host.server.stop()


class FakeProxy:
    """A proxy that answers from a script; what it was asked is kept in `calls` and `tools`."""

    def __init__(self, home: Home, answers: list[Any], tool: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> None:
        self.answers, self._tool = answers, tool
        self.calls: list[dict[str, Any]] = []
        self.tools: list[tuple[str, dict[str, Any]]] = []
        routes = [
            Route("/rollouts/{id}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/rollouts/{id}/tools/{service}/{tool}", self._call, methods=["POST"]),
        ]
        self.server = Listening(Starlette(routes=routes), home.run / "proxy" / "proxy.sock")

    async def _chat(self, request: Request) -> Response:
        if request.headers.get("authorization") != "Bearer key-1":
            return Response(b'{"error": {"code": "unauthorized"}}', 401)
        self.calls.append(json.loads(await request.body()))
        status, body = self.answers.pop(0)
        if status == 200 and self.calls[-1].get("stream"):
            return StreamingResponse(_chunks(body), media_type="text/event-stream")
        if status == 200:
            body = {"choices": [{"index": 0, "message": body, "finish_reason": "stop"}]}
        return Response(json.dumps(body) if not isinstance(body, bytes) else body, status)

    async def _call(self, request: Request) -> Response:
        arguments = json.loads(await request.body())
        name = request.path_params["tool"]
        self.tools.append((f"{request.path_params['service']}/{name}", arguments))
        status, body = self._tool(name, arguments)
        return Response(json.dumps({"status": status, "result" if status < 400 else "error": body}))


async def _chunks(message: dict[str, Any]) -> AsyncIterator[bytes]:
    yield b": keep-alive\n\n"
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": letter} for letter in message.get("content") or ""]
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        head = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": arguments[:3]}}
        deltas += [{"tool_calls": [head]}]
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": arguments[3:]}}]}]
    for delta in deltas:
        yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode()
    yield b"data: [DONE]\n\n"
