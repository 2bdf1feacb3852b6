"""Ends processes that this program started: politely, then by force, always by pid and start time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from rollout.processes import alive

KILL_S = 10.0
"""Longest wait for the kernel to end what was killed."""


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end(facts: Mapping[str, Any] | None, grace_s: float = 15.0) -> bool:
    """SIGTERM to the process of a pid file, SIGKILL to it and what it left behind after `grace_s`.

    Returns False when it was gone already.
    """
    if not facts or not alive(int(facts["pid"]), float(facts["started"])):
        return False
    pid = int(facts["pid"])
    family = descendants(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    _await_end(pid, float(facts["started"]), grace_s)
    _kill_rest(pid, float(facts["started"]), family)
    return True


def _await_end(pid: int, process_started: float, grace_s: float) -> None:
    limit = time.monotonic() + grace_s
    while alive(pid, process_started) and time.monotonic() < limit:
        time.sleep(0.1)


def _kill_rest(pid: int, process_started: float, family: Sequence[psutil.Process]) -> None:
    if alive(pid, process_started):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILL_S)
