"""What harnesses write differently from call to call although it means the same: one pure function per habit.

A rule runs on every call, knows nothing of earlier ones, and takes its own result as it is. Names of the rules that
changed something stand in `CallRequest.rules`; the request as it came stays in the record, byte for byte.

    body rules      the JSON of a request, before it is read
    message rules   canonical messages
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.proxy.dialects.base import dump_arguments
from rollout.proxy.dialects.reading import read_arguments
from rollout.proxy.messages import Message

Body = dict[str, Any]
Messages = tuple[Message, ...]
_ROWS = ("messages", "input", "system", "tools")


@dataclass(frozen=True)
class BodyRule:
    name: str
    rests_on: str
    """What was seen of which harness."""
    apply: Callable[[Body], Body]


@dataclass(frozen=True)
class MessageRule:
    name: str
    rests_on: str
    apply: Callable[[Messages], Messages]


def clean_body(body: Body) -> tuple[Body, tuple[str, ...]]:
    """The body in its plain form, and the names of the rules that changed it."""
    fired = []
    for rule in BODY_RULES:
        cleaned = rule.apply(body)
        if cleaned != body:
            fired.append(rule.name)
        body = cleaned
    return body, tuple(fired)


def clean_messages(messages: Sequence[Message]) -> tuple[Messages, tuple[str, ...]]:
    now, fired = tuple(messages), []
    for rule in MESSAGE_RULES:
        cleaned = rule.apply(now)
        if cleaned != now:
            fired.append(rule.name)
        now = cleaned
    return now, tuple(fired)


# -- body rules ----------------------------------------------------------------------------------------


def drop_cache_control(body: Body) -> Body:
    """Removes the marks of prompt caching from messages, their parts, system blocks and tools, and nowhere else."""
    return _each_row(body, lambda row: _each_part(_unmarked(row), _unmarked))


def unwrap_single_text(body: Body) -> Body:
    """`[{"type": "text", "text": x}]` is `x`."""
    return _each_row(body, lambda row: _with(row, "content", _unwrapped(row.get("content"))))


def respace_arguments(body: Body) -> Body:
    """Arguments that are a JSON object get the spacing that the proxy itself sends; key order is kept."""
    return _each_row(body, _respaced)


def _each_row(body: Body, change: Callable[[Body], Body]) -> Body:
    out = dict(body)
    for name in _ROWS:
        if isinstance(rows := body.get(name), list):
            out[name] = [change(row) if isinstance(row, dict) else row for row in rows]
    return out


def _each_part(row: Body, change: Callable[[Body], Body]) -> Body:
    parts = row.get("content")
    if not isinstance(parts, list):
        return row
    changed = [_each_part(change(part), change) if isinstance(part, dict) else part for part in parts]
    return {**row, "content": changed}


def _unmarked(row: Body) -> Body:
    return {name: value for name, value in row.items() if name != "cache_control"}


def _with(row: Body, name: str, value: Any) -> Body:
    return {**row, name: value} if name in row else row


def _unwrapped(content: Any) -> Any:
    single = content[0] if isinstance(content, list) and len(content) == 1 else None
    if isinstance(single, dict) and single.get("type") in ("text", "input_text", "output_text"):
        return single["text"] if isinstance(single.get("text"), str) else content
    return content


def _respaced(row: Body) -> Body:
    calls = row.get("tool_calls")
    if isinstance(calls, list):
        return {**row, "tool_calls": [_respaced_call(call) for call in calls]}
    return _with(row, "arguments", _spaced(row.get("arguments")))


def _respaced_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": _with(function, "arguments", _spaced(function.get("arguments")))}


def _spaced(arguments: Any) -> Any:
    found = read_arguments(arguments) if isinstance(arguments, str) else None
    return arguments if found is None else dump_arguments(found)


# -- message rules -------------------------------------------------------------------------------------

_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
_CLOCK = re.compile(
    r"\A\[((?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?\d{4}-\d\d-\d\d) \d\d:\d\d(?::\d\d)?( [A-Z][A-Z0-9+-]*)?\] "
)
_RUNTIME = re.compile(r"^Runtime: agent=[^\n]*\| (?:session|sessionId)=[^\n]*", re.MULTILINE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_NO_UUID = "00000000-0000-0000-0000-000000000000"
_CONTEXT = re.compile(
    r"\A\s*<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\s*\Z", re.DOTALL
)


def drop_billing_line(messages: Messages) -> Messages:
    """Removes the line from the leading system message; one that says nothing else goes with it."""
    if not messages or messages[0].role != "system":
        return messages
    text = _BILLING.sub("", messages[0].content)
    if text == messages[0].content:
        return messages
    return (replace(messages[0], content=text), *messages[1:]) if text else messages[1:]


def drop_time_of_day(messages: Messages) -> Messages:
    """The stamp in front of a user's text keeps its date and time zone."""
    return _each_user_text(messages, lambda text: _CLOCK.sub(r"[\1\2] ", text))


