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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cli import prefect_server, terminate
from rollout.config import CODE_ROOT, Home
from rollout.errors import ConfigError, InfrastructureError
from rollout.processes import started

POLL_S = 0.5
STOP_S = 30.0
DRAIN_S = 3.0
"""The server records task runs from memory; it gets this long before it is stopped."""


@contextmanager
def prefect_api(home: Home, owner: str, console: Console) -> Iterator[str]:
    """URL of the home's server; one that is started here ends with the block. Raises InfrastructureError."""
    if found := prefect_server.find_server(home):
        yield str(found["url"])
        return
    port = prefect_server.free_port()
    url = f"http://{prefect_server.HOST}:{port}"
    console.print(f"Prefect server: {url} (for the time of this command; `openforge up` keeps one)")
    process = prefect_server.start_server(home, port, owner)
    try:
        prefect_server.wait_healthy(home, process, url)
        yield url
        time.sleep(DRAIN_S)
    finally:
        with suppress(FileNotFoundError):
            prefect_server.server_file(home).unlink()
        if process.poll() is None:
            terminate.end({"pid": process.pid, "started": started(process.pid)})
        process.wait(STOP_S)


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
        with _bars(console) as bars:
            shown: dict[str, Any] = {}
            while child.poll() is None:
                _show(home, call.run, bars, shown, since)
                watch()
                time.sleep(POLL_S)
            _show(home, call.run, bars, shown, since)
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


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[stage]:<12}"),
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=2,
    )


def _show(home: Home, run: str, bars: Progress, shown: dict[str, Any], since: float) -> None:
    """One bar a stage, updated from the progress file; lines of an earlier run are left out."""
    from tasks.progress_file import read_progress

    for stage, line in read_progress(home, run).items():
        if line.updated < since and line.started < since:
            continue
        if stage not in shown:
            shown[stage] = bars.add_task("", stage=stage, total=None)
        total = line.total or None
        done = line.done
        if line.ended:
            total = done = max(1, line.total)
        bars.update(shown[stage], description=line.label[:28], completed=done, total=total)
        if line.ended:
            bars.stop_task(shown[stage])
