"""The home's Prefect server as a subprocess: where it listens, with which environment, and whether it is healthy.

Its database lies in the home, so that `openforge up`, `openforge demo` and a stage command show one history.
Prefect is never imported here: the CLI talks to its command and to its HTTP API.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from cli import terminate
from rollout.config import CODE_ROOT, Home
from rollout.errors import ConfigError, InfrastructureError
from rollout.processes import alive, read_pid_file, started, write_pid_file

HOST = "127.0.0.1"
DEFAULT_PORT = 4200
START_S = 180.0
PORT_TRIES = 3
HEARTBEAT_S = 30
"""Seconds between the heartbeats of a flow run: Prefect's smallest."""


def server_file(home: Home) -> Path:
    return home.run / "prefect.json"


def auth_file(home: Home) -> Path:
    return home.run / "prefect.auth"


def find_server(home: Home) -> dict[str, Any] | None:
    """pid, started, url and owner (`up`, or the command that started it) of the home's server, or None."""
    return read_pid_file(server_file(home))


def write_auth(home: Home) -> str:
    """The API's user and password, generated once, in a file that only its owner reads."""
    path = auth_file(home)
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(f"openforge:{secrets.token_urlsafe(24)}")
    return path.read_text()


def read_auth(home: Home) -> str:
    return auth_file(home).read_text() if auth_file(home).exists() else ""


def environment(home: Home, url: str = "") -> dict[str, str]:
    """What the server, the worker and every flow run of this home inherit; the user's own profile plays no part."""
    env = {k: v for k, v in os.environ.items() if k not in ("PREFECT_PROFILE", "PREFECT_API_KEY", "PREFECT_API_URL")}
    env |= {
        "OPENFORGE_HOME": str(home.root),
        "OPENFORGE_CODE": str(CODE_ROOT),
        "OPENFORGE_FOLLOW": "1",
        "PREFECT_HOME": str(home.root / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if url:
        env["PREFECT_API_URL"] = f"{url}/api"
    if auth := read_auth(home):
        env |= {"PREFECT_SERVER_API_AUTH_STRING": auth, "PREFECT_API_AUTH_STRING": auth}
    return env


def prefect(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *arguments]


def check_port(wanted: int) -> None:
    """0 is any. Raises ConfigError for a number that is no port, and for a port that is taken."""
    if not 0 <= wanted < 65536:
        raise ConfigError(f"{wanted} is no port; choose --port between 1 and 65535, or leave it out")
    if wanted and not _is_free(wanted):
        raise ConfigError(f"port {wanted} is in use on {HOST}; choose another with --port, or leave it out")


def free_port() -> int:
    """Prefect's usual port if nobody has it, else any free one."""
    if _is_free(DEFAULT_PORT):
        return DEFAULT_PORT
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
    return True


def bring_up(start: Callable[[int], subprocess.Popen[bytes]], home: Home, wanted: int = 0) -> int:
    """Starts the server by `start(port)` and waits until it is healthy; returns the port.

    Between the look at a free port and the server's bind another process may take it: then another port is tried,
    unless `wanted` names one. Raises InfrastructureError.
    """
    for _ in range(PORT_TRIES):
        port = wanted or free_port()
        if wait_healthy(home, start(port), port):
            return port
        if wanted:
            break
    raise InfrastructureError(f"port {port} was taken by another process while the Prefect server started; try again")


def start_server(home: Home, port: int, owner: str) -> subprocess.Popen[bytes]:
    """Starts the server in a session of its own and notes it in the home; it is not healthy yet."""
    url = f"http://{HOST}:{port}"
    log = home.logs / "prefect-server.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            prefect("server", "start", "--host", HOST, "--port", str(port)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=home.root,
            start_new_session=True,
            env=environment(home, url),
        )
    facts = {"pid": process.pid, "started": started(process.pid), "url": url, "owner": owner}
    own = os.getpid()
    write_pid_file(server_file(home), **facts, owner_pid=own, owner_started=started(own))
    return process


def end_orphan(home: Home) -> None:
    """Ends the server of a command that was killed. That of `up` stays: `up` and `down` know what belongs to it."""
    found = find_server(home)
    if found and found["owner"] != "up" and not alive(int(found["owner_pid"]), float(found["owner_started"])):
        terminate.end(found)


def api(home: Home, url: str, timeout_s: float = 10.0) -> httpx.Client:
    user, _, password = read_auth(home).partition(":")
    return httpx.Client(base_url=f"{url}/api", timeout=timeout_s, auth=(user, password) if user else None)


def is_healthy(home: Home, url: str) -> bool:
    try:
        with api(home, url, 3.0) as client:
            return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def wait_healthy(home: Home, process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until this very process answers; False if it ended because another one has the port.

    Raises InfrastructureError that names the log when it ends otherwise or does not answer in time.
    """
    log, url = home.logs / "prefect-server.log", f"http://{HOST}:{port}"
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None and not _is_free(port):
            return False
        if process.poll() is not None:
            raise InfrastructureError(f"the Prefect server ended at its start ({process.returncode}); see {log}")
        if _listens(process.pid, port) and is_healthy(home, url):
            return True
        time.sleep(0.3)
    raise InfrastructureError(f"the Prefect server did not answer within {START_S:.0f} s; see {log}")


def _listens(pid: int, port: int) -> bool:
    """Whether the process or one below it has the port: a server of another home may answer there too."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return any(c.status == "LISTEN" and c.laddr.port == port for p in family for c in p.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return False
