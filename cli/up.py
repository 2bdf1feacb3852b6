"""`openforge up`, `down`, `status`: the Prefect server, a worker and `serve` of one home."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from cli import prefect_server, supervise, terminate
from rollout.config import Home, open_home
from rollout.errors import ConfigError, InfrastructureError
from rollout.processes import find_serve, started

UP_S = 300.0
console = Console(highlight=False, soft_wrap=True)


def up(
    *,
    detach: Annotated[bool, Parameter(negative="")] = False,
    port: int = 0,
    auth: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Starts the Prefect server on 127.0.0.1, a worker and serve; Ctrl-C ends all.

    Parameters
    ----------
    detach
        Return when everything is up; `openforge down` ends it.
    port
        Port of the Prefect server; 0 takes 4200 if it is free, else any free one.
    auth
        Protect Prefect's API and UI with a generated password.
    """
    prefect_server.check_port(port)
    home = open_home()
    if running := supervise.find_up(home):
        console.print(f"already up: {running['url']} (openforge status shows more)")
        return 0
    prefect_server.end_orphan(home)
    _refuse_foreign_server(home)
    for facts in supervise.leftovers(home):
        terminate.end(facts)
    if detach:
        return _detach(home, port, auth)
    prefect_server.auth_file(home).unlink(missing_ok=True)
    if auth:
        prefect_server.write_auth(home)
        console.print(f"API user and password: {prefect_server.auth_file(home)} (mode 0600)")
    supervise.Supervisor(home, port, console.print).run()
    return 0


def down() -> int:
    """Ends what `openforge up` started, and this home's engines; restores the earlier Prefect profile."""
    home = open_home()
    running = supervise.find_up(home)
    if running:
        terminate.end(running, grace_s=90.0)
    ended = [terminate.end(facts) for facts in supervise.leftovers(home)]
    server = terminate.end(prefect_server.find_server(home))
    serve = bool(find_serve(home))
    supervise.clear(home)
    console.print("down" if running or any(ended) or server or serve else "nothing was up")
    return 0


def status() -> int:
    """Shows what runs in this home."""
    from rollout.store import open_store

    home = open_home()
    up_facts, server, serve = supervise.find_up(home), prefect_server.find_server(home), find_serve(home)
    console.print(f"home        {home.root}")
    console.print(f"up          {up_facts['state'] + ', pid ' + str(up_facts['pid']) if up_facts else 'no'}")
    console.print(f"Prefect     {_server_line(home, server)}")
    console.print(f"serve       {serve['url'] + ', pid ' + str(serve['pid']) if serve else 'no'}")
    store = open_store(home)
    try:
        for engine in store.engines.all():
            console.print(f"engine      {engine.id}  {engine.model}  {engine.url}  version {engine.version}")
        counts = {str(state): n for state, n in store.rollouts.counts().items()}
    finally:
        store.close()
    console.print("rollouts    " + (", ".join(f"{n} {state}" for state, n in sorted(counts.items())) or "none"))
    return 0


def _server_line(home: Home, server: dict[str, Any] | None) -> str:
    if server is None:
        return "no"
    health = "healthy" if prefect_server.is_healthy(home, server["url"]) else "not answering"
    return f"{server['url']}, {health}, started by {server['owner']}, pid {server['pid']}"


def _refuse_foreign_server(home: Home) -> None:
    server = prefect_server.find_server(home)
    if server and server["owner"] != "up":
        raise ConfigError(
            f"`openforge {server['owner']}` runs its own Prefect server in {home.root} (pid {server['pid']}); "
            "wait for its end, or set OPENFORGE_HOME to another folder"
        )


def _detach(home: Home, port: int, auth: bool) -> int:
    argv = [sys.executable, "-m", "cli.app", "up", "--port", str(port), *(["--auth"] * auth)]
    log = home.logs / "up.log"
    at = log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    end = time.monotonic() + UP_S
    while time.monotonic() < end:
        at = _echo(log, at)
        facts = supervise.find_up(home)
        if facts and facts["state"] == "ready":
            console.print("openforge down ends it")
            return 0
        if process.poll() is not None:
            raise InfrastructureError(f"openforge up ended with code {process.returncode}; see {log}")
        time.sleep(0.3)
    terminate.end({"pid": process.pid, "started": started(process.pid)}, grace_s=60.0)
    raise InfrastructureError(f"not everything came up within {UP_S:.0f} s; see {log}")


def _echo(log: Path, at: int) -> int:
    with log.open() as file:
        file.seek(at)
        if text := file.read():
            console.print(text, end="")
        return file.tell()
