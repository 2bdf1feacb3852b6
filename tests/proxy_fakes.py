"""Real servers for the tests of the proxy and the engine clients: a scripted engine that speaks the SSE subset, any
starlette app on a port, and a small tokenizer of the Qwen3 family that is made in a moment.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollout.config import Home
from rollout.inference.router import EngineRouter
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.proxy.attribution import Adapters
from rollout.proxy.codecs import load_codec
from rollout.proxy.render import Codec
from rollout.services import ServiceHost
from rollout.store import Store, open_store
from rollout.types import EngineRecord, Limits, ModelRef, Purpose, Rollout, Sampling, TaskSpec

CONTROL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "the ticket was merged into another one, so close that and say done; äöü 😀 get_ticket close_ticket arguments"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_ticket",
            "description": "Look up a ticket",
            "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
        },
    }
]


def save_codec(folder: Path, renderer: str = "qwen3") -> Path:
    """A model folder without weights: byte-level BPE with ChatML and Qwen3's control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", unk_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    entry = {"name": folder.name, "digest": "d", "source": "test", "renderer": renderer}
    (folder / "openforge.json").write_text(json.dumps(entry))
    return folder


# -- servers -------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Ends the moment that it is told to."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        self.over = asyncio.Event()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def main_loop(self) -> None:
        await self.over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in [*self.servers, *(sockets or [])]:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=2)


@asynccontextmanager
async def serving(app: Any, port: int = 0) -> AsyncIterator[str]:
    """`app` on 127.0.0.1 in this event loop; yields its URL."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(256)
    server = _Server(app)
    task = asyncio.create_task(server.serve([sock]))
    try:
        await until(lambda: server.started, 10)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.force_exit = True
        server.over.set()
        await asyncio.wait_for(task, 10)


@dataclass(frozen=True)
class Reply:
    """What the engine does with one request. `fault` replaces or breaks the stream."""

    ids: tuple[int, ...] = ()
    finish: str = "stop"
    pause: float = 0.0
    """Seconds before each id."""
    versions: tuple[int, ...] = ()
    """Weight version of each id; 0 for all when empty."""
    step: int = 1
    """Ids per event."""
    fault: str = ""
    """`html`, `busy`, `unary`, `no_ids`, `no_logprobs`, `top_first`, `cut`, `line`, `error`, `usage`, `twice`."""


@dataclass
class FakeEngine:
    """Plays `script(body)`, or else the queued replies in order. What was asked and aborted is kept."""

    script: Callable[[dict[str, Any]], Reply] | None = None
    queue: list[Reply] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    aborted: int = 0
    updates: list[dict[str, Any]] = field(default_factory=list)
    key: str = "engine-key"

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda _: JSONResponse({"status": "ok"})),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/update_weights", self._update, methods=["POST"]),
            ]
        )

    async def _completions(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        reply = self.script(body) if self.script else self.queue.pop(0)
        if reply.fault == "html":
            return Response("<html>gateway</html>", media_type="text/html")
        if reply.fault == "busy":
            return Response("starting", 503)
        if reply.fault == "unary":
            return JSONResponse(_Stream(self, replace(reply, step=len(reply.ids)))._event(0))
        return _Stream(self, reply)

    async def _update(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no"}}, 401)
        self.updates.append(json.loads(await request.body()))
        return JSONResponse({"weight_version": self.updates[-1]["version"]})


class _Stream(Response):
    def __init__(self, engine: FakeEngine, reply: Reply) -> None:
        self._engine, self._reply = engine, reply
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_gone(receive))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        self._engine.aborted += not answer.done()
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        reply = self._reply
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for at in range(0, len(reply.ids), reply.step):
            await asyncio.sleep(reply.pause)
            await self._part(send, f"data: {json.dumps(self._event(at))}\n\n")
            if at and reply.fault in ("cut", "line", "error"):
                break
        last = {"line": "data: {broken\n\n", "error": 'data: {"error": {"message": "lost"}}\n\n', "cut": ""}
        if reply.fault == "twice":
            await self._part(send, f"data: {json.dumps(self._event(len(reply.ids) - 1))}\n\n")
        end = 'data: {"choices": [], "usage": {"completion_tokens": 99}}\n\n' if reply.fault == "usage" else ""
        await self._part(send, last.get(reply.fault, f"{end}data: [DONE]\n\n"), more=False)

    def _event(self, at: int) -> dict[str, Any]:
        reply = self._reply
        ids = list(reply.ids[at : at + reply.step])
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids}
        choice["logprobs"] = {"tokens": [], "token_logprobs": [-0.25 - i / 1000 for i in range(at, at + len(ids))]}
        if reply.fault == "no_ids":
            del choice["token_ids"]
        if reply.fault == "no_logprobs":
            choice["logprobs"] = None
        if reply.fault == "top_first":
            choice["logprobs"]["top_logprobs"] = [{"token_id:0": -0.01, f"token_id:{i}": -3.0 - i} for i in ids]
            choice["logprobs"]["token_logprobs"] = [-0.01] * len(ids)
        choice["finish_reason"] = reply.finish if at + reply.step >= len(reply.ids) else None
        version = reply.versions[at] if reply.versions else 0
        return {"choices": [choice], "weight_version": version}

    @staticmethod
    async def _part(send: Send, text: str, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- the proxy -----------------------------------------------------------------------------------------


def a_rollout(name: str, folder: Path, **changes: Any) -> Rollout:
    base = Rollout(
        id=name,
        run="test",
        task_id="t",
        group_id="g",
        model=ModelRef(name=str(folder)),
        purpose=Purpose.RUN,
        task=TaskSpec(id="t", instruction="x", bundle="/nowhere", digest="d", services=("helpdesk",)),
        sampling=Sampling(temperature=0.7, top_p=0.9, max_tokens=64, seed=5),
        limits=Limits(calls=16, tokens=4096, context=4096),
    )
    return base.model_copy(update=changes)


@dataclass
class Stage:
    """A proxy, its engine and its store, all real. `ask` speaks for the rollout `name`."""

    store: Store
    folder: Path
    codec: Codec
    engine: FakeEngine
    services: ServiceHost
    http: aiohttp.ClientSession
    url: str = ""
    app: Starlette | None = None
    keys: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, phase: str = "agent", **changes: Any) -> str:
        """Enqueues a rollout and issues its key."""
        self.store.rollouts.enqueue([a_rollout(name, self.folder, **changes)])
        self.keys[name] = self.store.rollouts.issue_key(name, phase)
        return self.keys[name]

    def say(self, text: str, *, end: str = "<|im_end|>", **changes: Any) -> Reply:
        """A reply whose ids read `text`."""
        return Reply(tuple(self.codec.encode(text + end)), **changes)

    def post(self, name: str, body: Any, *, key: str | None = None, headers: dict[str, str] | None = None) -> Any:
        """The request context manager of a chat call."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.keys.get(name, '') if key is None else key}", **(headers or {})}
        return self.http.post(f"{self.url}/rollouts/{name}/v1/chat/completions", data=data, headers=sent)

    async def ask(self, name: str, body: Any, **options: Any) -> tuple[int, Any]:
        """(status, JSON body) of a unary call."""
        async with self.post(name, body, **options) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, name: str, body: dict[str, Any], **options: Any) -> bytes:
        async with self.post(name, {**body, "stream": True}, **options) as response:
            assert response.status == 200
            return bytes(await response.read())


