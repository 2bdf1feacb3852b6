"""gc keeps what is needed: what a killed run goes on from, what datasets came from, and everything in a dry run."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from proxy_fakes import a_rollout
from training_fakes import save_policy

from cli.gc import gc
from rollout.blobs import digest_of
from rollout.config import Home, open_home
from rollout.store import Store, open_store
from rollout.types import ModelCall, ModelRef, RolloutState, TrainingSample
from tasks.context import stage_lock
from training.config import TrainerConfig
from training.dataset import Origin, SftRow, write_dataset
from training.models import ENTRY, write_entry
from training.rl_state import LoopState, RunFolder
from training.trainer.reference import ReferenceTrainer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("OPENFORGE_HOME", str(tmp_path))
    return open_home()


def _work(home: Home, name: str, policy: Path) -> RunFolder:
    """The work folder of an RL run that was killed after its fourth step, as the run itself writes it."""
    folder = RunFolder(home.checkpoints / f"{name}.work", name, "default")
    trainer = ReferenceTrainer(policy, TrainerConfig(compute="f32"), temperature=1.0)
    tokens = {"token_ids": (5, 6), "mask": (False, True), "logprobs": (0.0, -3.0), "weight": (0.0, 1.0)}
    sample = TrainingSample(**tokens, advantage=1.0, rollout_id="r", group_id="g")
    for _ in range(4):
        trainer.step([sample])
        folder.export(trainer)
    folder.checkpoint(trainer, LoopState(step=4, best_weights=str(folder.weights(1))))
    return folder


def _left(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.root / "weights").glob("v*"))


@pytest.mark.model
def test_a_killed_run_keeps_what_it_goes_on_from_and_a_finished_one_no_work(home: Home, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    killed, running, finished = (_work(home, f"{name}-rl", policy) for name in ("killed", "running", "finished"))
    write_entry(shutil.copytree(policy, home.checkpoints / "finished-rl"), name="f", renderer="default", source="f")
    part = killed.root / "weights" / ".v0005.4194305.part"
    part.mkdir()
    whole = ["v0001", "v0002", "v0003", "v0004"]
    gc(dry_run=True)
    assert _left(killed) == _left(finished) == whole
    with stage_lock(home, "running", "rl"):
        gc()
    assert _left(killed) == ["v0001", "v0003", "v0004"]
    assert _left(running) == whole
    assert not part.exists()
    assert not finished.root.exists()
    assert (home.checkpoints / "finished-rl" / ENTRY).exists()
    fresh = ReferenceTrainer(policy, TrainerConfig(compute="f32"), temperature=1.0)
    assert killed.resume(fresh) == LoopState(step=4, best_weights=str(killed.weights(1)))
    assert fresh.version == 4


def _recorded(store: Store, run: str, days: float, *blobs: bytes) -> str:
    """A rollout that ended so many days ago, with a call that names these blobs."""
    rollout = a_rollout(
        f"{run}-r", store.home.root, run=run, state=RolloutState.SUCCEEDED, ended=time.time() - days * 86400, calls=1
    )
    store.rollouts.enqueue([rollout])
    request, response = (store.blobs.put(blob) for blob in blobs)
    call = ModelCall(rollout_id=rollout.id, index=0, request=request, response=response, prompt_ids=(1,))
    asyncio.run(store.calls.append(call))
    return rollout.id


def test_old_calls_go_unless_a_dataset_a_killed_stage_or_a_running_one_needs_them(home: Home) -> None:
    store = open_store(home)
    ids = {name: _recorded(store, name, 9, b"shared", name.encode()) for name in ("gone", "taught", "cut", "busy")}
    ids["young"] = _recorded(store, "young", 1, b"shared", b"young")
    row = SftRow(token_ids=(1, 2), mask=(False, True), rollout_id=ids["taught"], task_id="t")
    write_dataset(home.datasets / "taught", [row], Origin("taught", ModelRef(name="m"), Counter()))
    (home.checkpoints / "cut.work").mkdir(parents=True)
    with stage_lock(home, "busy", "eval"):
        gc(older_than=5, dry_run=True)
        assert len(store.calls.of_many(ids.values())) == 5
        gc(older_than=5)
    assert set(store.calls.of_many(ids.values())) == {ids[n] for n in ("taught", "cut", "busy", "young")}
    assert store.blobs.get(digest_of(b"shared")) == b"shared"
    assert store.blobs.size(digest_of(b"gone")) == 0
    assert store.rollouts.get(ids["gone"]) is not None
    store.close()


def test_sandboxes_go_only_without_serve_and_logs_only_when_old(home: Home) -> None:
    (home.sandboxes / "left").mkdir(parents=True)
    old, new = home.logs / "old.log", home.logs / "new.log"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (time.time() - 30 * 86400,) * 2)
    gc()
    assert not (home.sandboxes / "left").exists()
    assert not old.exists()
    assert new.exists()


def test_records_stay(home: Home) -> None:
    open_store(home).close()
    before = sorted(p.name for p in home.root.glob("*.db"))
    gc()
    assert sorted(p.name for p in home.root.glob("*.db")) == before
