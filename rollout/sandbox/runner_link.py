"""How the runner reaches the server: one outbound long-poll for operations, one connection for results.

Raw HTTP/1.1 over the unix socket, stdlib only; `_socket` instead of `socket` saves 6 ms of CPU a start.
"""

from __future__ import annotations

import _socket
import json
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the typing module would cost CPU at each start
    from typing import Any

    Json = dict[str, Any]

LOST_S = 60.0
RETRY_S = 0.25


class Stop(Exception):
    """The server asked to stop."""


class Lost(Exception):
    """The server was not heard of for LOST_S, or no longer knows this sandbox."""


class Connection:
    """One keep-alive HTTP/1.1 connection over the unix socket with at most one request in flight."""

    def __init__(self, config: Json) -> None:
        self._path = config["socket"]
        self._prefix = f"/runner/{config['id']}/"
        self._key = config["key"]
        self._sock: _socket.socket | None = None
        self._buffer = b""

    def fileno(self) -> int:
        return self._sock.fileno() if self._sock else -1

    def close(self) -> None:
        if self._sock:
            self._sock.close()
        self._sock, self._buffer = None, b""

    def send(self, method: str, route: str, body: bytes = b"") -> None:
        """Raises OSError when the server is not there."""
        if self._sock is None:
            self._sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            self._sock.settimeout(10.0)
            self._sock.connect(self._path)
        head = (
            f"{method} {self._prefix}{route} HTTP/1.1\r\nHost: runner\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._sock.sendall(head.encode() + body)

    def receive(self) -> tuple[int, bytes] | None:
        """Reads what is there; status and body once they are complete. Raises OSError at an end of file."""
        assert self._sock
        data = self._sock.recv(262144)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._buffer += data
        head, sep, rest = self._buffer.partition(b"\r\n\r\n")
        if not sep:
            return None
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return None
        self._buffer = rest[length:]
        return int(head.split(b" ", 2)[1]), rest[:length]


class Link:
    """The server as this runner sees it: the next operation, and where results go."""

    def __init__(self, config: Json) -> None:
        self._next = Connection(config)
        self._result = Connection(config)
        self._waiting = False
        self._retry_at = 0.0
        self._heard = time.monotonic()
        self._seq = 0
        self.op: Json | None = None

    def fileno(self) -> int:
        return self._next.fileno() if self._waiting else -1

    def ask(self) -> None:
        """Keeps one long-poll in flight, unless an operation is at hand. Raises Lost."""
        now = time.monotonic()
        if now - self._heard > LOST_S:
            raise Lost(f"the server was not heard of for {LOST_S:.0f} s")
        if self._waiting or self.op or now < self._retry_at:
            return
        try:
            self._next.send("GET", f"next?after={self._seq}")
            self._waiting = True
        except OSError:
            self._broken()

    def pump(self) -> None:
        """Takes what arrived. Raises Stop, Lost."""
        try:
            answer = self._next.receive()
        except OSError:
            self._broken()
            return
        if answer is None:
            return
        self._waiting, self._heard = False, time.monotonic()
        status, body = answer
        if status in (401, 404):
            raise Lost("the server no longer knows this sandbox")
        if status != 200:
            self._retry_at = self._heard + (0.0 if status == 204 else RETRY_S)
            return
        self.op = json.loads(body)
        self._seq = self.op["seq"]
        if self.op["kind"] == "stop":
            raise Stop

    def wait(self) -> Json:
        """The next operation. Raises Stop, Lost."""
        while self.op is None:
            self.ask()
            if not self._waiting:
                time.sleep(RETRY_S)
            elif select.select([self._next], [], [], 5.0)[0]:
                self.pump()
        op, self.op = self.op, None
        return op

    def post(self, seq: int, result: Json) -> None:
        """Delivers a result, trying again for LOST_S. Raises Lost."""
        body = json.dumps(result).encode()
        end = time.monotonic() + LOST_S
        while time.monotonic() < end:
            try:
                self._result.send("POST", f"result?seq={seq}", body)
                while (answer := self._result.receive()) is None:
                    pass  # each receive has the socket's own 10 s limit
                if answer[0] in (401, 404):
                    raise Lost("the server no longer knows this sandbox")
                if answer[0] < 300:
                    self._heard = time.monotonic()
                    return
            except OSError:
                self._result.close()
            time.sleep(RETRY_S)
        raise Lost(f"a result could not be delivered for {LOST_S:.0f} s")

    def _broken(self) -> None:
        self._next.close()
        self._waiting, self._retry_at = False, time.monotonic() + RETRY_S
