"""Killed, cancelled and lost: rows 74, 75, 76, 78, 79 of the known faults of systems of this kind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Up


def long_run(name: str, seed: int) -> dict[str, Any]:
    """Parameters of a synthesis that takes about twenty seconds."""
    overrides = {"synth.counts.rl": 16, "synth.counts.validation": 12, "synth.seed": seed}
    return {"params": {"preset": "smoke", "run": name, "overrides": overrides}}


LONG = long_run("long", seed=5)
pytestmark = [
    pytest.mark.prefect,
    pytest.mark.kill,
    pytest.mark.sandbox,
    pytest.mark.model,
    pytest.mark.timeout(600),
]


def flow_processes(up: Up) -> list[psutil.Process]:
    """Processes below the worker that run a flow."""
    worker = up.facts("up")["children"]["worker"]["pid"]
    return [p for p in psutil.Process(worker).children(recursive=True) if "prefect.engine" in _line(p)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _children(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [child for p in processes for child in p.children(recursive=True)]


@pytest.fixture
def running(up: Up) -> Iterator[str]:
    """A run of synth that is in the middle of its trial."""
    run_id = up.start("synth/claw", LONG)
    up.until(lambda: up.state(run_id) == "RUNNING")
    yield run_id
    up.ended(run_id, 200)


def kill_worker(up: Up, *also: int) -> None:
    """kill -9; returns when the next worker runs."""
    worker = up.facts("up")["children"]["worker"]["pid"]
    for pid in (worker, *also):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    up.until(lambda: up.facts("up")["children"].get("worker", {}).get("pid") not in (None, worker), 120)


def test_bug_74_79_a_killed_flow_is_marked_crashed_and_a_new_run_goes_on(up: Up) -> None:
    """Rows 74 and 79: flow and worker are killed. A new run completes what the killed one began; the killed one, which
    had sent a heartbeat, does not stay Running."""
    body = long_run("killed", seed=6)
    run_id = up.start("synth/claw", body)
    up.until(lambda: up.state(run_id) == "RUNNING")
    own = up.until(lambda: flow_processes(up))
    time.sleep(5.0)
    kill_worker(up, *(p.pid for p in own))
    assert up.ended(up.start("synth/claw", body), 300) == "COMPLETED"
    assert up.damage() == []
    assert up.ended(run_id, 180) == "CRASHED"


def test_bug_76_nothing_trains_on_below_a_killed_worker_and_the_next_one_goes_on(up: Up) -> None:
    """Row 76: the worker alone is killed; its flow and the training child end with it."""
    assert up.ended(up.start("synth/claw"), 300) == "COMPLETED"
    tasks, overrides = str(up.home / "tasks" / "smoke"), {"sft.max_steps": 60}
    body = {"params": {"preset": "smoke", "run": "trained", "tasks": tasks, "overrides": overrides}}
    up.start("sft/claw", body)
    training = up.until(lambda: [c for c in _children(flow_processes(up)) if "training.sft_process" in _line(c)], 180)
    own = [*flow_processes(up), *training]
    kill_worker(up)
    up.until(lambda: not any(p.is_running() for p in own), 60)
    assert up.ended(up.start("sft/claw", body), 300) == "COMPLETED"
    assert len(up.sql("rollouts.db", "select 1 from records where kind = 'StageRecord' and run = 'trained-sft'")) == 1
    assert up.damage() == []


def test_bug_76_a_cancelled_flow_leaves_nothing_of_its_own_and_serve_goes_on(up: Up, running: str) -> None:
    """Row 76."""
    own = up.until(lambda: flow_processes(up))
    serve = up.facts("serve")["pid"]
    assert up.prefect("flow-run", "cancel", running).returncode == 0
    assert up.ended(running, 90) == "CANCELLED"
    up.until(lambda: not any(p.is_running() for p in own), 60)
    assert not [c for c in _children([psutil.Process(os.getpid())]) if "training." in _line(c)]
    assert up.facts("serve")["pid"] == serve
    assert psutil.pid_exists(serve)
    again = up.start("synth/claw", LONG)
    assert up.ended(again, 300) == "COMPLETED"


def test_bug_78_79_killed_serve_and_server_are_started_again_and_a_run_completes(up: Up) -> None:
    """Rows 78 and 79: our store decides what is done, so that a restart repeats nothing."""
    facts = up.facts("up")["children"]
    for name in ("serve", "server"):
        os.kill(facts[name]["pid"], signal.SIGKILL)
    up.until(lambda: {n: up.facts("up")["children"].get(n, {}).get("pid") for n in ("serve", "server")}, 60)

    def back() -> bool:
        now = up.facts("up")["children"]
        return all(now.get(n, {}).get("pid") not in (None, facts[n]["pid"]) for n in ("serve", "server"))

    up.until(back, 120)
    up.until(lambda: "healthy" in up.openforge("status").stdout, 120)
    assert up.ended(up.start("propose/claw"), 240) == "COMPLETED"


def test_bug_75_many_task_runs_at_once_lose_nothing(up: Up) -> None:
    """Row 75: items are rollouts in our store, not Prefect tasks; four stages at once lock nothing."""
    runs = [up.start("prune/claw") for _ in range(4)]
    assert {up.ended(run, 240) for run in runs} == {"COMPLETED"}
