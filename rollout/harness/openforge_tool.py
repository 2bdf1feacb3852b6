"""Calls one tool of a mock service from inside a sandbox; stdlib only, for solve.sh and harnesses with a shell.

    python3 -I -S /opt/openforge/tool.py <service> <tool> '<json arguments>'

Prints the result as JSON and ends 0; prints {"status": ..., "error": ...} and ends 1 when the tool refused or its
service failed; ends 70 with a message when the gateway could not be used, which a HTTP status of 401, 429 or 5xx says.
OPENFORGE_SOCKET, OPENFORGE_BASE and OPENFORGE_KEY say where it is.
"""

from __future__ import annotations

import _socket
import json
import os
import sys
import time

PATIENCE_S = 60.0
RETRY_S = 0.25
ANSWER_S = 120.0


def request(path: str, body: bytes) -> tuple[int, bytes]:
    """POST over the unix socket; status and body. Connecting is tried for PATIENCE_S; raises OSError."""
    end = time.monotonic() + PATIENCE_S
    while True:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(os.environ["OPENFORGE_SOCKET"])
            break
        except OSError:
            sock.close()
            if time.monotonic() > end:
                raise
            time.sleep(RETRY_S)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: proxy\r\nAuthorization: Bearer {os.environ['OPENFORGE_KEY']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    sock.sendall(head.encode() + body)
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    sock.close()
    first, sep, rest = data.partition(b"\r\n\r\n")
    if not sep:
        raise OSError("the gateway closed the connection without an answer")
    return int(first.split(b" ", 2)[1]), rest


def main(argv: list[str]) -> int:
    if len(argv) != 4:
        print("usage: tool.py <service> <tool> '<json arguments>'", file=sys.stderr)
        return 2
    path = f"{os.environ['OPENFORGE_BASE']}/tools/{argv[1]}/{argv[2]}"
    try:
        status, body = request(path, argv[3].encode())
        answer = json.loads(body)
    except (OSError, ValueError) as error:
        print(f"tool.py: {error}", file=sys.stderr)
        return 70
    if "result" in answer:
        print(json.dumps(answer["result"], ensure_ascii=False))
        return 0
    print(json.dumps(answer, ensure_ascii=False))
    return 70 if status in (401, 429) or status >= 500 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
