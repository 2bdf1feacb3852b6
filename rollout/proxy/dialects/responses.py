"""OpenAI Responses (platform.openai.com/docs/api-reference/responses): requests in, response objects and events out.

Nothing is kept between requests under a response's id: the history comes whole each time, as Codex and OpenClaw send
it. Reasoning goes out as `reasoning_text`, which both send back word for word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.proxy.dialects.base import Answer, CallRequest, Head, Piece, Refused, dump, read_object
from rollout.proxy.dialects.chat import openai_error
from rollout.proxy.dialects.noise import clean_body, clean_messages
from rollout.proxy.dialects.outside import read_outside
from rollout.proxy.dialects.reading import (
    a_list,
    an_object,
    bad,
    flag,
    least,
    read_content,
    read_schema,
    refuse_unless_neutral,
    show,
)
from rollout.proxy.dialects.responses_items import (
    Item,
    message_item,
    output_items,
    read_input,
    reasoning_item,
)
from rollout.proxy.dialects.tools import chosen, refuse_single, responses_tools
from rollout.proxy.messages import Message

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "modalities": (["text"],),
}
"""Fields that change what an answer means, with the values that change nothing. `auto` allows a truncation, no more."""
_SEALED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class ResponsesDialect:
    name: Any = "responses"

    def parse(self, body: bytes) -> CallRequest:
        data, body_rules = clean_body(read_object(body))
        refuse_unless_neutral(data, _NEUTRAL)
        include = a_list(data.get("include"), "include")
        if _LOGPROBS in include:
            raise bad("include", f"include={show(include)} asks for log-probabilities, which are not given out")
        box = responses_tools(data.get("tools"))
        refuse_single(box.functions, "parallel_tool_calls", data.get("parallel_tool_calls") is False)
        history, left_out = read_input(data.get("input"))
        messages, rules = clean_messages([*_instructions(data), *history])
        return CallRequest(
            messages=messages,
            tools=chosen(box.functions, data.get("tool_choice")),
            forms=box.forms,
            max_tokens=least(data, ("max_output_tokens",)),
            stream=flag(data, "stream"),
            sealed_reasoning=_SEALED in include,
            schema=read_schema(an_object(data.get("text"), "text").get("format"), "text.format"),
            left_out=(*box.left_out, *left_out),
            rules=body_rules + rules,
            outside=read_outside(data),
        )

    def whole(self, head: Head, request: CallRequest, answer: Answer) -> bytes:
        return dump(_response(head, request, answer))

    def writer(self, head: Head, request: CallRequest) -> ResponsesWriter:
        return ResponsesWriter(head, request)

    def refusal(self, refused: Refused) -> bytes:
        return dump(openai_error(refused))


class ResponsesWriter:
    """Events of one streamed answer, numbered from 0. An item is closed when the next one begins."""

    def __init__(self, head: Head, request: CallRequest) -> None:
        self._head = head
        self._request = request
        self._number = 0
        self._open: Item | None = None
        self._text: list[str] = []
        self._done: list[Item] = []

    def begin(self) -> bytes:
        if self._number:
            return b""
        response = _envelope(self._head, self._request, "in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def piece(self, piece: Piece) -> bytes:
        kind = "message" if piece.kind == "content" else "reasoning"
        begun = self.begin()
        if self._open is None or self._open["type"] != kind:
            begun += self._close() + self._start(kind)
        self._text.append(piece.text)
        return begun + self._part_event("delta", delta=piece.text)

    def finish(self, answer: Answer) -> bytes:
        out = self.begin()
        items = output_items(self._head, self._request, answer)
        if not self._done and self._open is None and items[0]["type"] == "message":
            out += self._start("message")
        out += self._close()
        for item in items[len(self._done) :]:
            out += self._call(item)
        response = _response(self._head, self._request, answer)
        return out + self._event(f"response.{response['status']}", response=response)

    def failure(self, refused: Refused) -> bytes:
        """Of a stream that has begun: the item that is open stays open."""
        code = "server_error" if refused.status >= 500 else refused.code
        failed = {**_envelope(self._head, self._request, "failed"), "error": {"code": code, "message": str(refused)}}
        return self.begin() + self._event("response.failed", response={**failed, "output": self._done})

    def ping(self) -> bytes:
        """An event: a comment would not reset the idle clock of Codex. It is not one of the numbered ones."""
        return b'event: keepalive\ndata: {"type":"keepalive"}\n\n'

    def _start(self, kind: str) -> bytes:
        self._open, self._text = self._item(kind, ""), []
        added = {**self._open, "content": []}
        added.pop("encrypted_content", None)
        if kind == "message":
            added["status"] = "in_progress"
        return self._event("response.output_item.added", output_index=len(self._done), item=added) + self._place(
            "response.content_part.added", part=self._open["content"][0]
        )

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._text)
        item = self._item(self._open["type"], text)
        out = self._part_event("done", text=text)
        out += self._place("response.content_part.done", part=item["content"][0])
        self._open = None
        return out + self._finish_item(item)

    def _call(self, item: Item) -> bytes:
        custom = item["type"] == "custom_tool_call"
        field = "input" if custom else "arguments"
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        at = {"item_id": item["id"], "output_index": len(self._done)}
        added = {**item, field: "", "status": "in_progress"}
        return (
            self._event("response.output_item.added", output_index=len(self._done), item=added)
            + self._event(f"{name}.delta", **at, delta=item[field])
            + self._event(f"{name}.done", **at, **({} if custom else {"name": item["name"]}), **{field: item[field]})
            + self._finish_item(item)
        )

    def _finish_item(self, item: Item) -> bytes:
        out = self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        return out

    def _item(self, kind: str, text: str) -> Item:
        return message_item(self._head, text) if kind == "message" else reasoning_item(self._head, self._request, text)

    def _part_event(self, step: str, **fields: Any) -> bytes:
        message = self._open is not None and self._open["type"] == "message"
        name = "response.output_text" if message else "response.reasoning_text"
        return self._place(f"{name}.{step}", **fields, **({"logprobs": []} if message else {}))

    def _place(self, kind: str, /, **fields: Any) -> bytes:
        """An event about the one part of the item that is open."""
        at = self._open["id"] if self._open else ""
        return self._event(kind, item_id=at, output_index=len(self._done), content_index=0, **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\n".encode() + b"data: " + dump(body) + b"\n\n"


def _instructions(data: Mapping[str, Any]) -> list[Message]:
    text = read_content(data.get("instructions"), "instructions").text
    return [Message("system", text)] if text else []


def _response(head: Head, request: CallRequest, answer: Answer) -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    sent, sampled = answer.prompt_tokens, answer.completion_tokens
    usage = {
        "input_tokens": sent,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sent + sampled,
    }
    return {
        **_envelope(head, request, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(head, request, answer),
        "usage": usage,
    }


def _envelope(head: Head, request: CallRequest, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "model": head.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
    }
