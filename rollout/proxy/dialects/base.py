"""What a wire format must do: read a request into canonical form, and write an answer whole, in events, or refuse.

    bytes -> Dialect.parse -> CallRequest -> (render, engine, capture) -> Answer -> Dialect.whole | EventWriter

One class per surface; everything below works on `CallRequest` and `Answer` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollout.errors import OpenForgeError
from rollout.proxy.dialects.outside import Outside
from rollout.proxy.messages import Message, ToolCall

DEPTH = 100
"""How deep the values of a body or of a call's arguments may be nested; a record is written by recursion."""
DialectName = Literal["chat", "responses", "messages"]


class Refused(OpenForgeError):
    """Ends one HTTP request with `status`. `field` names the offending part of the request."""

    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field


@dataclass(frozen=True)
class ToolForm:
    """How the client knows a tool that the model sees as a plain function."""

    name: str
    namespace: str = ""
    custom: bool = False
    """Free text instead of arguments: the model's function has the one argument `input`."""


@dataclass(frozen=True)
class Schema:
    """JSON schema that the answer's text must fit. `field` is the request's name for it."""

    json: Mapping[str, Any]
    field: str


@dataclass(frozen=True)
class CallRequest:
    """A model call in canonical form."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Function tools in OpenAI's form, as the client wrote them; empty too when the client forbids calls."""
    forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """Function name -> the client's form, for the tools where the two differ."""
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    sealed_reasoning: bool = False
    """The client wants reasoning as an opaque echo as well."""
    schema: Schema | None = None
    left_out: tuple[str, ...] = ()
    """What the request holds and the model is not shown: hosted and deferred tools, items of foreign servers."""
    rules: tuple[str, ...] = ()
    """Names of the canonicalisation rules (noise.py) that changed something."""
    outside: Outside = field(default_factory=Outside)


@dataclass(frozen=True)
class Head:
    """Envelope of an answer. `id` has no prefix yet: each dialect has its own. `created` is in Unix seconds."""

    id: str
    model: str
    created: int
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    malformed: bool
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int

    def message(self) -> Message:
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


@dataclass(frozen=True)
class Piece:
    """Consecutive text of an answer, as it becomes known."""

    kind: Literal["content", "reasoning"]
    text: str


class EventWriter(Protocol):
    """Bytes of one streamed answer, in order: pieces, then `finish` or `failure`. `ping` may come behind `begin`."""

    def begin(self) -> bytes:
        """What stands before all else; empty where that has been written already, or where there is no such thing.

        The others begin by themselves. Called for an answer that is long in coming.
        """
        ...

    def piece(self, piece: Piece) -> bytes: ...

    def finish(self, answer: Answer) -> bytes:
        """Tool calls, finish reason, usage and the end mark: nothing that a client acts on comes before it."""
        ...

    def failure(self, refused: Refused) -> bytes: ...

    def ping(self) -> bytes: ...


class Dialect(Protocol):
    name: DialectName

    def parse(self, body: bytes) -> CallRequest:
        """Raises Refused (400) that names the field for what cannot be read or cannot be honoured."""
        ...

    def whole(self, head: Head, request: CallRequest, answer: Answer) -> bytes: ...

    def writer(self, head: Head, request: CallRequest) -> EventWriter: ...

    def refusal(self, refused: Refused) -> bytes:
        """Body of an error response."""
        ...


# -- JSON ----------------------------------------------------------------------------------------------

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_object(body: bytes) -> dict[str, Any]:
    """A request body as a JSON object whose text can all be written as UTF-8. Raises Refused (400).

    A name that stands twice in one object is refused: servers and clients differ about which one counts.
    """
    try:
        data = read_value(body.decode("utf-8-sig"), pairs=_unique)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "bad_json", f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise Refused(400, "bad_json", f"the body must be a JSON object, not {type(data).__name__}")
    return data


def read_value(text: str, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON without NaN, without lone surrogates, which no tokenizer takes, and at most `DEPTH` deep.

    Raises ValueError, RecursionError.
    """
    data = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=pairs)
    if text.count("[") + text.count("{") > DEPTH:
        check_depth(data)
    return _clean(data) if _SURROGATE.search(text) else data


def dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def dump_arguments(arguments: Mapping[str, Any]) -> str:
    """A call's arguments as every dialect sends them, spaced as chat templates write them."""
    return json.dumps(arguments, ensure_ascii=False)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} stands twice in one object")
    return found


def check_depth(data: Any) -> None:
    """Raises ValueError for values nested more than `DEPTH` deep."""
    level = [data]
    for _ in range(DEPTH + 1):
        level = [child for value in level if isinstance(value, dict | list) for child in _children(value)]
        if not level:
            return
    raise ValueError(f"its values are nested more than {DEPTH} deep")


def _children(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return value
