"""Distillation: rejection sampling with counts, a cap that keeps families even, idempotence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_fakes import EOT, Played, PlayedClient, save_policy, succeeded

from rollout.bundle import BundleSpec, write_bundle
from rollout.config import open_home
from rollout.errors import ConfigError, FailureClass
from rollout.store import Store, open_store
from rollout.types import Failure, ModelCall, Provenance, Purpose, Rollout, RolloutState, Split, StageRecord, Verdict
from training.collect import Wait, collect, sort_by_end
from training.config import DistillConfig
from training.dataset import read_manifest, read_rows
from training.distill import balance, distill, teacher_plan


def quiet(_label: str, _done: int, _total: int) -> None:
    return None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home"))
    save_policy(opened.home.models / "tiny")
    yield opened
    opened.close()


@pytest.fixture
def tasks_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    for k in range(6):
        split = Split.SFT if k < 5 else Split.RL
        family = "close" if k < 3 else "mail"
        spec = BundleSpec(
            id=f"task-{k}",
            instruction=f"Do number {k}.",
            test="#!/bin/sh\n",
            split=split,
            provenance=Provenance(family=family),
        )
        folder.mkdir(exist_ok=True)
        write_bundle(spec, folder / spec.id)
    return folder


def play(rollout: Rollout) -> Played:
    """Attempt 0 succeeds, 1 fails the verifier, 2 dies of infrastructure."""
    if rollout.start_index == 2:
        failure = Failure(kind=FailureClass.INFRASTRUCTURE)
        return Played(rollout.model_copy(update={"state": RolloutState.FAILED, "failure": failure}))
    reward = 1.0 if rollout.start_index == 0 else 0.0
    number = int(rollout.task_id[-1])
    call = ModelCall(
        rollout_id=rollout.id, index=0, prompt_ids=(5, 6, 10 + number), completion_ids=(20, EOT), delivered=True
    )
    return Played(succeeded(rollout, verdict=Verdict(reward=reward, passed=reward == 1.0)), (call,))


def run(store: Store, tasks_dir: Path, client: PlayedClient, config: DistillConfig, name: str = "d") -> StageRecord:
    return distill(store, config, run=name, tasks_dir=tasks_dir, student="tiny", progress=quiet, client=client)


def test_only_successes_become_rows_and_the_rest_is_counted(store: Store, tasks_dir: Path) -> None:
    client = PlayedClient(store, play)
    record = run(store, tasks_dir, client, DistillConfig(attempts=3))
    assert (record.kept, record.rollouts) == (5, 15)
    assert record.dropped == {"below_reward": 5, "infrastructure": 5}
    folder = store.home.datasets / "d"
    assert record.details["dataset"] == str(folder)
    rows = read_rows(folder)
    assert sorted(row.token_ids for row in rows) == [(5, 6, 10 + k, 20, EOT) for k in range(5)]
    assert {row.mask for row in rows} == {(False, False, False, True, True)}
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.families == {"close": 3, "mail": 2}
    assert manifest.student.name == "tiny"
    assert manifest.student.digest


def test_asked_again_it_returns_at_once(store: Store, tasks_dir: Path) -> None:
    client = PlayedClient(store, play)
    first = run(store, tasks_dir, client, DistillConfig(attempts=2))
    plays = Counter(client.plays)
    assert run(store, tasks_dir, client, DistillConfig(attempts=2)) == first
    assert client.plays == plays
    assert max(plays.values()) == 1


def test_killed_before_its_record_it_finds_its_rollouts(store: Store, tasks_dir: Path) -> None:
    client = PlayedClient(store, play)
    client.submit([])

    def die(label: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(
            store, DistillConfig(attempts=2), run="d", tasks_dir=tasks_dir, student="tiny", progress=die, client=client
        )
    assert run(store, tasks_dir, client, DistillConfig(attempts=2)).kept == 5
    assert max(client.plays.values()) == 1


def test_the_cap_keeps_families_even(store: Store, tasks_dir: Path) -> None:
    record = run(store, tasks_dir, PlayedClient(store, play), DistillConfig(attempts=1, keep=4))
    manifest = read_manifest(store.home.datasets / "d")
    assert manifest is not None
    assert manifest.families == {"close": 2, "mail": 2}
    assert record.dropped == {"over_cap": 1}


def test_balance_takes_a_first_success_of_each_task_before_a_second(store: Store, tasks_dir: Path) -> None:
    always = PlayedClient(store, lambda r: play(r.model_copy(update={"start_index": 0})))
    run(store, tasks_dir, always, DistillConfig(attempts=3), name="e")
    rollouts = store.rollouts.query(run="e", purpose=Purpose.TEACHER)
    chosen = balance(always.trajectories(always.wait([r.id for r in rollouts], 1.0)), 6)
    close = [t.rollout.task_id for t in chosen if t.rollout.task.provenance.family == "close"]
    assert len(set(close)) == len(close) == 3


def test_bug_57_what_never_ends_is_named_cancelled_and_left_out(store: Store, tasks_dir: Path) -> None:
    client = PlayedClient(store, lambda r: None if r.task_id == "task-1" else play(r))
    record = run(store, tasks_dir, client, DistillConfig(attempts=1, max_seconds=1.0))
    assert record.kept == 4
    assert record.dropped == {"missing": 1}
    assert store.rollouts.to_cancel() == ["d-task-1-0"]


def test_bug_56_the_last_attempt_alone_counts(store: Store, tasks_dir: Path) -> None:
    """A retry's result stands for its root; the first attempt's late result is another rollout's and never read."""

    def retried(rollout: Rollout) -> Played:
        played = play(rollout.model_copy(update={"start_index": 0}))
        retry = played.rollout.model_copy(update={"id": f"{rollout.id}.r1", "retry_of": rollout.id, "attempt": 1})
        return Played(retry, played.calls)

    run(store, tasks_dir, PlayedClient(store, retried), DistillConfig(attempts=1))
    assert all(row.rollout_id.endswith(".r1") for row in read_rows(store.home.datasets / "d"))


