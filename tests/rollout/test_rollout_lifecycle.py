"""The one lifecycle through a real `serve`: sandbox, gateway, proxy and verifier, and what happens when they break."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.bundle import write_bundle
from rollout.bundle.spec import BundleSpec
from rollout.client import Plan, RolloutClient, make_rollouts
from rollout.config import open_home
from rollout.errors import ConfigError, FailureClass, InfrastructureError, PhaseTimeout
from rollout.processes import find_serve
from rollout.serve import CONCURRENCY, concurrency_of
from rollout.store import Store, open_store
from rollout.types import Limits, ModelRef, Purpose, Rollout, RolloutState, Sampling, TaskSpec, Timeouts

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

SEED = {"contacts": {"people": [{"id": 47, "name": "Zoë", "replaced_by": 52}, {"id": 52, "name": "Zoë Müller"}]}}
PIN = "python3 -I -S /opt/openforge/tool.py contacts pin_contact '{\"id\": %d}' >/dev/null"
GRADE = """
mkdir -p /logs/verifier
python3 -I -S - <<'PY'
import json
state = json.load(open("/logs/artifacts/services.json"))["services"]["contacts"]
open("/logs/verifier/reward.txt", "w").write("1" if list(state["pinned"]) == [52] else "0")
PY
"""
PLAN = {
    "oracle": [
        {"tool": "get_contact", "arguments": {"id": 47}},
        {"tool": "pin_contact", "arguments": {"id": {"$result": 0, "path": "now"}}},
        {"final": "done"},
    ],
    "shortcut": [{"tool": "pin_contact", "arguments": {"id": 47}}, {"final": "done"}],
    "mistake": [{"final": "done"}],
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home"))
    yield opened
    facts = find_serve(opened.home)
    if facts:
        os.kill(facts["pid"], signal.SIGTERM)
        _until(lambda: find_serve(opened.home) is None, 20)
    opened.close()


def _until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not come true within {seconds} s"
        time.sleep(0.05)


def sandboxes(store: Store) -> list[str]:
    return [path.name for path in store.home.sandboxes.iterdir() if not path.name.startswith(".")]


def a_task(store: Store, name: str = "pin", **changes: Any) -> TaskSpec:
    parts: dict[str, Any] = {
        "id": name,
        "instruction": "Merke Kontakt 47 vor (oder den, der ihn ersetzt). Sag done. 完了",
        "test": GRADE,
        "services": SEED,
        "solve": PIN % 52,
        "wrong": {"asked": PIN % 47},
        "plan": PLAN,
        "timeouts": Timeouts(agent=60.0),
        **changes,
    }
    return write_bundle(BundleSpec(**parts), store.home.tasks / "t" / name)


def ask(store: Store, task: TaskSpec, harness: str, n: int = 1, model: str = "scripted:oracle") -> list[Rollout]:
    plan = Plan(
        run=f"run-{harness.replace(':', '-').replace('/', '-')}",
        purpose=Purpose.RUN,
        model=ModelRef(name=model),
        sampling=Sampling(max_tokens=64),
        limits=Limits(calls=4),
        harness=harness,
    )
    return make_rollouts([task], plan, n)


def run(store: Store, rollouts: list[Rollout], seconds: float = 90) -> list[Rollout]:
    client = RolloutClient(store)
    client.ensure_serve()
    return client.wait(client.submit(rollouts), seconds)


def test_oracle_scores_one_and_leaves_nothing_behind(store: Store, proxy_folder: Path) -> None:
    task = a_task(store)
    model = f"scripted:oracle?student={proxy_folder}&lazy=0&wrong=0"
    ended = run(store, ask(store, task, "react", 3, model))
    assert [(r.state, r.verdict and r.verdict.reward, r.calls) for r in ended] == [(RolloutState.SUCCEEDED, 1.0, 3)] * 3
    for trajectory in RolloutClient(store).trajectories(ended):
        assert [c.index for c in trajectory.calls] == [0, 1, 2]
        assert all(c.prompt_ids and c.completion_ids for c in trajectory.calls)
        first, second = trajectory.calls[:2]
        history = first.prompt_ids + first.completion_ids
        assert second.prompt_ids[: len(history)] == history
    _until(lambda: not sandboxes(store), 10)


def test_solutions_are_graded_by_the_tasks_own_mode(store: Store) -> None:
    task = a_task(store)
    names = ("solution:solve", "solution:wrong/asked", "solution:idle")
    ended = run(store, [r for name in names for r in ask(store, task, name)])
    assert [r.verdict and r.verdict.reward for r in ended] == [1.0, 0.0, 0.0]
    assert all(r.verdict and r.verdict.mode == "fresh" for r in ended)


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("mkdir -p /logs/verifier; echo nan > /logs/verifier/reward.txt", "nan"),
        ("mkdir -p /logs/verifier; echo 1.5 > /logs/verifier/reward.txt", "1.5"),
        ("exit 3", "reward"),
    ],
)
def test_a_broken_verifier_is_a_verifier_failure_never_a_score(store: Store, test: str, words: str) -> None:
    (ended,) = run(store, ask(store, a_task(store, test=test), "solution:solve"))
    assert ended.state is RolloutState.FAILED
    assert ended.verdict is None
    assert ended.failure is not None
    assert ended.failure.kind is FailureClass.VERIFIER
    assert words in ended.failure.message
    assert ended.attempt == 0


def test_a_harness_past_its_deadline_times_out(store: Store) -> None:
    task = a_task(store, solve="trap '' TERM; sleep 600", timeouts=Timeouts(agent=1.0))
    began = time.monotonic()
    (ended,) = run(store, ask(store, task, "solution:solve"))
    assert ended.state is RolloutState.TIMED_OUT
    assert time.monotonic() - began < 30
    _until(lambda: not sandboxes(store), 10)


def test_a_missing_script_fails_at_once_and_is_not_tried_again(store: Store) -> None:
    (ended,) = run(store, ask(store, a_task(store), "solution:wrong/nothing"))
    assert ended.failure is not None
    assert (ended.failure.kind, ended.attempt) == (FailureClass.HARNESS, 0)
    assert "wrong/nothing.sh" in ended.failure.message


def test_cancelling_ends_running_and_queued_rollouts(store: Store) -> None:
    rollouts = ask(store, a_task(store, solve="sleep 600"), "solution:solve", 2)
    client = RolloutClient(store)
    client.ensure_serve()
    ids = client.submit(rollouts)
    _until(lambda: RolloutState.RUNNING in store.rollouts.states(ids).values(), 30)
    assert store.rollouts.cancel(run=rollouts[0].run) == 2
    ended = client.wait(ids, 30)
    assert [r.state for r in ended] == [RolloutState.CANCELLED] * 2
    _until(lambda: not sandboxes(store), 10)


def test_bug_52_rollouts_of_a_killed_serve_are_tried_again_and_its_sandboxes_are_gone(store: Store) -> None:
    task = a_task(store, solve=f"sleep 3; {PIN % 52}")
    client = RolloutClient(store)
    client.ensure_serve()
    ids = client.submit(ask(store, task, "solution:solve", 2))
    _until(lambda: list(store.rollouts.states(ids).values()) == [RolloutState.RUNNING] * 2, 30)
    os.kill(find_serve(store.home)["pid"], signal.SIGKILL)  # type: ignore[index]
    ended = client.wait(ids, 90)
    assert [(r.id, r.verdict and r.verdict.reward) for r in ended] == [(f"{i}.r1", 1.0) for i in ids]
    first = store.rollouts.get(ids[0])
    assert first is not None
    assert first.failure is not None
    assert first.failure.kind is FailureClass.INFRASTRUCTURE
    _until(lambda: not sandboxes(store), 10)


def test_bug_57_waiting_past_the_deadline_names_who_is_missing(store: Store) -> None:
    rollouts = ask(store, a_task(store, solve="sleep 600"), "solution:solve")
    with pytest.raises(PhaseTimeout, match=rollouts[0].id):
        run(store, rollouts, 3.0)


def test_a_second_serve_in_one_home_steps_aside(store: Store) -> None:
    RolloutClient(store).ensure_serve()
    command = [sys.executable, "-m", "rollout.serve", "--home", str(store.home.root)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 0
    assert "already runs" in second.stderr


def test_a_port_in_use_is_named(store: Store, tmp_path: Path) -> None:
    RolloutClient(store).ensure_serve()
    port = find_serve(store.home)["url"].rpartition(":")[2]  # type: ignore[index]
    command = [sys.executable, "-m", "rollout.serve", "--home", str(tmp_path / "other"), "--port", port]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"port {port} is in use" in second.stderr


def test_a_serve_that_breaks_ends_its_rollouts_before_its_store(store: Store) -> None:
    client = RolloutClient(store)
    client.ensure_serve()
    ids = client.submit(ask(store, a_task(store, solve="sleep 600"), "solution:solve"))
    _until(lambda: store.rollouts.states(ids)[ids[0]] is RolloutState.RUNNING, 30)
    query = "INSERT INTO rollouts SELECT 'bad', run, task_id, group_id, start_index, NULL, purpose, model, 'queued', "
    query += "0, NULL, NULL, 0, '', NULL, 0, 0, '{}' FROM rollouts"
    store.databases[0].write(lambda c: c.exec_driver_sql(query))
    _until(lambda: find_serve(store.home) is None, 30)
    first = store.rollouts.get(ids[0])
    assert first
    assert first.failure
    assert (first.state, first.failure.message) == (RolloutState.FAILED, "openforge serve was stopped")
    assert store.rollouts.states(ids) == {ids[0]: RolloutState.QUEUED}
    assert not sandboxes(store)


# -- asking, without a serve ---------------------------------------------------------------------------


def test_an_id_that_stands_for_another_task_or_model_is_refused(store: Store) -> None:
    client = RolloutClient(store)
    (first,) = ask(store, a_task(store), "solution:solve")
    assert client.submit([first]) == client.submit([first]) == [first.id]
    (other,) = ask(store, a_task(store, instruction="Something else."), "solution:solve")
    with pytest.raises(ConfigError, match=rf"another task pin .*{first.task.digest[:12]} then.*choose another --run"):
        client.submit([other])
    (other,) = ask(store, first.task, "solution:solve")
    with pytest.raises(ConfigError, match=r"another model scripted:oracle: digest none then, abc now; choose"):
        client.submit([other.model_copy(update={"model": ModelRef(name=first.model.name, digest="abc")})])


def test_concurrency_comes_from_the_command_line_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENFORGE_CONCURRENCY", raising=False)
    assert concurrency_of(0) == CONCURRENCY
    monkeypatch.setenv("OPENFORGE_CONCURRENCY", "7")
    assert (concurrency_of(0), concurrency_of(3)) == (7, 3)
    for wrong in ("0", "-1", "many", "5000", "2.5"):
        monkeypatch.setenv("OPENFORGE_CONCURRENCY", wrong)
        with pytest.raises(ConfigError, match=f"OPENFORGE_CONCURRENCY is '{wrong}'; give a whole number from 1"):
            concurrency_of(0)
    with pytest.raises(ConfigError, match="--concurrency is '-2'"):
        concurrency_of(-2)


def test_a_serve_that_cannot_start_is_not_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_CONCURRENCY", "many")
    with pytest.raises(InfrastructureError, match=r"ended with 2; see .*serve\.log"):
        RolloutClient(store).ensure_serve()
    assert "OPENFORGE_CONCURRENCY is 'many'" in (store.home.logs / "serve.log").read_text()
