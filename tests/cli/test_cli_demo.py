"""What the demo records of itself: seconds of all its lives, and `done` only once it is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli import demo
from cli.memory import PeakMemory
from cli.prefect_server import end_orphan, find_server, server_file
from rollout.config import CODE_ROOT, Home, open_home
from rollout.processes import alive, started, write_pid_file

KILLED = """
import sys, time
from cli import demo
from cli.memory import PeakMemory
from rollout.config import open_home
from rollout.types import StageRecord
demo.SAVE_S = 0.2
home = open_home(sys.argv[1])
earlier = demo._stage(home, "demo", demo.DEMO) or StageRecord(run="demo", stage=demo.DEMO)
spent = demo._Spent(home, earlier, PeakMemory(home, 9.0))
while True:
    spent.tick()
    time.sleep(0.05)
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = open_home(tmp_path)
    home.reports.mkdir()
    (home.reports / "demo.html").write_text("the report of an earlier stage")
    return home


def _seconds(home: Home) -> float:
    record = demo._stage(home, "demo", demo.DEMO)
    return record.seconds if record else 0.0


def _live_and_die(home: Home, until: float) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(home.root)], cwd=CODE_ROOT)
    end = time.monotonic() + 60
    while _seconds(home) < until and time.monotonic() < end:
        time.sleep(0.05)
    child.kill()
    child.wait(10)


def test_seconds_add_up_over_lives_and_a_killed_demo_is_not_done(home: Home) -> None:
    _live_and_die(home, 0.5)
    first = _seconds(home)
    assert first >= 0.5
    assert demo._record(home, "demo") is None
    _live_and_die(home, first + 0.5)
    second = _seconds(home)
    assert second >= first + 0.5
    assert demo._record(home, "demo") is None

    earlier = demo._stage(home, "demo", demo.DEMO)
    assert earlier is not None
    done = demo._Spent(home, earlier, PeakMemory(home, 5.0)).save(kept=1)
    assert demo._record(home, "demo") == done
    assert done.seconds >= second
    assert done.details == {"peak_rss_mib": 9.0}


def test_the_server_of_a_killed_command_is_ended_and_no_other(home: Home) -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    facts = {"pid": server.pid, "started": started(server.pid), "url": "http://127.0.0.1:1"}
    own, gone = (
        {"owner_pid": server.pid, "owner_started": started(server.pid)},
        {"owner_pid": server.pid, "owner_started": 1.0},
    )
    try:
        for owner, owned in (("demo", own), ("up", gone)):
            write_pid_file(server_file(home), **facts, owner=owner, **owned)
            end_orphan(home)
            assert find_server(home)
        write_pid_file(server_file(home), **facts, owner="demo", **gone)
        end_orphan(home)
        assert find_server(home) is None
        assert not alive(server.pid, facts["started"])
    finally:
        server.kill()
        server.wait(10)
