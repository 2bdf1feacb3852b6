"""Clients of the proxy that keep a conversation as real harnesses do: answers go back as they came, results follow."""

from __future__ import annotations

import json
from typing import Any

from proxy_fakes import Stage

PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
PARAMETERS = {"type": "object", "properties": {"id": {"type": "integer"}}}


def tools(dialect: str) -> list[dict[str, Any]]:
    named = {"name": "get_ticket", "description": "Look up a ticket"}
    if dialect == "chat":
        return [{"type": "function", "function": {**named, "parameters": PARAMETERS}}]
    if dialect == "responses":
        return [{"type": "function", **named, "parameters": PARAMETERS}]
    return [{**named, "input_schema": PARAMETERS}]


class Talk:
    """One conversation of the rollout `name`. `sent` and `got` are the bodies on the wire, in order."""

    def __init__(self, stage: Stage, name: str, dialect: str, headers: dict[str, str] | None = None) -> None:
        self.stage, self.name, self.dialect = stage, name, dialect
        self.headers = headers or {}
        self.system = "Be brief."
        self.tools = tools(dialect)
        self.rows: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []
        self.got: list[dict[str, Any]] = []

    def user(self, text: str) -> Talk:
        self.rows.append({"role": "user", "content": text})
        return self

    def body(self, **fields: Any) -> dict[str, Any]:
        """The next request."""
        rows = json.loads(json.dumps(self.rows))
        body: dict[str, Any] = {"model": "policy", "tools": self.tools, **fields}
        if self.dialect == "chat":
            return {**body, "messages": [{"role": "system", "content": self.system}, *rows]}
        if self.dialect == "responses":
            return {**body, "instructions": self.system, "input": rows}
        return {**body, "system": self.system, "max_tokens": 4096, "messages": rows}

    async def post(self, body: dict[str, Any], *, query: str = "") -> tuple[int, bytes]:
        url = f"{self.stage.url}/rollouts/{self.name}/v1/{PATHS[self.dialect]}{query}"
        headers = {"Authorization": f"Bearer {self.stage.keys[self.name]}", **self.headers}
        async with self.stage.http.post(url, data=json.dumps(body).encode(), headers=headers) as response:
            return response.status, await response.read()

    async def turn(self, **fields: Any) -> dict[str, Any]:
        """One call; its answer is kept, and each call in it gets a result."""
        body = self.body(**fields)
        status, raw = await self.post(body)
        assert status == 200, raw
        answer: dict[str, Any] = json.loads(raw)
        self.sent.append(body)
        self.got.append(answer)
        {"chat": self._chat, "responses": self._responses, "messages": self._messages}[self.dialect](answer)
        return answer

    def _result(self) -> str:
        return json.dumps({"id": len(self.got), "status": "open"})

    def _chat(self, answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        self.rows.append(message)
        for call in message.get("tool_calls") or ():
            self.rows.append({"role": "tool", "tool_call_id": call["id"], "content": self._result()})

    def _responses(self, answer: dict[str, Any]) -> None:
        self.rows += answer["output"]
        for item in answer["output"]:
            if item["type"] == "function_call":
                self.rows.append({"type": "function_call_output", "call_id": item["call_id"], "output": self._result()})

    def _messages(self, answer: dict[str, Any]) -> None:
        self.rows.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": self._result()}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        if results:
            self.rows.append({"role": "user", "content": results})
