"""Anthropic Messages (docs.claude.com/en/api/messages): requests in, messages and events out.

Claude Code puts system turns between the others; they stay where they are. Thinking goes out with a signature, as the
client expects, and is taken back without looking at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.proxy.dialects.anthropic_blocks import (
    Block,
    History,
    content_blocks,
    loaded_tools,
    signature,
    text_block,
    thinking_block,
)
from rollout.proxy.dialects.base import Answer, CallRequest, Head, Piece, Refused, dump, dump_arguments, read_object
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
)
from rollout.proxy.dialects.tools import chosen, messages_tools, refuse_single
from rollout.proxy.messages import Message

_NEUTRAL: dict[str, tuple[Any, ...]] = {"stop_sequences": ([],), "mcp_servers": ([],), "container": ()}
"""Fields that change what an answer means, with the values that change nothing."""
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class MessagesDialect:
    name: Any = "messages"

    def parse(self, body: bytes) -> CallRequest:
        data, body_rules = clean_body(read_object(body))
        refuse_unless_neutral(data, _NEUTRAL)
        rows = a_list(data.get("messages"), "messages")
        box = messages_tools(data.get("tools"), loaded_tools(rows))
        choice = data.get("tool_choice")
        single = bool(isinstance(choice, dict) and choice.get("disable_parallel_tool_use"))
        refuse_single(box.functions, "tool_choice.disable_parallel_tool_use", single)
        history = _history(data, rows)
        messages, rules = clean_messages(history.messages)
        return CallRequest(
            messages=messages,
            tools=chosen(box.functions, choice),
            max_tokens=least(data, ("max_tokens",)),
            stream=flag(data, "stream"),
            schema=_schema(data),
            left_out=(*box.left_out, *history.left_out, *_edits(data)),
            rules=body_rules + rules,
            outside=read_outside(data),
        )

    def whole(self, head: Head, request: CallRequest, answer: Answer) -> bytes:
        message = _envelope(head, answer.prompt_tokens)
        message["content"] = content_blocks(answer)
        message["stop_reason"] = _STOPS[answer.finish_reason]
        message["usage"] = _usage(answer.prompt_tokens, answer.completion_tokens)
        return dump(message)

    def writer(self, head: Head, request: CallRequest) -> MessagesWriter:
        return MessagesWriter(head)

    def refusal(self, refused: Refused) -> bytes:
        return dump(_error(refused))


class MessagesWriter:
    """Events of one streamed answer. A block is closed when the next one begins."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._begun = False
        self._open = ""
        self._text: list[str] = []
        self._done = 0

    def begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return _event("message_start", message=_envelope(self._head, self._head.prompt_tokens))

    def piece(self, piece: Piece) -> bytes:
        kind = "text" if piece.kind == "content" else "thinking"
        out = self.begin()
        if self._open != kind:
            out += self._close() + self._start(kind)
        self._text.append(piece.text)
        return out + self._delta(f"{kind}_delta", kind, piece.text)

    def finish(self, answer: Answer) -> bytes:
        out = self.begin()
        blocks = content_blocks(answer)
        if not self._done and not self._open and blocks[0]["type"] == "text":
            out += self._start("text")
        out += self._close()
        for block in blocks[self._done :]:
            out += self._call(block)
        delta = {"stop_reason": _STOPS[answer.finish_reason], "stop_sequence": None}
        usage = _usage(answer.prompt_tokens, answer.completion_tokens)
        return out + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failure(self, refused: Refused) -> bytes:
        return _event("error", error=_error(refused)["error"])

    def ping(self) -> bytes:
        return _event("ping")

    def _start(self, kind: str) -> bytes:
        self._open, self._text = kind, []
        block = text_block("") if kind == "text" else {**thinking_block(""), "signature": ""}
        return _event("content_block_start", index=self._done, content_block=block)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        thought = "".join(self._text)
        out = self._delta("signature_delta", "signature", signature(thought)) if self._open == "thinking" else b""
        self._open = ""
        return out + self._stop()

    def _call(self, block: Block) -> bytes:
        start = _event("content_block_start", index=self._done, content_block={**block, "input": {}})
        return start + self._delta("input_json_delta", "partial_json", dump_arguments(block["input"])) + self._stop()

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._done, delta={"type": kind, name: text})

    def _stop(self) -> bytes:
        self._done += 1
        return _event("content_block_stop", index=self._done - 1)


# -- reading -------------------------------------------------------------------------------------------


def _history(data: Mapping[str, Any], rows: Any) -> History:
    if not rows:
        raise bad("messages", "messages must be a list with at least one message")
    history = History()
    system = read_content(data.get("system"), "system")
    if system.text:
        history.messages.append(Message("system", system.text, images=system.images))
    for i, row in enumerate(rows):
        history.add(row, f"messages[{i}]")
    if history.messages[-1].role == "assistant":
        last = f"messages[{len(rows) - 1}]"
        raise bad(last, f"{last} is the beginning of an answer, which cannot be gone on with here")
    return history


def _schema(data: Mapping[str, Any]) -> Any:
    config = an_object(data.get("output_config"), "output_config")
    name = "output_config.format" if config.get("format") is not None else "output_format"
    return read_schema(config.get("format") or data.get("output_format"), name)


def _edits(data: Mapping[str, Any]) -> list[str]:
    """Edits of the history that the vendor's server would make; here the chat template alone decides."""
    edits = a_list(an_object(data.get("context_management"), "context_management").get("edits"), "context_management")
    kinds = [edit.get("type") if isinstance(edit, dict) else None for edit in edits]
    return [f"context_management.edits[{i}]: {kind}" for i, kind in enumerate(kinds)]


# -- writing -------------------------------------------------------------------------------------------


def _envelope(head: Head, prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(prompt_tokens, 0),
    }


def _usage(sent: int, sampled: int) -> dict[str, int]:
    return {
        "input_tokens": sent,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": sampled,
    }


def _error(refused: Refused) -> dict[str, Any]:
    kind = _ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\n".encode() + b"data: " + dump({"type": name, **fields}) + b"\n\n"
