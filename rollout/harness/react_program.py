"""The ReAct loop as it runs inside the sandbox: `python3 -I -S react.py CONFIG`; stdlib only, few imports.

    user -> model -> tool calls -> results -> model -> ... -> answer without tool calls -> /workspace/answer.txt

Chat Completions over the proxy's unix socket; tools through the gateway on the same socket. Assistant messages
are sent back exactly as they came. What a service answers comes in an envelope with HTTP status 200, its 429 and
503 too: the model reads it. A HTTP status of 429 or 5xx is infrastructure, and tried again. A 400 whose code ends
in `_cap` is a normal end; an answer of 401, or one that stays away, ends the program with 70.
"""

from __future__ import annotations

import _socket
import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the typing module would cost CPU at each start
    from typing import Any

    Json = dict[str, Any]

PATIENCE_S = 60.0
"""How long connecting is tried, so that a restarted server is found again."""
RETRY_S = 0.25
ANSWER_S = 600.0
"""Longest silence in an answer."""
TRIES = 4
ANSWER_FILE = "/workspace/answer.txt"
UNREACHABLE = 70


class Unreachable(Exception):
    """The proxy or the gateway cannot be used."""


class Capped(Exception):
    """The proxy ended the session: a cap was reached."""


class Wire:
    """One keep-alive connection over the unix socket."""

    def __init__(self) -> None:
        self._sock: _socket.socket | None = None
        self._data = b""

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body. Connecting is tried for PATIENCE_S; a broken answer raises OSError."""
        sock = self._sock or self._connect()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: proxy\r\nAuthorization: Bearer {os.environ['OPENFORGE_KEY']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            sock.sendall(head.encode() + body)
            return self._answer(sock)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._sock:
            self._sock.close()
        self._sock, self._data = None, b""

    def _connect(self) -> _socket.socket:
        end = time.monotonic() + PATIENCE_S
        while True:
            sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            try:
                sock.connect(os.environ["OPENFORGE_SOCKET"])
            except OSError as error:
                sock.close()
                if time.monotonic() > end:
                    raise Unreachable(f"no connection to the proxy for {PATIENCE_S:.0f} s: {error}") from error
                time.sleep(RETRY_S)
            else:
                sock.settimeout(ANSWER_S)
                self._sock = sock
                return sock

    def _fill(self, sock: _socket.socket) -> None:
        chunk = sock.recv(65536)
        if not chunk:
            raise ConnectionResetError("the proxy closed the connection")
        self._data += chunk

    def _take(self, sock: _socket.socket, count: int) -> bytes:
        while len(self._data) < count:
            self._fill(sock)
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def _until(self, sock: _socket.socket, mark: bytes) -> bytes:
        while mark not in self._data:
            self._fill(sock)
        taken, _, self._data = self._data.partition(mark)
        return taken

    def _answer(self, sock: _socket.socket) -> tuple[int, bytes]:
        first, *rows = self._until(sock, b"\r\n\r\n").split(b"\r\n")
        headers = {}
        for row in rows:
            name, _, value = row.partition(b":")
            headers[name.lower()] = value.strip().lower()
        if headers.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(self._until(sock, b"\r\n").split(b";")[0], 16):
                body += self._take(sock, size)
                self._take(sock, 2)
            self._until(sock, b"\r\n")
        else:
            body = self._take(sock, int(headers.get(b"content-length", b"0")))
        if headers.get(b"connection") == b"close":
            self.close()
        return int(first.split(b" ", 2)[1]), body


def post(wire: Wire, path: str, payload: Json) -> tuple[int, bytes]:
    """POSTs with retries of broken, busy and failing answers. Returns status and body; raises Unreachable."""
    body = json.dumps(payload).encode()
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(2 ** (attempt - 1))
        try:
            status, data = wire.post(path, body)
        except OSError as error:
            said = f"{error}"
            continue
        if status == 401:
            raise Unreachable("the key was refused (401)")
        if status != 429 and status < 500:
            return status, data
        said = f"{status}: {data[:300].decode(errors='replace')}"
    raise Unreachable(f"{path.rsplit('/', 1)[-1]}: no answer in {TRIES} tries ({said})")


def assemble(data: bytes) -> Json:
    """One assistant message from a stream of chunks."""
    message: Json = {"role": "assistant", "content": None}
    calls: dict[int, Json] = {}
    for line in data.split(b"\n"):
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise Unreachable(f"the stream broke: {event['error']}")
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for part in delta.get("tool_calls") or ():
                join_call(calls, part)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    elif message["content"] is None:
        message["content"] = ""
    return message


def join_call(calls: dict[int, Json], part: Json) -> None:
    call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] += part.get("id") or ""
    function = part.get("function") or {}
    for key in ("name", "arguments"):
        call["function"][key] += function.get(key) or ""


def ask(wire: Wire, config: Json, messages: list[Json]) -> Json:
    """The model's next message, as it came. Raises Capped, Unreachable."""
    payload = {"model": config["model"], "messages": messages}
    if config["tools"]:
        payload["tools"] = config["tools"]
    if os.environ.get("OPENFORGE_STREAM"):
        payload["stream"] = True
    status, data = post(wire, os.environ["OPENFORGE_BASE"] + "/v1/chat/completions", payload)
    try:
        if status == 200 and payload.get("stream"):
            return assemble(data)
        answer = json.loads(data)
        if status == 200:
            message: Json = answer["choices"][0]["message"]
            message.get("tool_calls")  # raises for what is no object
            return message
        code = str(answer["error"].get("code"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Unreachable(f"an answer that is none ({status}): {data[:300].decode(errors='replace')}") from error
    if status == 400 and code.endswith("_cap"):
        raise Capped(code)
    raise Unreachable(f"the proxy refused the call ({status}): {data[:300].decode(errors='replace')}")


def use(wire: Wire, config: Json, call: Json) -> str:
    """Content of the tool message for one call: the result, or {"error": ...}, as compact JSON."""
    name = call["function"]["name"]
    service = config["services"].get(name)
    if service is None:
        return compact({"error": f"unknown tool {name}"})
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return compact({"error": "arguments are not a JSON object"})
    status, data = post(wire, f"{os.environ['OPENFORGE_BASE']}/tools/{service}/{name}", arguments)
    try:
        answer = json.loads(data)
        return compact(answer["result"] if "result" in answer else {"error": answer["error"]})
    except (ValueError, LookupError, TypeError) as error:
        raise Unreachable(f"the gateway's answer is none ({status}): {data[:300].decode(errors='replace')}") from error


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def loop(config: Json) -> str:
    """Runs to the answer and returns it."""
    wire = Wire()
    messages = [{"role": "system", "content": config["system"]}] if config["system"] else []
    messages.append({"role": "user", "content": config["instruction"]})
    while True:
        message = ask(wire, config, messages)
        messages.append(message)
        calls = message.get("tool_calls")
        if not calls:
            return message.get("content") or ""
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": use(wire, config, call)})


def main(path: str) -> int:
    with open(path, "rb") as file:
        config = json.loads(file.read())
    try:
        answer = loop(config)
    except Capped as end:
        os.write(2, f"react: ended by {end}\n".encode())
        return 0
    except Unreachable as error:
        os.write(2, f"react: {error}\n".encode(errors="replace"))
        return UNREACHABLE
    with open(ANSWER_FILE, "wb") as file:
        file.write(answer.encode(errors="replace"))
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))
