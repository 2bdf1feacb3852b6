"""A stage's surroundings: one at a time, engines of nobody make room, a cancelled flow's own engine ends."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.__main__ import NAMES
from rollout.client import Plan, make_rollouts
from rollout.config import Home, open_home
from rollout.errors import ConfigError
from rollout.processes import alive, started
from rollout.store import Store, open_store
from rollout.types import EngineRecord, ModelRef, Purpose, StageRecord, TaskSpec
from tasks.checkpoints import checkpoint_of, required
from tasks.context import LEASE_S, stage_context, stage_lock
from tasks.hooks import release
from tasks.params import StageParams

PARAMS = StageParams(preset="smoke")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("OPENFORGE_HOME", str(tmp_path))
    return open_home()


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    opened = open_store(home)
    yield opened
    opened.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait(10)


def _engine(child: subprocess.Popen[bytes], *, lease_s: float = 60.0, exclusive: str = "") -> EngineRecord:
    return EngineRecord(
        id="engine",
        model="m",
        path="/nowhere",
        url="http://127.0.0.1:9",
        pid=child.pid,
        process_started=started(child.pid),
        exclusive=exclusive,
        lease_until=time.time() + lease_s,
    )


def _wait_gone(child: subprocess.Popen[bytes]) -> None:
    child.wait(15)
    assert not alive(child.pid, 0.0)


def test_the_same_stage_runs_once_at_a_time(home: Home) -> None:
    order: list[str] = []

    def second() -> None:
        with stage_context(PARAMS, "trial"):
            order.append("second in")

    with stage_context(PARAMS, "trial"):
        thread = threading.Thread(target=second)
        thread.start()
        with stage_context(PARAMS, "refine"):
            time.sleep(0.5)
        order.append("first out")
    thread.join(30)
    assert order == ["first out", "second in"]


def test_engines_that_nobody_needs_make_room(store: Store, sleeper: subprocess.Popen[bytes]) -> None:
    store.engines.put(_engine(sleeper))
    with stage_context(PARAMS, "sft") as ctx:
        ctx.make_room()
    assert store.engines.all() == []
    _wait_gone(sleeper)


@pytest.mark.parametrize("kept_by", ["rollout", "lease", "exclusive"])
def test_engines_that_somebody_needs_stay(store: Store, sleeper: subprocess.Popen[bytes], kept_by: str) -> None:
    long = LEASE_S * 10 if kept_by == "lease" else 60.0
    store.engines.put(_engine(sleeper, lease_s=long, exclusive="demo-rl" if kept_by == "exclusive" else ""))
    if kept_by == "rollout":
        task = TaskSpec(id="t", instruction="x", bundle="/nowhere", digest="d")
        plan = Plan(run="r", purpose=Purpose.EVAL, model=ModelRef(name="m"))
        store.rollouts.enqueue(make_rollouts([task], plan, 1))
    with stage_context(PARAMS, "sft") as ctx:
        ctx.make_room()
    assert sleeper.poll() is None
    assert len(store.engines.all()) == 1


@pytest.mark.parametrize(
    ("exclusive", "gone"),
    [("smoke-rl", True), ("smoke", False), ("smoke-x-rl", False), ("smoke2-rl", False), ("", False)],
)
def test_a_cancelled_flow_ends_its_own_engine_only(
    store: Store, sleeper: subprocess.Popen[bytes], exclusive: str, gone: bool
) -> None:
    store.engines.put(_engine(sleeper, exclusive=exclusive))
    release(flow=None, flow_run=SimpleNamespace(parameters={"params": {"preset": "smoke"}}), state=None)
    assert (store.engines.all() == []) is gone
    if gone:
        _wait_gone(sleeper)
    else:
        assert sleeper.poll() is None


def test_the_engine_of_another_flow_in_the_same_stage_stays(store: Store, sleeper: subprocess.Popen[bytes]) -> None:
    store.engines.put(_engine(sleeper, exclusive="smoke-rl"))
    with stage_lock(store.home, "smoke", "rl"):
        release(flow=None, flow_run=SimpleNamespace(parameters={"params": PARAMS}), state=None)
    assert sleeper.poll() is None
    assert len(store.engines.all()) == 1


def test_only_flows_that_train_with_rl_end_an_engine() -> None:
    """A cancelled `eval/claw` leaves the engine of a running `rl/claw` alone."""
    hooked = {}
    for name in NAMES:
        flow = getattr(importlib.import_module(f"flows.{name}"), name)
        hooks = (flow.on_cancellation_hooks, flow.on_crashed_hooks, flow.on_failure_hooks)
        hooked[name] = [[hook.__name__ for hook in some] for some in hooks]
    ends = [["release"]] * 3
    assert {name for name, hooks in hooked.items() if hooks == ends} == {"rl", "pipeline"}
    assert [hooks for hooks in hooked.values() if hooks != ends] == [[[], [], []]] * (len(NAMES) - 2)


@pytest.mark.parametrize(("hours", "shortened"), [(4, True), (12, False)])
def test_a_stage_shortens_the_lease_of_its_own_engine_only(
    store: Store, sleeper: subprocess.Popen[bytes], hours: float, shortened: bool
) -> None:
    with stage_context(PARAMS, "trial") as ctx, ctx.served("m"):
        store.engines.put(_engine(sleeper, lease_s=hours * 3600))
    (left,) = [e.lease_until - time.time() for e in store.engines.all()]
    assert (left <= LEASE_S) is shortened


def test_a_checkpoint_is_what_the_record_says_and_the_disk_has(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "demo-sft"
    record = StageRecord(run="demo-sft", stage="sft", details={"checkpoint": str(folder)})
    store.records.put(record, run="demo-sft", key="sft")
    assert checkpoint_of(store, "demo", "sft") == ""
    folder.mkdir(parents=True)
    assert required(store, "demo", "sft") == str(folder)
    with pytest.raises(ConfigError, match="openforge rl"):
        required(store, "demo", "rl")
