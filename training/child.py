"""Training in a child process: the parent starts it, streams its events and holds it to a deadline.

Torch keeps a process too busy for a flow's heartbeat, so a stage trains in `python -m training.<x>_process SPEC`.
The child writes one JSON event a line; the parent tails that file. The child ends within a second when its parent
is gone, and a file lock keeps two children of one run from training beside each other. Its threads sleep at
barriers instead of spinning: where other processes want the cores too, a spinning step took three times as long.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel

from rollout.errors import ConfigError, InfrastructureError, OpenForgeError, PhaseTimeout
from rollout.processes import follow
from rollout.types import Record, StepRecord

POLL_S = 0.2
STOP_S = 10.0
LOCK_S = 60.0
PARENT_VARIABLE = "OPENFORGE_PARENT_PID"

S = TypeVar("S", bound=BaseModel)


class Event(Record):
    """One line of the child's event file."""

    kind: Literal["progress", "step", "failed"]
    label: str = ""
    done: int = 0
    total: int = 0
    step: StepRecord | None = None
    error: Literal["", "config", "stage"] = ""
    message: str = ""


@dataclass(frozen=True)
class Job:
    """A child to run."""

    module: str
    folder: Path
    """Work folder of the run: `spec.json`, `events.jsonl`, `lock`."""
    log: Path
    """Gets the child's stdout and stderr."""
    deadline_s: float
    starts: int = 2
    """A child that a signal killed is started again until this many starts; it resumes or begins anew."""

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"


def run_child(job: Job, spec: BaseModel, listen: Callable[[Event], None]) -> None:
    """Runs the job to its end. Raises ConfigError or InfrastructureError as the child reported, or PhaseTimeout."""
    job.folder.mkdir(parents=True, exist_ok=True)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.spec.write_text(spec.model_dump_json(indent=2))
    end = time.monotonic() + job.deadline_s
    for start in range(job.starts):
        failed = _watch(job, listen, end)
        if failed is None:
            return
        if failed >= 0 or start + 1 == job.starts:
            raise InfrastructureError(f"{job.module} ended with {failed}; the end of {job.log}:\n{_tail(job.log)}")


def _watch(job: Job, listen: Callable[[Event], None], end: float) -> int | None:
    """One child from start to end; its exit status, or None for success."""
    job.events.write_bytes(b"")
    with job.log.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", job.module, str(job.spec)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
    tail = EventTail(job.events)
    try:
        while child.poll() is None:
            _pass_on(tail, listen)
            if time.monotonic() > end:
                raise PhaseTimeout(f"{job.module} did not end within {job.deadline_s:.0f} s; see {job.log}")
            time.sleep(POLL_S)
        _pass_on(tail, listen)
        return child.returncode or None
    finally:
        _end(child)


def _pass_on(tail: EventTail, listen: Callable[[Event], None]) -> None:
    for event in tail.read():
        if event.kind == "failed":
            raise (ConfigError if event.error == "config" else InfrastructureError)(event.message)
        listen(event)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(STOP_S)


class EventTail:
    """Reads whole lines that were appended since the last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[Event]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            body = file.read()
        whole = body[: body.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [Event.model_validate_json(line) for line in whole.splitlines()]


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


# -- inside the child ----------------------------------------------------------------------------------


class Events:
    """The child's end of the event file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, event: Event) -> None:
        with self._path.open("a") as file:
            file.write(event.model_dump_json() + "\n")

    def progress(self, label: str, done: int, total: int) -> None:
        self.send(Event(kind="progress", label=label, done=done, total=total))

    def step(self, record: StepRecord) -> None:
        self.send(Event(kind="step", step=record))


def child_main(spec_type: type[S], work: Callable[[S, Events], None]) -> None:
    """Reads the spec named on the command line and works on it; a deliberate error becomes the last event."""
    spec_file = Path(sys.argv[1])
    spec = spec_type.model_validate_json(spec_file.read_text())
    events = Events(spec_file.with_name("events.jsonl"))
    follow(int(os.environ.get(PARENT_VARIABLE) or os.getppid()))
    try:
        with run_lock(spec_file.with_name("lock")):
            work(spec, events)
    except OpenForgeError as error:
        kind: Literal["config", "stage"] = "config" if isinstance(error, ConfigError) else "stage"
        events.send(Event(kind="failed", error=kind, message=str(error)))
        raise SystemExit(1) from error


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Held by the one child that works in this folder. Raises InfrastructureError when another keeps it."""
    with path.open("w") as file:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise InfrastructureError(
                        f"another process trains in {path.parent}; wait for it or end it"
                    ) from error
                time.sleep(POLL_S)
        yield
