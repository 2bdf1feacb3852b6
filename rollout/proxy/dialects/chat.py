"""OpenAI Chat Completions (platform.openai.com/docs/api-reference/chat): requests in, answers and chunks out.

What would change the meaning of the answer and cannot be honoured is refused by name. Sampling fields are read over:
sampling belongs to the rollout. Other unknown fields stay in the recorded request bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.proxy.dialects.base import Answer, CallRequest, Head, Piece, Refused, dump, dump_arguments, read_object
from rollout.proxy.dialects.noise import clean_body, clean_messages
from rollout.proxy.dialects.outside import read_outside
from rollout.proxy.dialects.reading import (
    Content,
    a_list,
    an_object,
    bad,
    call_text,
    flag,
    free_text,
    joined,
    least,
    read_arguments,
    read_content,
    read_schema,
    refuse_unless_neutral,
    show,
)
from rollout.proxy.dialects.tools import chat_tools, chosen, form_of, refuse_single
from rollout.proxy.messages import Message, Role, ToolCall

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that change what an answer means, with the values that change nothing."""


class ChatDialect:
    name: Any = "chat"

    def parse(self, body: bytes) -> CallRequest:
        data, body_rules = clean_body(read_object(body))
        refuse_unless_neutral(data, _NEUTRAL)
        box = chat_tools(data.get("tools"))
        refuse_single(box.functions, "parallel_tool_calls", data.get("parallel_tool_calls") is False)
        messages, rules = clean_messages(_messages(data.get("messages")))
        return CallRequest(
            messages=messages,
            tools=chosen(box.functions, data.get("tool_choice")),
            forms=box.forms,
            max_tokens=least(data, ("max_completion_tokens", "max_tokens")),
            stream=flag(data, "stream"),
            include_usage=bool(an_object(data.get("stream_options"), "stream_options").get("include_usage")),
            schema=read_schema(data.get("response_format"), "response_format"),
            left_out=tuple(box.left_out),
            rules=body_rules + rules,
            outside=read_outside(data),
        )

    def whole(self, head: Head, request: CallRequest, answer: Answer) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
        if not answer.tool_calls:
            message["content"] = answer.content
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [_call(request, call) for call in answer.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        return dump({**_head(head, "chat.completion"), "choices": [choice], "usage": _usage(answer)})

    def writer(self, head: Head, request: CallRequest) -> ChatWriter:
        return ChatWriter(head, request)

    def refusal(self, refused: Refused) -> bytes:
        return dump(openai_error(refused))


class ChatWriter:
    """Chunks of one streamed answer. The role comes with the first delta, whatever that is."""

    def __init__(self, head: Head, request: CallRequest) -> None:
        self._base = _head(head, "chat.completion.chunk")
        self._request = request
        self._begun = False

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        return self._delta({"content" if piece.kind == "content" else "reasoning_content": piece.text})

    def finish(self, answer: Answer) -> bytes:
        calls = [{"index": i, **_call(self._request, call)} for i, call in enumerate(answer.tool_calls)]
        events = [self._delta({"tool_calls": [call]}) for call in calls]
        events.append(self._delta({}, answer.finish_reason))
        if self._request.include_usage:
            events.append(_event({**self._base, "choices": [], "usage": _usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def failure(self, refused: Refused) -> bytes:
        return _event(openai_error(refused)) + b"data: [DONE]\n\n"

    def ping(self) -> bytes:
        return b": keep-alive\n\n"

    def _delta(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", "content": "", **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**self._base, "choices": [choice]})


def openai_error(refused: Refused) -> dict[str, Any]:
    """The error object that the Chat and Responses surfaces share."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    body = {"message": str(refused), "type": kind, "code": refused.code, "param": refused.field or None}
    return {"error": body}


# -- reading -------------------------------------------------------------------------------------------


def _messages(rows: Any) -> list[Message]:
    if not isinstance(rows, list) or not rows:
        raise bad("messages", "messages must be a list with at least one message")
    return [_message(row, f"messages[{i}]") for i, row in enumerate(rows)]


def _message(row: Any, at: str) -> Message:
    if not isinstance(row, dict):
        raise bad(at, f"{at} must be an object")
    role = row.get("role")
    content = read_content(row.get("content"), f"{at}.content")
    if role == "assistant":
        return _assistant(row, content, at)
    if not isinstance(role, str) or role not in _ROLES:
        raise bad(f"{at}.role", f"{at}.role={show(role)} is none of assistant, {', '.join(_ROLES)}")
    call_id = row.get("tool_call_id")
    return Message(
        _ROLES[role],
        content.text,
        tool_call_id=call_id if isinstance(call_id, str) else "",
        images=content.images,
    )


def _assistant(row: Mapping[str, Any], content: Content, at: str) -> Message:
    """A call whose arguments are no JSON object becomes text: one bad call must not end the whole session."""
    text = content.text
    calls: list[ToolCall] = []
    for i, call in enumerate(a_list(row.get("tool_calls"), f"{at}.tool_calls")):
        inner, custom = _inner(call)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise bad(f"{at}.tool_calls[{i}]", f"{at}.tool_calls[{i}] must be a function call with a name")
        told = {"input": inner.get("input")} if custom else inner.get("arguments")
        arguments = read_arguments(told)
        if arguments is None:
            text = joined(text, call_text(inner["name"], told))
        else:
            calls.append(ToolCall(str(call.get("id", "")), inner["name"], arguments))
    reasoning = row.get("reasoning_content") or row.get("reasoning") or ""
    reasoning = reasoning if isinstance(reasoning, str) else ""
    return Message("assistant", text, reasoning, tuple(calls), images=content.images)


def _inner(call: Any) -> tuple[Any, bool]:
    """The call itself, and whether it is one of a custom tool."""
    if not isinstance(call, dict):
        return None, False
    return (call.get("custom"), True) if call.get("type") == "custom" else (call.get("function"), False)


# -- writing -------------------------------------------------------------------------------------------


def _head(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _call(request: CallRequest, call: ToolCall) -> dict[str, Any]:
    form = form_of(request.forms, call.name)
    if form.custom:
        custom = {"name": form.name, "input": free_text(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": form.name, "arguments": dump_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _usage(answer: Answer) -> dict[str, int]:
    sent, sampled = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": sent, "completion_tokens": sampled, "total_tokens": sent + sampled}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + dump(body) + b"\n\n"
