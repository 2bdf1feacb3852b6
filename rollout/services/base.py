"""What a mock service is: a frozen state, and tools that are pure functions of it.

A read returns a body and cannot touch the state; a write returns the next state and a body. `Service.call` never
raises for what a caller sends: garbage becomes a `ToolResult` with a typed error body, so that a policy's worst
call is one more line of its history and the audit log replays to the same final state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.errors import ConfigError
from rollout.types import Record

Label = Literal["read", "write"]
TEXT_MAX = 2000
ID_MAX = 10**9
_JSON_TYPES: dict[Any, str] = {int: "integer", str: "string", bool: "boolean"}


class State(Record):
    """Base of a service's seeded state."""


class Args(BaseModel):
    """Base of a tool's arguments: nothing is coerced, nothing unknown is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NoArgs(Args):
    pass


class IdArgs(Args):
    id: int = Field(ge=0, le=ID_MAX)


class TextArgs(Args):
    text: str = Field(min_length=1, max_length=TEXT_MAX)


class ToolSpec(Record):
    """One tool as a policy sees it. `parameters` is a JSON schema; names are unique over all services."""

    service: str
    name: str
    description: str
    parameters: dict[str, Any]
    label: Label

    def function(self) -> dict[str, Any]:
        """The tool in OpenAI's function form."""
        body = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": body}


class ToolResult(Record):
    """Status as in HTTP; `body` is the result below 400, else `{"code", "message"}`. Always plain JSON."""

    status: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status < 400

    def envelope(self) -> dict[str, Any]:
        """What the gateway answers: `{"status": ..., "result": body}` or `{"status": ..., "error": body}`."""
        return {"status": self.status, "result" if self.ok else "error": self.body}


class ToolError(Exception):
    """Refuses a call with `status`; the state stays as it was."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.result = ToolResult(status=status, body={"code": code, "message": clean(message)[:200]})


@dataclass(frozen=True)
class Tool:
    """`apply` takes (state, arguments) and returns (next state, body)."""

    name: str
    description: str
    label: Label
    arguments: type[Args]
    apply: Callable[[Any, Any], tuple[Any, Any]]

    def parameters(self) -> dict[str, Any]:
        """A short JSON schema. With a single argument `required` is left out: every token of it is in each prompt."""
        fields = self.arguments.model_fields
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: {"type": _JSON_TYPES[field.annotation]} for name, field in fields.items()},
        }
        if len(fields) > 1:
            schema["required"] = list(fields)
        return schema


S = TypeVar("S", bound=State)
A = TypeVar("A", bound=Args)
I = TypeVar("I")  # noqa: E741 - a row type


def read(name: str, description: str, arguments: type[A], function: Callable[[S, A], Any]) -> Tool:
    def apply(state: S, args: A) -> tuple[S, Any]:
        return state, function(state, args)

    return Tool(name, description, "read", arguments, apply)


def write(name: str, description: str, arguments: type[A], function: Callable[[S, A], tuple[S, Any]]) -> Tool:
    return Tool(name, description, "write", arguments, function)


@dataclass(frozen=True)
class Service:
    name: str
    state: type[State]
    tools: tuple[Tool, ...]

    def specs(self) -> list[ToolSpec]:
        return [
            ToolSpec(
                service=self.name,
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters(),
                label=tool.label,
            )
            for tool in self.tools
        ]

    def tool(self, name: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.name == name), None)

    def seed(self, seed: Any) -> State:
        """The first state. Raises ConfigError that names the wrong field."""
        try:
            return self.state.model_validate(seed)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (self.name, *first["loc"])))
            raise ConfigError(f"seed state of service {where}: {first['msg']}; correct services.json") from error

    def call(self, state: State, tool: Tool, arguments: Any) -> tuple[State, ToolResult]:
        """Pure: the next state and what the caller sees. A refused call returns `state` itself."""
        try:
            args = _parse(tool, arguments)
            after, body = tool.apply(state, args)
        except ToolError as refusal:
            return state, refusal.result
        return after, ToolResult(status=200, body=body)


def _parse(tool: Tool, arguments: Any) -> Args:
    if not isinstance(arguments, Mapping):
        raise ToolError(400, "bad_arguments", f"{tool.name} takes a JSON object of arguments")
    try:
        return tool.arguments.model_validate(dict(arguments))
    except (ValidationError, RecursionError, TypeError) as error:
        raise ToolError(400, "bad_arguments", _reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}"
    return "arguments cannot be read"


def pick(rows: Iterable[I], row_id: int, noun: str) -> I:
    """The row with this `id`. Raises ToolError 404."""
    found = next((row for row in rows if getattr(row, "id", None) == row_id), None)
    if found is None:
        raise ToolError(404, "unknown_id", f"no {noun} {row_id}")
    return found


def swap(rows: Sequence[Any], row: Any) -> tuple[Any, ...]:
    """`rows` with the one of `row.id` replaced."""
    return tuple(row if old.id == row.id else old for old in rows)


def next_id(rows: Iterable[Any]) -> int:
    return max((row.id for row in rows), default=0) + 1


def in_force(links: Mapping[int, int | None], start: int) -> int:
    """Follows replacements from `start` to the entry that is in force now."""
    seen = {start}
    at = start
    while (after := links.get(at)) is not None and after not in seen:
        seen.add(after)
        at = after
    return at


def check_links(rows: Sequence[Any], field: str) -> None:
    """Raises ValueError for a doubled id, or a replacement that is unknown or leads in a circle."""
    links = {row.id: getattr(row, field) for row in rows}
    if len(links) != len(rows):
        raise ValueError("an id occurs twice")
    for row_id, target in links.items():
        if target is not None and target not in links:
            raise ValueError(f"{field} of {row_id} names {target}, which is not there")
        if links[in_force(links, row_id)] is not None:
            raise ValueError(f"{field} of {row_id} leads in a circle")


def clean(text: str) -> str:
    """`text` without lone surrogates, so that it can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def plain_json(value: Any, max_bytes: int = 65536) -> Any:
    """`value` as plain JSON for the audit log, whatever a caller sent; what is too large or deep is named, not kept."""
    try:
        text = clean(json.dumps(value, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError):
        return {"unreadable": type(value).__name__}
    if len(text) > max_bytes:
        return {"too_large": len(text)}
    return json.loads(text, parse_constant=str)
