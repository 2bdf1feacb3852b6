"""Content blocks of the Messages dialect: an answer as blocks, and a request's turns as messages.

A user turn may hold tool results and text side by side: each result is a message of its own, in the client's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.proxy.dialects.base import Answer
from rollout.proxy.dialects.reading import (
    Content,
    bad,
    call_text,
    joined,
    read_arguments,
    read_content,
    read_part,
    show,
    text_of,
)
from rollout.proxy.messages import Message, ToolCall

Block = dict[str, Any]
_FOREIGN = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "connector_text", "fallback")
"""Blocks that only the vendor's own server can read. Besides: results of server tools, `..._tool_result`."""


# -- writing -------------------------------------------------------------------------------------------


def content_blocks(answer: Answer) -> list[Block]:
    """An empty answer is an empty text: a turn without any block looks broken to clients."""
    blocks = [thinking_block(answer.reasoning)] if answer.reasoning else []
    if answer.content or not (blocks or answer.tool_calls):
        blocks.append(text_block(answer.content))
    for call in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return blocks


def text_block(text: str) -> Block:
    return {"type": "text", "text": text}


def thinking_block(text: str) -> Block:
    return {"type": "thinking", "thinking": text, "signature": signature(text)}


def signature(text: str) -> str:
    """Opaque to clients, which send it back with the thinking; an empty one would make some drop the block."""
    return f"openforge.1.{hashlib.sha256(text.encode()).hexdigest()[:32]}"


# -- reading -------------------------------------------------------------------------------------------


@dataclass
class History:
    messages: list[Message] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, row: Any, at: str) -> None:
        """Reads one turn. Raises Refused."""
        role = row.get("role") if isinstance(row, dict) else None
        if role not in ("user", "assistant", "system"):
            raise bad(f"{at}.role", f"{at}.role={show(role)} is none of user, assistant, system")
        parts = row.get("content")
        blocks = parts if isinstance(parts, list) else [text_block(read_content(parts, f"{at}.content").text)]
        if role == "assistant":
            self.messages.append(self._assistant(blocks, f"{at}.content"))
        else:
            self._other(role, blocks, f"{at}.content")

    def _other(self, role: Any, blocks: Sequence[Any], at: str) -> None:
        run: list[Content] = []
        for i, block in enumerate(blocks):
            here, kind = f"{at}[{i}]", block.get("type") if isinstance(block, dict) else None
            if kind == "tool_result":
                self._flush(role, run)
                run = []
                self.messages.append(_result(block, here))
            elif self._is_foreign(kind):
                self.left_out.append(f"{here}: {kind}")
            else:
                run.append(read_part(block, here))
        self._flush(role, run)

    def _flush(self, role: Any, run: Sequence[Content]) -> None:
        if run:
            images = tuple(image for content in run for image in content.images)
            self.messages.append(Message(role, "\n".join(content.text for content in run), images=images))

    def _assistant(self, blocks: Sequence[Any], at: str) -> Message:
        texts, thoughts, calls = [], [], []
        images: list[Any] = []
        for i, block in enumerate(blocks):
            here, kind = f"{at}[{i}]", block.get("type") if isinstance(block, dict) else None
            if kind == "thinking":
                thoughts.append(text_of(block, "thinking", here))
            elif kind == "tool_use":
                call = _call(block, here)
                calls += [call] if isinstance(call, ToolCall) else []
                texts += [call] if isinstance(call, str) else []
            elif self._is_foreign(kind):
                self.left_out.append(f"{here}: {kind}")
            else:
                content = read_part(block, here)
                texts.append(content.text)
                images += content.images
        return Message("assistant", "\n".join(texts), joined(*thoughts), tuple(calls), images=tuple(images))

    @staticmethod
    def _is_foreign(kind: Any) -> bool:
        return isinstance(kind, str) and (kind in _FOREIGN or kind.endswith("_tool_result"))


def _call(block: Mapping[str, Any], at: str) -> ToolCall | str:
    """A call whose input is no object becomes text: one bad call must not end the whole session."""
    name = text_of(block, "name", at)
    arguments = read_arguments(block.get("input"))
    return call_text(name, block.get("input")) if arguments is None else ToolCall(str(block.get("id")), name, arguments)


def _result(block: Mapping[str, Any], at: str) -> Message:
    content = read_content(block.get("content"), f"{at}.content")
    text = content.text or ("error" if block.get("is_error") else "")
    return Message("tool", text, tool_call_id=text_of(block, "tool_use_id", at), images=content.images)


def loaded_tools(rows: Sequence[Any]) -> frozenset[str]:
    """Names of the deferred tools that a result in the history refers to."""
    found = set()
    for row in rows:
        for block in _blocks(row):
            for part in _blocks(block):
                if part.get("type") == "tool_reference" and isinstance(part.get("tool_name"), str):
                    found.add(part["tool_name"])
    return frozenset(found)


def _blocks(row: Any) -> list[Block]:
    parts = row.get("content") if isinstance(row, dict) else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