def blank_session_ids(messages: Messages) -> Messages:
    """The UUIDs of a `Runtime:` line become zeros."""
    return _each_user_text(messages, lambda text: _RUNTIME.sub(lambda line: _UUID.sub(_NO_UUID, line[0]), text))


def pin_context(messages: Messages) -> Messages:
    """A context message at the very end stands behind the first user message, where a session's first call has it."""
    last = messages[-1] if messages else None
    first = next((i for i, m in enumerate(messages) if m.role == "user"), len(messages) - 1)
    if last is None or last.role != "user" or not _CONTEXT.match(last.content) or first >= len(messages) - 2:
        return messages
    return (*messages[: first + 1], last, *messages[first + 1 : -1])


def number_calls(messages: Messages) -> Messages:
    """Calls are numbered by place, `call_<which assistant message>_<which call>`; results follow their call's id.

    A result without a known id belongs to the first call that has none yet.
    """
    out: list[Message] = []
    names: dict[str, list[str]] = {}
    waiting: list[str] = []
    answered = 0
    for message in messages:
        if message.tool_calls:
            ids = [f"call_{answered}_{i}" for i in range(len(message.tool_calls))]
            calls = tuple(replace(c, id=new) for c, new in zip(message.tool_calls, ids, strict=True))
            names = {}
            for call, new in zip(message.tool_calls, ids, strict=True):
                names.setdefault(call.id, []).append(new)
            waiting, answered = ids, answered + 1
            out.append(replace(message, tool_calls=calls))
        elif message.role == "tool" and waiting:
            known = [name for name in names.get(message.tool_call_id, waiting) if name in waiting] or waiting
            waiting = [name for name in waiting if name != known[0]]
            out.append(replace(message, tool_call_id=known[0]))
        else:
            out.append(message)
    return tuple(out)


def _each_user_text(messages: Messages, change: Callable[[str], str]) -> Messages:
    return tuple(replace(m, content=change(m.content)) if m.role == "user" else m for m in messages)


BODY_RULES: tuple[BodyRule, ...] = (
    BodyRule(
        "cache-control",
        "claude-code 2.1, openclaw 2026.9 (messages): the mark moves to the newest message at each call",
        drop_cache_control,
    ),
    BodyRule(
        "single-text",
        "claude-code 2.1: a system turn's content is a list in the first call and a string later; qwen-code 0.24 and "
        "openhands 1.58 send lists, hermes 0.19 strings",
        unwrap_single_text,
    ),
    BodyRule(
        "arguments",
        "openclaw 2026.9 (chat, responses), qwen-code 0.24: arguments are serialised again without spaces",
        respace_arguments,
    ),
)
MESSAGE_RULES: tuple[MessageRule, ...] = (
    MessageRule(
        "billing-line",
        "claude-code 2.1: the first system block is x-anthropic-billing-header, with a cch= that differs per request",
        drop_billing_line,
    ),
    MessageRule(
        "clock",
        "openclaw 2026.9: `[Mon 2026-11-30 21:10 UTC] ` before the task; zeroclaw 0.8: `[2026-11-30 21:10:05 UTC] `",
        drop_time_of_day,
    ),
    MessageRule(
        "session-id",
        "openclaw 2026.9 (chat): a `Runtime: agent=... | session=... | sessionId=...` line behind the task",
        blank_session_ids,
    ),
    MessageRule(
        "floating-context",
        "openclaw 2026.9 (chat, messages): <<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> moves to the end at each call; on its "
        "responses wire it stays behind the task",
        pin_context,
    ),
    MessageRule(
        "call-ids",
        "openclaw 2026.9 (chat): ids lose their `_`; other clients number calls anew",
        number_calls,
    ),
)


def rule_names() -> Mapping[str, str]:
    """Every rule's name and the facts that it rests on, in the order in which they run."""
    return {r.name: r.rests_on for r in BODY_RULES} | {r.name: r.rests_on for r in MESSAGE_RULES}
