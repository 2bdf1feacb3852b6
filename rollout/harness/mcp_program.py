"""A stdio MCP server with a task's service tools, as it runs inside the sandbox; stdlib only, without any state.

    python3 -I -S /opt/openforge/mcp.py TOOLS.json        (JSON-RPC, one message a line)

TOOLS.json: {"tools": [<MCP tool>], "services": {tool: service}}. A call goes to the gateway through the proxy's unix
socket. The gateway's HTTP 200 carries what the service said, its errors too: those are results with `isError`, the
policy's to read. Everything else is the gateway's own trouble: connecting, 429 and 5xx are tried again, for the
service has not been called then; what stays is an error result as well.

OPENFORGE_SOCKET, OPENFORGE_BASE and OPENFORGE_KEY say where the gateway is.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the typing module would cost CPU at each start
    from typing import Any

    Json = dict[str, Any]

PROTOCOL = "2025-06-18"
"""Offered to a client that names no version; else the client's own is taken, for tools are the same in all."""
PATIENCE_S = 60.0
RETRY_S = 0.25
ANSWER_S = 120.0
METHOD_NOT_FOUND = -32601
PARSE_ERROR = -32700


class Gateway(http.client.HTTPConnection):
    """HTTP over the proxy's unix socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(os.environ["OPENFORGE_SOCKET"])


def post(path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body. Raises OSError or HTTPException when there is no answer in PATIENCE_S, or a broken one."""
    headers = {"Authorization": f"Bearer {os.environ['OPENFORGE_KEY']}", "Content-Type": "application/json"}
    end = time.monotonic() + PATIENCE_S
    while True:
        gateway = Gateway("proxy")
        try:
            gateway.connect()
        except OSError:
            gateway.close()
            if time.monotonic() > end:
                raise
            time.sleep(RETRY_S)
            continue
        try:
            gateway.request("POST", path, body, headers)
            answer = gateway.getresponse()
            status, data = answer.status, answer.read()
        finally:
            gateway.close()
        if (status != 429 and status < 500) or time.monotonic() > end:
            return status, data
        time.sleep(RETRY_S * 4)


def use(config: Json, name: str, arguments: Json) -> Json:
    """One call as an MCP result."""
    service = config["services"].get(name)
    if service is None:
        return result({"error": f"unknown tool {name}"}, failed=True)
    try:
        status, data = post(f"{os.environ['OPENFORGE_BASE']}/tools/{service}/{name}", json.dumps(arguments).encode())
        answer = json.loads(data)
        if status != 200:
            return result({"error": f"the gateway refused the call ({status})"}, failed=True)
        if "result" in answer:
            return result(answer["result"], failed=False)
        return result({"error": answer["error"]}, failed=True)
    except (OSError, http.client.HTTPException) as error:
        return result({"error": f"the service cannot be reached: {error}"}, failed=True)
    except (ValueError, KeyError, TypeError):
        return result({"error": f"the service gave no answer ({status})"}, failed=True)


def result(value: Any, *, failed: bool) -> Json:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return {"content": [{"type": "text", "text": text}], "isError": failed}


def answer(config: Json, message: Json) -> Json | None:
    """The reply to one JSON-RPC message; None to a notification."""
    if "id" not in message:
        return None
    method, params = message.get("method"), message.get("params") or {}
    if method == "initialize":
        told: Json = {
            "protocolVersion": params.get("protocolVersion") or PROTOCOL,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "openforge", "version": "1"},
        }
    elif method == "ping":
        told = {}
    elif method == "tools/list":
        told = {"tools": config["tools"]}
    elif method == "tools/call":
        told = use(config, str(params.get("name")), params.get("arguments") or {})
    else:
        error = {"code": METHOD_NOT_FOUND, "message": f"no method {method}"}
        return {"jsonrpc": "2.0", "id": message["id"], "error": error}
    return {"jsonrpc": "2.0", "id": message["id"], "result": told}


def main(path: str) -> int:
    with open(path, "rb") as file:
        config = json.loads(file.read())
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
        except ValueError as error:
            reply: Json | None = {"jsonrpc": "2.0", "id": None, "error": {"code": PARSE_ERROR, "message": str(error)}}
        else:
            reply = answer(config, message) if isinstance(message, dict) else None
        if reply is not None:
            sys.stdout.buffer.write(json.dumps(reply, ensure_ascii=False).encode(errors="replace") + b"\n")
            sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
