"""Runs one flow for a command: in a process of its own, against the home's Prefect server, with bars here.

A server that `openforge up` started is used as it is; without one a server is started for the command's time.
Ctrl-C ends the flow; rollouts and what is committed stay, so that the same command goes on where it stopped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cli import prefect_server, terminate
from cli.supervise import find_up
from rollout.config import CODE_ROOT, Home
from rollout.errors import ConfigError, InfrastructureError
from rollout.processes import started
from tasks.progress_file import Line, read_progress

POLL_S = 0.5
STOP_S = 30.0
DRAIN_S = 3.0
"""The server records task runs from memory; it gets this long before it is stopped."""


@contextmanager
def prefect_api(home: Home, owner: str, console: Console) -> Iterator[str]:
    """URL of the home's server; one that is started here ends with the block. Raises InfrastructureError."""
    prefect_server.end_orphan(home)
    if running := _running_server(home):
        yield running
        return
    started_here: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> subprocess.Popen[bytes]:
        url = f"http://{prefect_server.HOST}:{port}"
        console.print(f"Prefect server: {url} (for the time of this command; `openforge up` keeps one)")
        started_here.append(prefect_server.start_server(home, port, owner))
        return started_here[-1]

    try:
        yield f"http://{prefect_server.HOST}:{prefect_server.bring_up(start, home)}"
        time.sleep(DRAIN_S)
    finally:
        with suppress(FileNotFoundError):
            prefect_server.server_file(home).unlink()
        for process in started_here:
            if process.poll() is None:
                terminate.end({"pid": process.pid, "started": started(process.pid)})
            process.wait(STOP_S)


def _running_server(home: Home) -> str:
    """URL of a server that others run here, once it answers: `up` may just be starting it. Empty when there is none."""
    end = time.monotonic() + prefect_server.START_S
    while (found := prefect_server.find_server(home)) or find_up(home):
        if found and prefect_server.is_healthy(home, str(found["url"])):
            return str(found["url"])
        if time.monotonic() > end:
            raise InfrastructureError(
                f"the home's Prefect server did not answer within {prefect_server.START_S:.0f} s; "
                f"see {home.logs / 'prefect-server.log'}, or end it: openforge down"
            )
        time.sleep(POLL_S)
    return ""


@dataclass(frozen=True)
class FlowCall:
    """One flow with its parameters; `run` is the name under which it reports progress."""

    name: str
    params: Mapping[str, Any]
    run: str


def run_flow(home: Home, call: FlowCall, url: str, console: Console, watch: Callable[[], None] = lambda: None) -> None:
    """Runs it to its end and shows its progress. Raises ConfigError or InfrastructureError with the flow's message."""
    log = home.logs / f"flow-{call.name}-{call.run}.log"
    result = home.run / f"flow-{call.name}-{call.run}.result"
    result.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "flows", call.name, json.dumps({"params": dict(call.params)}), str(result)]
    since = time.time()
    with log.open("ab") as out:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=CODE_ROOT,
            start_new_session=True,
            env=prefect_server.environment(home, url),
        )
    try:
        with _Stages(home, call.run, since, console) as shown:
            while child.poll() is None:
                shown.update()
                watch()
                time.sleep(POLL_S)
            shown.update()
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            terminate.end({"pid": child.pid, "started": started(child.pid)}, grace_s=STOP_S)
    _raise_for(call, child.returncode, result, log)


def _raise_for(call: FlowCall, code: int, result: Path, log: Path) -> None:
    if code == 0:
        return
    try:
        body = json.loads(result.read_text())
    except FileNotFoundError:
        body = {"code": code, "error": f"the flow {call.name} ended with code {code}"}
    kind = ConfigError if body["code"] == 2 else InfrastructureError
    raise kind(f"{body['error']}\nthe flow's log: {log}")


class _Stages:
    """A bar a stage with its remaining time, read from the progress file; plain lines where there is no terminal."""

    def __init__(self, home: Home, run: str, since: float, console: Console) -> None:
        self._home, self._run, self._since, self._console = home, run, since, console
        self._shown: dict[str, TaskID] = {}
        self._told: dict[str, str] = {}
        self._bars = Progress(
            TextColumn("{task.fields[stage]:<12}"),
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> _Stages:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self) -> None:
        """Lines of an earlier run are left out."""
        for stage, line in read_progress(self._home, self._run).items():
            if max(line.updated, line.started) >= self._since:
                self._bar(stage, line) if self._console.is_terminal else self._tell(stage, line)

    def _bar(self, stage: str, line: Line) -> None:
        if stage not in self._shown:
            self._shown[stage] = self._bars.add_task("", stage=stage, total=None)
        bar = self._shown[stage]
        whole = max(1, line.total)
        total, done = (whole, whole) if line.ended else (line.total or None, line.done)
        self._bars.update(bar, description=line.label[:28], completed=done, total=total)
        if line.ended:
            self._bars.stop_task(bar)

    def _tell(self, stage: str, line: Line) -> None:
        text = "done" if line.ended else line.label
        if text and self._told.get(stage) != text:
            self._told[stage] = text
            passed = time.time() - self._since
            self._console.print(f"{passed:6.0f} s  {stage:<12} {text}")
