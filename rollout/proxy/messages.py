"""Canonical messages: what every dialect is read into, what the renderer gets and what a call's record shows.

Parsing wire formats (`dialects/`) and rendering ids (`render.py`) meet only here, so that a history means the same
whatever surface it came through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is a JSON object; a call whose arguments are none is kept as text, never as this."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Image:
    """A picture in a message. `content` shows `placeholder` where it stands; a record keeps its digest alone."""

    media_type: str
    sha256: str
    url: str = field(default="", compare=False, repr=False)
    """`data:` URL with the bytes; empty when read back from a record."""
    at: str = field(default="", compare=False)
    """Where the request holds it, for a refusal."""

    @property
    def placeholder(self) -> str:
        return f"<image {self.sha256[:16]}>"


@dataclass(frozen=True)
class Message:
    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    images: tuple[Image, ...] = ()

    def dump(self) -> dict[str, Any]:
        """As chat templates expect it: arguments are an object, empty parts are left out."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        if self.images:
            out["images"] = [{"media_type": i.media_type, "sha256": i.sha256} for i in self.images]
        return out


def load_message(row: Mapping[str, Any]) -> Message:
    """Inverse of `Message.dump`, the bytes of images aside."""
    return Message(
        role=row["role"],
        content=row["content"],
        reasoning=row.get("reasoning_content", ""),
        tool_calls=tuple(
            ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in row.get("tool_calls", ())
        ),
        tool_call_id=row.get("tool_call_id", ""),
        images=tuple(Image(i["media_type"], i["sha256"]) for i in row.get("images", ())),
    )


def without_ids(message: Message) -> Message:
    """The message as a template shows it: the ids of tool calls never reach the model."""
    calls = tuple(replace(call, id="") for call in message.tool_calls)
    return replace(message, tool_calls=calls, tool_call_id="")


def continues(history: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """True when `history` begins with `earlier`, ids of tool calls aside."""
    return len(history) >= len(earlier) and all(
        a is b or without_ids(a) == without_ids(b) for a, b in zip(history, earlier, strict=False)
    )