async def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for something that follows within moments. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not come true within {seconds} s")
        await asyncio.sleep(0.005)


@asynccontextmanager
async def staged(
    home: Home, folder: Path, engine: FakeEngine | None = None, adapters: Adapters | None = None
) -> AsyncIterator[Stage]:
    """Store, engine and proxy of one test, over real sockets."""
    engine = engine or FakeEngine()
    store = open_store(home)
    router, services = EngineRouter(store), ServiceHost()
    try:
        async with serving(engine.app()) as engine_url, aiohttp.ClientSession() as http:
            register(store, str(folder), engine_url)
            app = create_proxy(ProxyContext(store=store, services=services, engines=router, adapters=adapters))
            async with serving(app) as url:
                codec = load_codec(folder, "qwen3")
                yield Stage(store, folder, codec, engine, services, http, url, app)
    finally:
        await router.close()
        store.close()


def register(store: Store, model: str, url: str, **changes: Any) -> EngineRecord:
    record = EngineRecord(id="e1", model=model, path=model, url=url, pid=1, process_started=0.0)
    record = record.model_copy(update=changes)
    store.engines.put(record)
    return record


def events(raw: bytes) -> list[dict[str, Any]]:
    """Chunks of a chat stream; it must end with its end mark."""
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", raw[-200:]
    return [json.loads(line) for line in lines[:-1]]


def joined(raw: bytes) -> dict[str, Any]:
    """The message that a client assembles from a chat stream."""
    message: dict[str, Any] = {"role": "", "content": "", "tool_calls": []}
    for event in events(raw):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["role"] += delta.get("role", "")
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
            message["finish_reason"] = choice["finish_reason"]
    return message


def call_text(name: str, arguments: Any) -> str:
    """A tool call as the Qwen3 template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
