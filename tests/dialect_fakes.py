"""Conversations for the tests of the dialects: random ones, and how a client of each dialect writes them down.

`body_of(dialect, messages)` is the request body of a canonical history, `Player` a server that gives any answer in any
dialect.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from proxy_fakes import Stage, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout.proxy.dialects.anthropic import MessagesDialect
from rollout.proxy.dialects.base import Answer, CallRequest, Dialect, Head, Piece
from rollout.proxy.dialects.chat import ChatDialect
from rollout.proxy.dialects.noise import number_calls
from rollout.proxy.dialects.responses import ResponsesDialect
from rollout.proxy.messages import Image, Message, ToolCall

DIALECTS: dict[str, Dialect] = {
    "chat": ChatDialect(),
    "responses": ResponsesDialect(),
    "messages": MessagesDialect(),
}
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
HEAD = Head("r1-0", "student", 1_700_000_000, 11)
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n tiny").decode()

# -- random conversations ------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_SAID = _TEXT.filter(lambda text: text.strip() != "")
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_CALLS = st.lists(
    st.builds(ToolCall, st.just(""), st.sampled_from(["get_ticket", "close_ticket"]), st.dictionaries(_TEXT, _VALUES)),
    max_size=3,
)


def an_image(raw: bytes) -> Image:
    data = base64.b64encode(raw).decode()
    return Image("image/png", hashlib.sha256(raw).hexdigest(), f"data:image/png;base64,{data}")


@st.composite
def _spoken(draw: st.DrawFn, role: Any) -> Message:
    """A turn of text, perhaps with a picture behind it."""
    text, raw = draw(_SAID), draw(st.none() | st.binary(min_size=1, max_size=8))
    if raw is None or role == "system":
        return Message(role, text)
    image = an_image(raw)
    return Message(role, f"{text}\n{image.placeholder}", images=(image,))


@st.composite
def _round(draw: st.DrawFn) -> list[Message]:
    """A user's turn and what follows: a late system turn, an answer, the results of all of its calls."""
    out = [draw(_spoken("user"))]
    if draw(st.booleans()):
        out.append(draw(_spoken("system")))
    calls = tuple(draw(_CALLS))
    reasoning = draw(st.just("") | _SAID)
    content = draw(_SAID) if not calls and not reasoning else draw(st.just("") | _SAID)
    out.append(Message("assistant", content, reasoning, calls))
    return out + [draw(_spoken("tool")) for _ in calls]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """System turns, rounds, and a last user's turn; call ids are numbered as the proxy numbers them."""
    start = draw(st.lists(_spoken("system"), max_size=1))
    rounds = draw(st.lists(_round(), min_size=0, max_size=3))
    return number_calls((*start, *(m for r in rounds for m in r), draw(_spoken("user"))))


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    calls = tuple(ToolCall(f"call_0_{i}", c.name, c.arguments) for i, c in enumerate(draw(_CALLS)))
    cut = draw(st.booleans()) and not calls
    reason = "tool_calls" if calls else "length" if cut else "stop"
    return Answer(
        draw(st.just("") | _SAID), draw(st.just("") | _SAID), calls, False, reason, 11, draw(st.integers(0, 9))
    )


# -- how clients write them ----------------------------------------------------------------------------


