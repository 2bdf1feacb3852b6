"""`openforge up`'s supervisor: Prefect server, worker and `serve` as children, restarted when they die.

    server up and healthy -> worker (makes the work pool) -> deployments, watchdog, the user's profile -> ready

`up.json` in the home names the supervisor and its children while they live, so that `down` and a later `up` find
them again even after the supervisor was killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import deploy, prefect_server, terminate
from rollout.config import CODE_ROOT, Home
from rollout.errors import OpenForgeError
from rollout.processes import find_serve, read_pid_file, serve_file, started, write_pid_file

if TYPE_CHECKING:
    from rollout.store import Store

POOL = "claw"
BACKOFF_S = 2.0
WORKER_START_S = 120.0


def up_file(home: Home) -> Path:
    return home.run / "up.json"


def find_up(home: Home) -> dict[str, Any] | None:
    return read_pid_file(up_file(home))


def leftovers(home: Home) -> list[dict[str, Any]]:
    """Children that a killed supervisor left running."""
    try:
        body = json.loads(up_file(home).read_text())
    except (FileNotFoundError, ValueError):
        return []
    return list(body.get("children", {}).values())


@dataclass
class Child:
    """One process and how to start it again; `process` is None while another process plays its part."""

    name: str
    start: Callable[[], subprocess.Popen[bytes] | None]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    due: float = 0.0


@dataclass
class Supervisor:
    home: Home
    wanted: int
    """Port of the Prefect server; 0 takes a free one."""
    say: Callable[[str], None]
    port: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    children: dict[str, Child] = field(default_factory=dict)
    state: str = "starting"

    @property
    def url(self) -> str:
        """Empty until the server has a port."""
        return f"http://{prefect_server.HOST}:{self.port}" if self.port else ""

    def run(self) -> None:
        """Brings everything up, watches it until `stop` is set or a signal comes, and takes it down again."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: self.stop.set())
        try:
            self._bring_up()
            while not self.stop.wait(0.5):
                self._watch()
        finally:
            self._take_down()

    def _bring_up(self) -> None:
        self._note()
        self._launch("serve", self._start_serve)
        prefect_server.bring_up(self._launch_server, self.home, self.wanted)
        with deploy.Profile(self.home, self.url) as profile:
            self._launch("worker", self._start_worker)
            self.say("worker: starting; deployments: being registered")
            deploy.wait_pool(self.home, self.url, POOL, WORKER_START_S)
            deploy.deploy_all(self.home, self.url)
            deploy.install_watchdog(self.home, self.url)
            self.say(profile.use())
        self.state = "ready"
        self._note()
        self.say(f"ready: {self.url}")

    def _launch_server(self, port: int) -> subprocess.Popen[bytes]:
        self.port = port
        self.say(f"Prefect server: {self.url}")
        child = self.children.setdefault("server", Child("server", self._start_server))
        child.process = self._start_server()
        self._note()
        return child.process

    def _start_server(self) -> subprocess.Popen[bytes]:
        return prefect_server.start_server(self.home, self.port, "up")

    def _start_worker(self) -> subprocess.Popen[bytes]:
        argv = prefect_server.prefect("worker", "start", "--pool", POOL, "--type", "process", "--name", "openforge")
        return self._spawn("worker", argv)

    def _start_serve(self) -> subprocess.Popen[bytes] | None:
        if find_serve(self.home):
            return None
        return self._spawn("serve", [sys.executable, "-m", "rollout.serve", "--home", str(self.home.root)])

    def _spawn(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        with (self.home.logs / f"{name}.log").open("ab") as out:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=CODE_ROOT,
                start_new_session=True,
                env=prefect_server.environment(self.home, self.url),
            )

    def _launch(self, name: str, start: Callable[[], subprocess.Popen[bytes] | None]) -> None:
        child = self.children.setdefault(name, Child(name, start))
        child.process = start()
        self._note()

    def _watch(self) -> None:
        """Starts again what ended, at most every `BACKOFF_S` x restarts seconds."""
        for child in self.children.values():
            if child.process is not None and child.process.poll() is None:
                continue
            if child.process is not None:
                child.restarts += 1
                child.due = time.monotonic() + min(60.0, BACKOFF_S * child.restarts)
                self.say(f"{child.name} ended with code {child.process.returncode}; starting it again")
                child.process = None
            if time.monotonic() >= child.due:
                child.process = child.start()
                self._note()

    def _note(self) -> None:
        running = {
            c.name: {"pid": c.process.pid, "started": started(c.process.pid)}
            for c in self.children.values()
            if c.process is not None and c.process.poll() is None
        }
        write_pid_file(up_file(self.home), state=self.state, url=self.url, children=running)

    def _take_down(self) -> None:
        self.state = "stopping"
        self._note()
        self.say("stopping")
        for name in ("worker", "serve", "server"):
            child = self.children.get(name)
            if child is not None and child.process is not None and child.process.poll() is None:
                terminate.end({"pid": child.process.pid, "started": started(child.process.pid)})
        clear(self.home)


def clear(home: Home) -> None:
    """Ends what still runs in the home (serve, engines) and restores the user's Prefect profile."""
    terminate.end(read_pid_file(serve_file(home)))
    try:
        _stop_engines(home)
    except OpenForgeError as error:
        print(f"engines: {error}", file=sys.stderr)
    deploy.restore_profile(home)
    for path in (prefect_server.server_file(home), prefect_server.auth_file(home), up_file(home)):
        path.unlink(missing_ok=True)


def _stop_engines(home: Home) -> None:
    from rollout.inference.launch import stop_engines

    with _store(home) as store:
        stop_engines(store)


@contextmanager
def _store(home: Home) -> Iterator[Store]:
    from rollout.store import open_store

    store = open_store(home)
    try:
        yield store
    finally:
        store.close()
