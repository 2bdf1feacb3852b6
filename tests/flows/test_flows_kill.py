"""kill -9 of flow process, worker, serve and engine, each at a random recorded call of the pipeline.

What was killed is started again; afterwards the tables equal those of a run that nobody disturbed: no accepted
task, finished rollout or delivered call is lost or done twice.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from rollout.config import open_home
from rollout.store import open_store

if TYPE_CHECKING:
    from conftest import Up

VICTIMS = ("flow", "serve", "engine", "worker")
ENDED = ("COMPLETED", "FAILED", "CRASHED")
SEED = random.SystemRandom().randrange(10**6)

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.kill,
    pytest.mark.sandbox,
    pytest.mark.model,
    pytest.mark.timeout(900),
]


def victim_pids(up: Up, name: str) -> list[int]:
    if name == "engine":
        store = open_store(open_home(up.home))
        try:
            return [e.pid for e in store.engines.all() if psutil.pid_exists(e.pid)]
        finally:
            store.close()
    if name == "serve":
        return [int(up.facts("serve")["pid"])]
    worker = int(up.facts("up")["children"]["worker"]["pid"])
    if name == "worker":
        return [worker]
    return [p.pid for p in psutil.Process(worker).children(recursive=True) if "prefect.engine" in " ".join(p.cmdline())]


def kill_at(up: Up, name: str, calls: int, run_id: str) -> bool:
    """Kills the victim once `calls` calls are recorded; False if the run ended before."""
    while up.recorded_calls() < calls:
        if up.state(run_id) in ENDED:
            return False
        time.sleep(0.05)
    pids: list[int] = up.until(lambda: victim_pids(up, name), 120)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def test_a_pipeline_that_is_killed_everywhere_ends_like_one_that_is_not(up: Up, second_up: Up) -> None:
    undisturbed = up.start("pipeline/claw")
    assert up.ended(undisturbed, 400) == "COMPLETED"
    total = up.recorded_calls()
    chance = random.Random(SEED)
    marks = sorted(chance.sample(range(5, max(10, int(total * 0.7))), len(VICTIMS)))
    order = chance.sample(VICTIMS, len(VICTIMS))
    told = f"seed {SEED}: {list(zip(order, marks, strict=True))}"

    run_id = second_up.start("pipeline/claw")
    for name, mark in zip(order, marks, strict=True):
        assert kill_at(second_up, name, mark, run_id), told
        if name in ("flow", "worker"):
            time.sleep(3.0)
            run_id = second_up.start("pipeline/claw")
    assert second_up.ended(run_id, 500) == "COMPLETED", told
    assert second_up.tables() == up.tables(), told
    assert second_up.damage() == [], told
