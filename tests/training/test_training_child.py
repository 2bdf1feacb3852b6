"""The child process of a training stage: events, errors, deadline, kills, and an end together with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pydantic import BaseModel

from rollout.errors import ConfigError, InfrastructureError, PhaseTimeout
from training.child import Event, Job, run_child

CHILD = """
import os, signal, sys, time
from pydantic import BaseModel
from rollout.errors import ConfigError, InfrastructureError
from training.child import child_main

class Spec(BaseModel):
    do: str

def work(spec, events):
    events.progress("pid", os.getpid(), 0)
    if spec.do == "sleep":
        time.sleep(60)
    if spec.do == "config":
        raise ConfigError("no such thing; take another")
    if spec.do == "crash":
        raise RuntimeError("a bug of mine")
    if spec.do == "die once" and not os.path.exists(sys.argv[1] + ".died"):
        open(sys.argv[1] + ".died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    events.progress("done", 1, 1)

child_main(Spec, work)
"""

PARENT = """
import sys
from pathlib import Path
from pydantic import BaseModel
from training.child import Job, run_child

class Spec(BaseModel):
    do: str = "sleep"

folder = Path(sys.argv[1])
job = Job("training_child_program", folder / "work", folder / "log", 60.0)
run_child(job, Spec(), lambda e: print(e.done, flush=True))
"""


class Spec(BaseModel):
    do: str


Run = Callable[[str, float], list[Event]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "training_child_program.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(do: str, deadline_s: float = 60.0) -> list[Event]:
        events: list[Event] = []
        job = Job("training_child_program", tmp_path / "work", tmp_path / "log", deadline_s)
        run_child(job, Spec(do=do), events.append)
        return events

    return start


def test_events_arrive_in_order(run: Run) -> None:
    assert [e.label for e in run("work", 60.0)] == ["pid", "done"]


def test_a_deliberate_error_keeps_its_type_and_words(run: Run) -> None:
    with pytest.raises(ConfigError, match="take another"):
        run("config", 60.0)


def test_a_crash_shows_the_end_of_the_log(run: Run) -> None:
    with pytest.raises(InfrastructureError, match="a bug of mine"):
        run("crash", 60.0)


def test_a_killed_child_is_started_again_once(run: Run) -> None:
    assert [e.label for e in run("die once", 60.0)] == ["pid", "pid", "done"]
    with pytest.raises(InfrastructureError, match="ended with -9"):
        run("die", 60.0)


def test_past_the_deadline_the_child_is_gone(run: Run, tmp_path: Path) -> None:
    with pytest.raises(PhaseTimeout, match="did not end within 6 s"):
        run("sleep", 6.0)
    [line] = (tmp_path / "work" / "events.jsonl").read_text().splitlines()
    assert not psutil.pid_exists(Event.model_validate_json(line).done)


def test_bug_76_a_child_ends_with_its_killed_parent(run: Run, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    end = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.1)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert [e.label for e in run("work", 60.0)] == ["pid", "done"]