def test_bugs_58_and_59_failures_are_counted_by_class_and_give_nothing(store: Store, tasks_dir: Path) -> None:
    ends = {
        "0": {"state": RolloutState.FAILED, "failure": Failure(kind=FailureClass.HARNESS)},
        "1": {"state": RolloutState.TIMED_OUT, "failure": Failure(kind=FailureClass.TIMEOUT)},
        "2": {"state": RolloutState.CANCELLED},
        "3": {"state": RolloutState.FAILED, "failure": Failure(kind=FailureClass.VERIFIER)},
    }
    client = PlayedClient(
        store, lambda r: Played(r.model_copy(update=ends[r.task_id[-1]])) if r.task_id[-1] in ends else play(r)
    )
    record = run(store, tasks_dir, client, DistillConfig(attempts=1))
    assert record.kept == 1
    assert record.dropped == {"harness": 1, "timeout": 1, "cancelled": 1, "verifier": 1}


def test_policy_ends_are_kept_or_dropped_by_name(store: Store, tasks_dir: Path) -> None:
    client = PlayedClient(store, lambda r: Played(succeeded(play(r).rollout, end_reason="call_cap"), play(r).calls))
    run_rollouts = [r for r in _rollouts(store, tasks_dir, client) if r.start_index == 0]
    collected = collect(store, client, run_rollouts, Wait(1.0, "x", quiet))
    assert len(sort_by_end(collected).usable) == 5
    assert sort_by_end(collected, "drop").dropped == {"policy_end": 5}


def _rollouts(store: Store, tasks_dir: Path, client: PlayedClient) -> list[Rollout]:
    with pytest.raises(ConfigError, match="no rows"):
        run(store, tasks_dir, client, DistillConfig(attempts=1), name="p")
    return store.rollouts.query(run="p")


def test_nothing_to_do_and_nothing_kept_say_what_to_do(store: Store, tasks_dir: Path, tmp_path: Path) -> None:
    lone = tmp_path / "lone"
    lone.mkdir()
    write_bundle(BundleSpec(id="x", instruction="Do it.", test="#!/bin/sh\n", split=Split.RL), lone / "x")
    with pytest.raises(ConfigError, match="openforge synth"):
        run(store, lone, PlayedClient(store, play), DistillConfig())
    failing = PlayedClient(store, lambda r: play(r.model_copy(update={"start_index": 1})))
    with pytest.raises(ConfigError, match="no teacher trajectory passed"):
        run(store, tasks_dir, failing, DistillConfig(attempts=1))


def test_a_real_teacher_gets_an_engine_and_is_asked_by_name(
    store: Store, tasks_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = save_policy(store.home.models / "teacher", layers=3)
    served: list[tuple[str, str]] = []
    monkeypatch.setattr("training.distill.ensure_engine", lambda _store, name, path: served.append((name, path)))
    config = DistillConfig(attempts=1, teacher="teacher")
    record = run(store, tasks_dir, PlayedClient(store, play), config)
    assert record.kept == 5
    assert served == [("teacher", str(policy))]
    assert {r.model.name for r in store.rollouts.query(run="d")} == {"teacher"}
    assert run(store, tasks_dir, PlayedClient(store, play), config) == record
    assert len(served) == 1, "what is done needs no engine"


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_a_teacher_that_writes_other_ids_is_refused_before_anything_starts(
    store: Store, tasks_dir: Path, file: str
) -> None:
    other = save_policy(store.home.models / "other") / file
    other.write_text(other.read_text() + " ")
    with pytest.raises(ConfigError, match=r"set distill\.teacher"):
        run(store, tasks_dir, PlayedClient(store, play), DistillConfig(teacher="other"))
    with pytest.raises(ConfigError, match="no model 'nobody'"):
        run(store, tasks_dir, PlayedClient(store, play), DistillConfig(teacher="nobody"))
    assert store.engines.all() == []
    assert store.rollouts.query(run="d") == []


def test_the_scripted_teacher_is_told_the_student_and_its_rates() -> None:
    plan = teacher_plan(DistillConfig(), "d", "smollm2")
    assert plan.model.name == "scripted:oracle?student=smollm2&lazy=0.86&wrong=0.05"
    assert teacher_plan(DistillConfig(teacher="kimi"), "d", "smollm2").model.name == "kimi"
    with pytest.raises(ValueError, match="at most 1"):
        DistillConfig(shortcut_rate=0.8, mistake_rate=0.3)
