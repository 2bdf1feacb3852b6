"""The outside of a request, as its client wrote it: by what a harness's calls are told apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outside:
    tools: tuple[str, ...] = ()
    """Names, hosted and deferred tools too; those inside a namespace as `<namespace>.<name>`."""
    system: str = ""
    """Text of the first system or developer message, of its first part where it has several."""
    user: str = ""
    """Text of the last user message, of its last part where it has several."""


def read_outside(data: Mapping[str, Any]) -> Outside:
    """Takes any request that a dialect has read; what is odd counts as absent."""
    rows = data.get("messages") or data.get("input")
    messages = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    systems = [m.get("content") for m in messages if m.get("role") in ("system", "developer")]
    users = [m.get("content") for m in messages if m.get("role") == "user"]
    if isinstance(rows, str):
        users = [rows]
    first = data.get("system") or data.get("instructions") or (systems[0] if systems else "")
    return Outside(tuple(_names(data.get("tools"))), _text(first, 0), _text(users[-1], -1) if users else "")


def _names(tools: Any) -> Iterator[str]:
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        if tool.get("type") == "namespace":
            yield from (f"{tool.get('name')}.{name}" for name in _names(tool.get("tools")))
            continue
        inner = tool.get(str(tool.get("type")))
        name = tool.get("name") or (inner.get("name") if isinstance(inner, dict) else "") or tool.get("type")
        if isinstance(name, str):
            yield name


def _text(content: Any, which: int) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts[which] if texts else ""
