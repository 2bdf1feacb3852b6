"""Processes are ended by pid and start time, and memory is that of the whole tree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from cli import terminate
from cli.memory import PeakMemory, resident_mib
from rollout.config import open_home
from rollout.processes import alive, started

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"


def _start(code: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    return child


def test_end_is_polite_then_forceful_and_takes_the_family() -> None:
    child = _start(PARENT)
    family = terminate.descendants(child.pid)
    assert len(family) == 1
    facts = {"pid": child.pid, "started": started(child.pid)}
    assert terminate.end(facts, grace_s=0.5)
    child.wait(10)
    for process in family:
        assert not alive(process.pid, process.create_time())
    assert child.stdout is not None
    child.stdout.close()


def test_a_recycled_pid_is_left_alone() -> None:
    child = _start(STUBBORN)
    try:
        assert not terminate.end({"pid": child.pid, "started": started(child.pid) - 100.0}, grace_s=0.1)
        assert child.poll() is None
        assert not terminate.end(None)
    finally:
        child.kill()
        child.wait(10)
        assert child.stdout is not None
        child.stdout.close()


def test_peak_memory_counts_children(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    before = resident_mib(home)
    code = "x = bytearray(120 * 2**20); print('up', flush=True); import time; time.sleep(60)"
    with PeakMemory(home) as peak:
        child = _start(code)
        time.sleep(2.5)
        child.kill()
        child.wait(10)
    assert child.stdout is not None
    child.stdout.close()
    assert peak.mib > before + 100
    assert os.getpid() != child.pid
