"""A scripted model on a unix socket that speaks all three wires, and a gateway that echoes: for real harnesses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollout_servers import Listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout.config import Home

KEY = "key-1"
BASE = "/rollouts/r1"


@dataclass(frozen=True)
class Step:
    """One answer: a tool call when `tool` is set, else a text."""

    text: str = ""
    tool: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    namespace: str = ""
    prompt_tokens: int = 10
    """As reported: harnesses decide by it when to summarise."""


@dataclass(frozen=True)
class Asked:
    """A model call as it came; has what `CallFacts` asks for."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def dialect(self) -> str:
        return dialect_of(self.path)

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(tool_names(self.body))

    @property
    def system(self) -> str:
        first = self.body.get("system") or next(
            (m["content"] for m in rows(self.body) if m.get("role") in ("system", "developer")), ""
        )
        return text_of(first)

    @property
    def user(self) -> str:
        users = [m for m in rows(self.body) if m.get("role") == "user"]
        return text_of(users[-1]["content"], last=True) if users else ""


def dialect_of(path: str) -> str:
    ends = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages"}
    return next((name for end, name in ends.items() if end in path), "")


def rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body.get("messages") or body.get("input") or []


def text_of(content: Any, *, last: bool = False) -> str:
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if "text" in part]
    return (texts[-1] if last else texts[0]) if texts else ""


def tool_names(body: dict[str, Any]) -> Iterator[str]:
    for tool in body.get("tools", ()):
        if tool.get("type") == "namespace":
            yield from (f"{tool['name']}.{inner['name']}" for inner in tool["tools"])
        else:
            yield tool.get("name") or tool.get("function", {}).get("name") or tool["type"]


class Stub:
    """Answers with `steps` in turn, the last one again and again; a step may be (status, body)."""

    def __init__(self, home: Home, steps: list[Any]) -> None:
        self.steps = steps
        self.calls: list[Asked] = []
        self.tools: list[tuple[str, dict[str, Any]]] = []
        self.others: list[str] = []
        routes = [
            Route(BASE + "/v1/chat/completions", self._model, methods=["POST"]),
            Route(BASE + "/v1/responses", self._model, methods=["POST"]),
            Route(BASE + "/v1/messages", self._model, methods=["POST"]),
            Route(BASE + "/tools/{service}/{tool}", self._tool, methods=["POST"]),
            Route("/{rest:path}", self._other, methods=["GET", "HEAD", "POST"]),
        ]
        self.server = Listening(Starlette(routes=routes), home.run / "proxy" / "proxy.sock")

    async def _model(self, request: Request) -> Response:
        headers = dict(request.headers)
        if KEY not in (headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key")):
            return Response('{"error": {"code": "unknown_key"}}', 401)
        asked = Asked(request.url.path, headers, json.loads(await request.body()))
        step = self.steps[min(len(self.calls), len(self.steps) - 1)]
        self.calls.append(asked)
        if not isinstance(step, Step):
            return Response(json.dumps(step[1]), step[0], media_type="application/json")
        if asked.dialect == "chat" and not asked.body.get("stream"):
            return Response(json.dumps(_whole(step)), media_type="application/json")
        events = {"chat": _chat, "responses": _responses, "messages": _messages}[asked.dialect](step, len(self.calls))
        return Response("".join(events), media_type="text/event-stream")

    async def _tool(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return Response('{"error": {"code": "unknown_key"}}', 401)
        arguments = json.loads(await request.body())
        name = f"{request.path_params['service']}/{request.path_params['tool']}"
        self.tools.append((name, arguments))
        if arguments.get("id") == 404:
            error = {"code": "unknown_id", "message": "no ticket 404"}
            return Response(json.dumps({"status": 404, "error": error}))
        return Response(json.dumps({"status": 200, "result": {"ok": name, "got": arguments}}))

    async def _other(self, request: Request) -> Response:
        self.others.append(f"{request.method} {request.url.path}")
        return Response('{"error": {"code": "no_route"}}', 404)


def _data(body: dict[str, Any]) -> str:
    event = f"event: {body['type']}\n" if "type" in body else ""
    return f"{event}data: {json.dumps(body)}\n\n"


def _call(step: Step) -> dict[str, Any]:
    return {
        "id": "call_1",
        "type": "function",
        "function": {"name": step.tool, "arguments": json.dumps(step.arguments)},
    }


def _whole(step: Step) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": step.text or None}
    if step.tool:
        message["tool_calls"] = [_call(step)]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if step.tool else "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        "usage": usage,
    }


def _chat(step: Step, _: int) -> Iterator[str]:
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    delta: dict[str, Any] = {"role": "assistant", "content": step.text}
    if step.tool:
        delta = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **_call(step)}]}
    yield _data({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    done = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if step.tool else "stop"}
    yield _data({**base, "choices": [done], "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}})
    yield "data: [DONE]\n\n"


def _responses(step: Step, number: int) -> Iterator[str]:
    item: dict[str, Any] = {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "content": [{"type": "output_text", "text": step.text, "annotations": []}],
    }
    if step.tool:
        item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": step.tool}
        item |= {"arguments": json.dumps(step.arguments), "status": "completed"}
        item |= {"namespace": step.namespace} if step.namespace else {}
    usage: dict[str, Any] = {"input_tokens": step.prompt_tokens, "output_tokens": 5}
    usage["total_tokens"] = step.prompt_tokens + 5
    usage |= {"input_tokens_details": None, "output_tokens_details": None}
    yield _data({"type": "response.created", "response": {"id": f"resp_{number}"}})
    yield _data({"type": "response.output_item.done", "output_index": 0, "item": item})
    yield _data({"type": "response.completed", "response": {"id": f"resp_{number}", "output": [item], "usage": usage}})


def _messages(step: Step, number: int) -> Iterator[str]:
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "policy", "content": []}
    message |= {
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": step.prompt_tokens, "output_tokens": 1},
    }
    block: dict[str, Any] = {"type": "text", "text": ""}
    delta: dict[str, Any] = {"type": "text_delta", "text": step.text}
    if step.tool:
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": step.tool, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(step.arguments)}
    yield _data({"type": "message_start", "message": message})
    yield _data({"type": "content_block_start", "index": 0, "content_block": block})
    yield _data({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _data({"type": "content_block_stop", "index": 0})
    stop = {"stop_reason": "tool_use" if step.tool else "end_turn", "stop_sequence": None}
    yield _data({"type": "message_delta", "delta": stop, "usage": {"output_tokens": 5}})
    yield _data({"type": "message_stop"})
