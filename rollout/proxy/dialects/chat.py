"""OpenAI Chat Completions (platform.openai.com/docs/api-reference/chat): requests in, answers and chunks out.

What would change the meaning of the answer and cannot be honoured is refused by name. Sampling fields are read over:
sampling belongs to the rollout. Other unknown fields stay in the recorded request bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.proxy.dialects.base import Answer, CallRequest, Head, Piece, Refused, read_object, read_value
from rollout.proxy.messages import Message, Role, ToolCall

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "parallel_tool_calls": (True,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that change what an answer means, with the values that change nothing."""


class ChatDialect:
    name: Any = "chat"

    def parse(self, body: bytes) -> CallRequest:
        data = read_object(body)
        for field, neutral in _NEUTRAL.items():
            if data.get(field) is not None and data[field] not in neutral:
                raise _bad(field, f"{field}={_show(data[field])} cannot be honoured here; leave it out")
        options = data.get("stream_options") or {}
        if not isinstance(options, dict):
            raise _bad("stream_options", "stream_options must be an object")
        return CallRequest(
            messages=_messages(data.get("messages")),
            tools=_tools(data.get("tools"), data.get("tool_choice")),
            max_tokens=_max_tokens(data),
            stream=_flag(data, "stream"),
            include_usage=bool(options.get("include_usage")),
        )

    def whole(self, head: Head, answer: Answer) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
        if not answer.tool_calls:
            message["content"] = answer.content
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [_call(call) for call in answer.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        return _dump({**_head(head, "chat.completion"), "choices": [choice], "usage": _usage(answer)})

    def writer(self, head: Head, request: CallRequest) -> ChatWriter:
        return ChatWriter(head, request.include_usage)

    def refusal(self, refused: Refused) -> bytes:
        return _dump(_error(refused))


class ChatWriter:
    """Chunks of one streamed answer. The role comes with the first delta, whatever that is."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._base = _head(head, "chat.completion.chunk")
        self._include_usage = include_usage
        self._begun = False

    def piece(self, piece: Piece) -> bytes:
        return self._delta({"content" if piece.kind == "content" else "reasoning_content": piece.text})

    def finish(self, answer: Answer) -> bytes:
        calls = [{"index": i, **_call(call)} for i, call in enumerate(answer.tool_calls)]
        events = [self._delta({"tool_calls": [call]}) for call in calls]
        events.append(self._delta({}, answer.finish_reason))
        if self._include_usage:
            events.append(_event({**self._base, "choices": [], "usage": _usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def failure(self, refused: Refused) -> bytes:
        return _event(_error(refused)) + b"data: [DONE]\n\n"

    def ping(self) -> bytes:
        return b": keep-alive\n\n"

    def _delta(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", "content": "", **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**self._base, "choices": [choice]})


# -- reading -------------------------------------------------------------------------------------------


def _messages(rows: Any) -> tuple[Message, ...]:
    if not isinstance(rows, list) or not rows:
        raise _bad("messages", "messages must be a list with at least one message")
    return tuple(_message(row, f"messages[{i}]") for i, row in enumerate(rows))


def _message(row: Any, at: str) -> Message:
    if not isinstance(row, dict):
        raise _bad(at, f"{at} must be an object")
    role = row.get("role")
    content = _content(row.get("content"), f"{at}.content")
    if role == "assistant":
        return _assistant(row, content, at)
    if role not in _ROLES:
        raise _bad(f"{at}.role", f"{at}.role={_show(role)} is none of assistant, {', '.join(_ROLES)}")
    call_id = row.get("tool_call_id")
    return Message(_ROLES[role], content, tool_call_id=call_id if isinstance(call_id, str) else "")


def _assistant(row: Mapping[str, Any], content: str, at: str) -> Message:
    """A call whose arguments are no JSON object becomes text: one bad call must not end the whole session."""
    calls: list[ToolCall] = []
    for i, call in enumerate(_list(row.get("tool_calls"), f"{at}.tool_calls")):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"{at}.tool_calls[{i}]", f"{at}.tool_calls[{i}] must be a function call with a name")
        arguments = read_arguments(function.get("arguments"))
        if arguments is None:
            text = call_text(function["name"], function.get("arguments"))
            content = f"{content}\n{text}" if content else text
        else:
            calls.append(ToolCall(str(call.get("id", "")), function["name"], arguments))
    reasoning = row.get("reasoning_content") or row.get("reasoning") or ""
    return Message("assistant", content, reasoning if isinstance(reasoning, str) else "", tuple(calls))


def read_arguments(value: Any) -> dict[str, Any] | None:
    """A call's arguments as an object; None when they are none."""
    if isinstance(value, str):
        try:
            value = read_value(value or "{}")
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def call_text(name: str, arguments: Any) -> str:
    """A call that cannot be rendered as one, as text without the control tokens of a call."""
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": "{name}", "arguments": {shown}}}'


def _content(value: Any, at: str) -> str:
    """Text parts are joined by newlines, as vLLM does for templates that take a string."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _bad(at, f"{at} must be text, a list of text parts or null")
    texts: list[str] = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise _bad(f"{at}[{i}]", f"{at}[{i}] of type {_show(kind)} cannot be shown to this model; send text parts")
        texts.append(text)
    return "\n".join(texts)


def _tools(rows: Any, choice: Any) -> tuple[dict[str, Any], ...]:
    if choice not in (None, "auto", "none"):
        raise _bad("tool_choice", f"tool_choice={_show(choice)} cannot be honoured here; use auto or none")
    tools = _list(rows, "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise _bad(f"tools[{i}]", f"tools[{i}] must be a function tool")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _bad(f"tools[{i}].function.name", f"tools[{i}].function has no name")
    return () if choice == "none" else tuple(tools)


def _max_tokens(data: Mapping[str, Any]) -> int | None:
    limits = []
    for field in ("max_completion_tokens", "max_tokens"):
        value = data.get(field)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _bad(field, f"{field}={_show(value)} must be a whole number of at least 1")
        limits.append(value)
    return min(limits, default=None)


def _flag(data: Mapping[str, Any], field: str) -> bool:
    value = data.get(field)
    if value is not None and not isinstance(value, bool):
        raise _bad(field, f"{field} must be true or false")
    return bool(value)


def _list(value: Any, at: str) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _bad(at, f"{at} must be a list")
    return value


def _bad(field: str, message: str) -> Refused:
    return Refused(400, "unsupported_value", message, field)


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)[:80]


# -- writing -------------------------------------------------------------------------------------------


def _head(head: Head, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def _usage(answer: Answer) -> dict[str, int]:
    sent, sampled = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": sent, "completion_tokens": sampled, "total_tokens": sent + sampled}


def _error(refused: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    body = {"message": str(refused), "type": kind, "code": refused.code, "param": refused.field or None}
    return {"error": body}


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + _dump(body) + b"\n\n"
