"""Which of our long-lived processes run in a home: a pid file with the process's start time, never a bare pid."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from rollout.config import Home


def started(pid: int) -> float:
    """Start time of a process (seconds since the epoch); raises psutil.NoSuchProcess."""
    return float(psutil.Process(pid).create_time())


def alive(pid: int, process_started: float) -> bool:
    """True when `pid` is still the process that started then, and no zombie."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - process_started) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def follow(parent: int) -> None:
    """Ends this process within a second when `parent`, which started it, is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def write_pid_file(path: Path, pid: int = 0, **facts: Any) -> None:
    """Atomically writes pid, start time and `facts` of a process (0: this one), mode 0600."""
    pid = pid or os.getpid()
    body = {"pid": pid, "started": started(pid), **facts}
    part = path.with_suffix(f".{os.getpid()}.part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(body))
    part.replace(path)


def read_pid_file(path: Path) -> dict[str, Any] | None:
    """The facts of the file's process while it lives, else None."""
    try:
        body: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return body if alive(int(body["pid"]), float(body["started"])) else None


def serve_file(home: Home) -> Path:
    return home.run / "serve.json"


def find_serve(home: Home) -> dict[str, Any] | None:
    """pid, started, url of the home's running `serve`, or None."""
    return read_pid_file(serve_file(home))
