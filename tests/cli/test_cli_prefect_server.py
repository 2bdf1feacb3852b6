"""Ports of the home's Prefect server: whose answer counts, and what is refused. No Prefect is needed for it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import prefect_server
from rollout.config import Home, open_home
from rollout.errors import ConfigError, InfrastructureError

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
try:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
except OSError:
    sys.exit(1)
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", min_free_mb=1)


class Servers:
    """Starts something that is healthy at a port, and remembers it."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []

    def start(self, port: int) -> subprocess.Popen[bytes]:
        self.ports.append(port)
        self.started.append(subprocess.Popen([sys.executable, "-c", HEALTHY, str(port)]))
        return self.started[-1]


@pytest.fixture
def servers() -> Iterator[Servers]:
    some = Servers()
    yield some
    for process in some.started:
        process.kill()
        process.wait(10)


def _free() -> int:
    with socket.socket() as sock:
        sock.bind((prefect_server.HOST, 0))
        return int(sock.getsockname()[1])


def test_the_answer_of_another_homes_server_is_not_taken_for_ones_own(
    home: Home, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once see the same port free; the one that binds it later has to take another."""
    port, spare = _free(), _free()
    assert prefect_server.wait_healthy(home, servers.start(port), port)
    seen = iter((port, spare))
    monkeypatch.setattr(prefect_server, "free_port", lambda: next(seen))
    assert prefect_server.bring_up(servers.start, home) == spare
    assert servers.ports == [port, port, spare]


def test_a_port_that_was_asked_for_is_never_changed(home: Home, servers: Servers) -> None:
    port = _free()
    assert prefect_server.bring_up(servers.start, home, port) == port
    with pytest.raises(InfrastructureError, match="port"):
        prefect_server.bring_up(servers.start, home, port)


def test_a_server_that_ends_at_its_start_names_the_log(home: Home) -> None:
    with pytest.raises(InfrastructureError, match=r"prefect-server\.log"):
        prefect_server.bring_up(lambda _: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]), home)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="no port"):
        prefect_server.check_port(port)


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as sock:
        sock.bind((prefect_server.HOST, 0))
        sock.listen()
        with pytest.raises(ConfigError, match="in use"):
            prefect_server.check_port(sock.getsockname()[1])
