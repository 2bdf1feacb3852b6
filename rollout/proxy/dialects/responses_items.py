"""Items of the Responses dialect: an answer as output items, and a request's input items as messages.

An answer is at most one reasoning item, one message and then its calls. Reading puts such a run together again into
the one message that it was.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.proxy.dialects.base import Answer, CallRequest, Head, ToolForm, dump_arguments
from rollout.proxy.dialects.reading import (
    bad,
    call_text,
    free_text,
    joined,
    read_arguments,
    read_content,
    show,
    text_of,
)
from rollout.proxy.dialects.tools import flat_name, form_of
from rollout.proxy.messages import Message, Role, ToolCall

Item = dict[str, Any]
SEAL = "openforge.1."
"""What our `encrypted_content` begins with. It hides nothing: it carries the text through clients that drop it."""
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_FOREIGN = (
    "web_search_call",
    "file_search_call",
    "computer_call",
    "computer_call_output",
    "code_interpreter_call",
    "image_generation_call",
    "tool_search_call",
    "tool_search_output",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
)
"""Items that only a server with hosted tools makes."""


# -- writing -------------------------------------------------------------------------------------------


def output_items(head: Head, request: CallRequest, answer: Answer) -> list[Item]:
    """An empty answer is an empty message: a turn without any item looks broken to clients."""
    items = [reasoning_item(head, request, answer.reasoning)] if answer.reasoning else []
    if answer.content or not (items or answer.tool_calls):
        items.append(message_item(head, answer.content))
    return items + [call_item(head, form_of(request.forms, c.name), c, i) for i, c in enumerate(answer.tool_calls)]


def reasoning_item(head: Head, request: CallRequest, text: str) -> Item:
    item: Item = {"type": "reasoning", "id": f"rs_{head.id}", "summary": []}
    item["content"] = [{"type": "reasoning_text", "text": text}]
    if request.sealed_reasoning:
        item["encrypted_content"] = seal(text)
    return item


def message_item(head: Head, text: str) -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item: Item = {"type": "message", "id": f"msg_{head.id}", "role": "assistant", "status": "completed"}
    return {**item, "content": [part]}


def call_item(head: Head, form: ToolForm, call: ToolCall, index: int) -> Item:
    named: Item = {"call_id": call.id, "name": form.name}
    if form.namespace:
        named["namespace"] = form.namespace
    if form.custom:
        item: Item = {"type": "custom_tool_call", "id": f"ctc_{head.id}_{index}", "status": "completed"}
        return {**item, **named, "input": free_text(call.arguments)}
    item = {"type": "function_call", "id": f"fc_{head.id}_{index}", "status": "completed"}
    return {**item, **named, "arguments": dump_arguments(call.arguments)}


def seal(text: str) -> str:
    return SEAL + base64.b64encode(text.encode()).decode()


def unseal(value: Any) -> str:
    """Text that `seal` carries; empty for what another server sealed."""
    if not isinstance(value, str) or not value.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(value[len(SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


# -- reading -------------------------------------------------------------------------------------------


def read_input(value: Any) -> tuple[list[Message], list[str]]:
    """Messages of `input`, and notes about the items that were left out. Raises Refused."""
    if isinstance(value, str):
        return [Message("user", value)], []
    if not isinstance(value, list) or not value:
        raise bad("input", "input must be text or a list with at least one item")
    history = _History()
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise bad(f"input[{i}]", f"input[{i}] must be an object")
        history.add(item, f"input[{i}]")
    return history.messages, history.left_out


class _History:
    """Puts items together. `_stage` tells how far the assistant's message at the end has come."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left_out: list[str] = []
        self._stage = 0

    def add(self, item: Item, at: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, at)
        elif kind == "reasoning":
            self._extend(1, Message("assistant", reasoning=_reasoning(item, at)))
        elif kind in ("function_call", "custom_tool_call"):
            self._extend(3, _call(item, at))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = read_content(item.get("output"), f"{at}.output")
            call_id = text_of(item, "call_id", at)
            self._other(Message("tool", content.text, tool_call_id=call_id, images=content.images))
        elif kind in _FOREIGN:
            self.left_out.append(f"{at}: {kind}")
        else:
            raise bad(f"{at}.type", f"{at}.type={show(kind)} cannot be shown to this model; send the item itself")

    def _message(self, item: Item, at: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad(f"{at}.role", f"{at}.role={show(role)} is none of {', '.join(_ROLES)}")
        content = read_content(item.get("content"), f"{at}.content")
        message = Message(_ROLES[role], content.text, images=content.images)
        if role == "assistant":
            self._extend(2, message)
        else:
            self._other(message)

    def _extend(self, stage: int, more: Message) -> None:
        """Joins the answer at the end, or begins another where `stage` cannot follow: 1 reasoning, 2 text, 3 calls."""
        if self._stage and (stage > self._stage or stage == self._stage == 3):
            last = self.messages.pop()
            more = replace(
                last,
                content=joined(last.content, more.content),
                tool_calls=last.tool_calls + more.tool_calls,
                images=last.images + more.images,
            )
        self.messages.append(more)
        self._stage = stage

    def _other(self, message: Message) -> None:
        self.messages.append(message)
        self._stage = 0


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    """The text itself; else what we sealed; else, of another server's item, nothing."""
    return read_content(item.get("content"), f"{at}.content").text or unseal(item.get("encrypted_content"))


def _call(item: Mapping[str, Any], at: str) -> Message:
    """A call whose arguments are no JSON object becomes text: one bad call must not end the whole session."""
    name = flat_name(item.get("namespace"), text_of(item, "name", at))
    told = {"input": text_of(item, "input", at)} if item["type"] == "custom_tool_call" else item.get("arguments")
    arguments = read_arguments(told)
    if arguments is None:
        return Message("assistant", call_text(name, told))
    return Message("assistant", tool_calls=(ToolCall(text_of(item, "call_id", at), name, arguments),))
