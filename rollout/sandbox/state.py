"""The state directory of a local sandbox, and how one of a dead owner is found again.

    <home>/sandboxes/<name>/
        state.json    owner and runner: pid + start time; the cgroups of its commands
        runner.json   where the runner connects, and its key (0600)
        runner.log    what the runner had to say
        dev/          device nodes, where root starts it
        root/         workspace logs tests solution harness: the writable directories

A pid alone is never trusted: it is killed only when its start time is the recorded one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import psutil
from pydantic import ValidationError

from rollout.config import Home
from rollout.errors import SandboxError
from rollout.processes import alive, started
from rollout.sandbox.tree import remove
from rollout.types import Record

log = logging.getLogger(__name__)
DIE_S = 10.0
HALF_MADE_S = 60.0
"""A directory without a readable state.json is taken for a crash's once it is this old."""


class Process(Record):
    pid: int
    started: float
    """Seconds since the epoch."""


class State(Record):
    owner: Process
    runner: Process
    groups: tuple[str, ...]


def folder_of(home: Home, sandbox_id: str) -> Path:
    """State directory of a sandbox; an id that is no file name gets one with a digest."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", sandbox_id):
        return home.sandboxes / sandbox_id
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", sandbox_id)[:160]
    return home.sandboxes / f"x{plain}-{sha256(sandbox_id.encode()).hexdigest()[:12]}"


def write_state(folder: Path, runner_pid: int, groups: tuple[str, ...]) -> None:
    """Raises OSError, psutil.NoSuchProcess when the runner is gone already."""
    state = State(
        owner=Process(pid=os.getpid(), started=started(os.getpid())),
        runner=Process(pid=runner_pid, started=started(runner_pid)),
        groups=groups,
    )
    part = folder / "state.part"
    part.write_text(state.model_dump_json())
    part.replace(folder / "state.json")


def reap(home: Home) -> list[str]:
    """Kills and removes the sandboxes of dead owners; returns their names. Called when a server starts.

    What cannot be removed is logged and left.
    """
    gone = []
    folders = sorted(p for p in home.sandboxes.glob("*") if p.is_dir() and not p.name.startswith("."))
    for folder in folders:
        try:
            if _reap_one(folder):
                gone.append(folder.name)
        except (SandboxError, OSError, psutil.Error, subprocess.SubprocessError) as error:
            log.warning("the left-over sandbox %s could not be removed: %s", folder, error)
    return gone


def _reap_one(folder: Path) -> bool:
    """Whether it was a dead owner's, and is gone now."""
    try:
        state = State.model_validate_json((folder / "state.json").read_text())
    except (OSError, ValidationError):
        if time.time() - folder.stat().st_mtime <= HALF_MADE_S:
            return False
    else:
        if alive(state.owner.pid, state.owner.started):
            return False
        _end(state.runner)
        remove_groups(state.groups)
    remove(folder)
    return True


def _end(process: Process) -> None:
    """Kills a runner and waits until it is gone: its sandbox dies with it."""
    end = time.monotonic() + DIE_S
    while alive(process.pid, process.started) and time.monotonic() < end:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)


def remove_groups(groups: tuple[str, ...]) -> None:
    """Kills what is left in a dead runner's cgroups and removes them."""
    for group in groups:
        path = Path(group)
        end = time.monotonic() + DIE_S
        while path.exists() and time.monotonic() < end:
            with suppress(OSError):
                for pid in (path / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.05)


def read_log(folder: Path) -> str:
    """The runner's last words."""
    try:
        return (folder / "runner.log").read_text(errors="replace").strip()[-500:]
    except OSError:
        return ""


def write_config(folder: Path, *, socket: Path, sandbox_id: str, key: str) -> Path:
    """The runner's config, readable by its user alone. Raises OSError."""
    path = folder / "runner.json"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump({"socket": str(socket), "id": sandbox_id, "key": key}, file)
    return path