def body_of(dialect: str, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
    return {"chat": _chat, "responses": _responses, "messages": _messages}[dialect](messages, fields)


def _chat(messages: Sequence[Message], fields: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for message in messages:
        row: dict[str, Any] = {"role": message.role, "content": _parts(message, "text", _chat_image)}
        if message.reasoning:
            row["reasoning_content"] = message.reasoning
        if message.tool_calls:
            row["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in message.tool_calls
            ]
        if message.role == "tool":
            row["tool_call_id"] = message.tool_call_id
        rows.append(row)
    return {"model": "m", "messages": rows, **fields}


def _responses(messages: Sequence[Message], fields: dict[str, Any]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            parts = _parts(message, "input_text", _response_image)
            items.append({"type": "function_call_output", "call_id": message.tool_call_id, "output": parts})
        elif message.role == "assistant":
            items += _response_answer(message)
        else:
            role = "developer" if message.role == "system" else message.role
            items.append({"role": role, "content": _parts(message, "input_text", _response_image)})
    return {"model": "m", "input": items, **fields}


def _response_answer(message: Message) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
    if message.content or not (message.reasoning or message.tool_calls):
        content = [{"type": "output_text", "text": message.content, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": content})
    for call in message.tool_calls:
        told = json.dumps(call.arguments, separators=(",", ":"))
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": told})
    return items


def _messages(messages: Sequence[Message], fields: dict[str, Any]) -> dict[str, Any]:
    """System turns stay in place, the first one goes to `system`; results of one answer share a turn."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 4096, "messages": [], **fields}
    rows = body["messages"]
    rest = list(messages)
    if rest and rest[0].role == "system":
        body["system"] = [{"type": "text", "text": rest.pop(0).content, "cache_control": {"type": "ephemeral"}}]
    for message in rest:
        if message.role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.tool_call_id}
            block["content"] = _parts(message, "text", _block_image)
            if rows[-1]["role"] == "user" and rows[-1]["content"][0]["type"] == "tool_result":
                rows[-1]["content"].append(block)
            else:
                rows.append({"role": "user", "content": [block]})
        elif message.role == "assistant":
            rows.append({"role": "assistant", "content": _blocks(message)})
        else:
            rows.append({"role": message.role, "content": _parts(message, "text", _block_image)})
    return body


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": "s"})
        blocks.append({"type": "redacted_thinking", "data": "x"})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in message.tool_calls]


def _parts(message: Message, kind: str, image: Callable[[Image], dict[str, Any]]) -> Any:
    """A string, or parts where there is a picture."""
    if not message.images:
        return message.content
    (one,) = message.images
    text = message.content.removesuffix(f"\n{one.placeholder}")
    return [{"type": kind, "text": text}, image(one)]


def _chat_image(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image.url}}


def _response_image(image: Image) -> dict[str, Any]:
    return {"type": "input_image", "image_url": image.url, "detail": "auto"}


def _block_image(image: Image) -> dict[str, Any]:
    source = {"type": "base64", "media_type": image.media_type, "data": image.url.partition(",")[2]}
    return {"type": "image", "source": source}


# -- through the proxy ---------------------------------------------------------------------------------


def post(stage: Stage, name: str, path: str, body: Any, **headers: str) -> Any:
    """The request context manager of a POST for the rollout `name`, as a client of that path sends it."""
    key = {"x-api-key": stage.keys[name], "anthropic-version": "2023-06-01"}
    sent = key if path.startswith("messages") else {"Authorization": f"Bearer {stage.keys[name]}"}
    url = f"{stage.url}/rollouts/{name}/v1/{path}"
    return stage.http.post(url, data=json.dumps(body).encode(), headers={**sent, **headers})


async def ask(stage: Stage, name: str, dialect: str, body: Any) -> dict[str, Any]:
    """Body of a unary answer."""
    async with post(stage, name, PATHS[dialect], body) as response:
        raw = await response.read()
        assert response.status == 200, raw
        return dict(json.loads(raw))


async def listen(stage: Stage, name: str, dialect: str, body: Any) -> list[dict[str, Any]]:
    """Events of a streamed answer, end mark and keep-alives left out."""
    async with post(stage, name, PATHS[dialect], {**body, "stream": True}) as response:
        raw = (await response.read()).decode()
        assert response.status == 200, raw
        return [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]


# -- answers over HTTP ---------------------------------------------------------------------------------


def streamed(dialect: Dialect, request: CallRequest, answer: Answer, step: int = 5) -> bytes:
    """The answer's events, its texts cut into pieces of `step` characters."""
    writer = dialect.writer(HEAD, request)
    out = [writer.begin()]
    for kind, text in (("reasoning", answer.reasoning), ("content", answer.content)):
        out += [writer.piece(Piece(kind, text[i : i + step])) for i in range(0, len(text), step)]  # type: ignore[arg-type]
    return b"".join([*out, writer.finish(answer)])


class Player:
    """Answers every request of any dialect with `answer`, streamed where the request asks for it."""

    def __init__(self) -> None:
        self.answer = Answer("", "", (), False, "stop", 0, 0)
        routes = [Route(f"/v1/{path}", self._route(DIALECTS[n]), methods=["POST"]) for n, path in PATHS.items()]
        self.app = Starlette(routes=routes)

    def _route(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            asked = dialect.parse(await request.body())
            if asked.stream:
                return Response(streamed(dialect, asked, self.answer), media_type="text/event-stream")
            return Response(dialect.whole(HEAD, asked, self.answer), media_type="application/json")

        return answer


def play(check: Callable[[Player, str], None]) -> None:
    """Runs `check(player, url)` in a thread beside a server that plays."""

    async def main() -> None:
        player = Player()
        async with serving(player.app) as url:
            await asyncio.to_thread(check, player, url)

    asyncio.run(main())
