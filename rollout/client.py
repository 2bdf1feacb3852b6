"""How a stage asks for rollouts: enqueue in the store, then wait with a deadline. Nothing here runs a rollout.

A stage that dies leaves its rollouts running; when it starts again it asks with the same ids and finds them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout.errors import ConfigError, InfrastructureError, PhaseTimeout
from rollout.processes import find_serve
from rollout.store import Store
from rollout.types import Limits, ModelRef, Purpose, Rollout, Sampling, TaskSpec, Trajectory

POLL_S = 0.2
SERVE_START_S = 90.0


@dataclass(frozen=True)
class Plan:
    """What the rollouts of one stage run have in common."""

    run: str
    purpose: Purpose
    model: ModelRef
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    harness: str = ""
    """Overrides each task's own harness when set."""
    seed: int = 0


def seed_of(*parts: object) -> int:
    """A stable 31-bit seed of anything printable."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def make_rollouts(tasks: Sequence[TaskSpec], plan: Plan, n: int) -> list[Rollout]:
    """n rollouts of each task, with ids, groups and seeds that depend on nothing but the arguments."""
    return [
        Rollout(
            id=f"{plan.run}-{task.id}-{i}",
            run=plan.run,
            task_id=task.id,
            group_id=f"{plan.run}-{task.id}",
            start_index=i,
            harness=plan.harness or task.harness,
            model=plan.model,
            purpose=plan.purpose,
            sampling=plan.sampling.model_copy(update={"seed": seed_of(plan.seed, task.id, i)}),
            limits=plan.limits,
            task=task,
        )
        for task in tasks
        for i in range(n)
    ]


class RolloutClient:
    def __init__(self, store: Store) -> None:
        self._store = store

    def submit(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Enqueues what is not there yet; returns all ids in order.

        Raises ConfigError when an id stands for a rollout of another task or model: its result would be taken for
        that of these.
        """
        known = self._store.rollouts.latest([r.id for r in rollouts])
        for rollout in rollouts:
            if rollout.id in known:
                _refuse_changed(known[rollout.id], rollout)
        self._store.rollouts.enqueue(rollouts)
        return [r.id for r in rollouts]

    def done(self, ids: Sequence[str]) -> set[str]:
        """Those whose last attempt has ended for good."""
        return {rid for rid, state in self._store.rollouts.states(ids).items() if state.terminal}

    def wait(
        self, ids: Sequence[str], deadline_s: float, progress: Callable[[int, int], None] | None = None
    ) -> list[Rollout]:
        """The last attempt of each id, in order. Raises PhaseTimeout that names who is missing.

        A rollout that ended and is about to be retried is not done: the orchestrator ends an attempt and
        enqueues its retry in one transaction.
        """
        end = time.monotonic() + deadline_s
        while True:
            done = self.done(ids)
            if progress:
                progress(len(done), len(ids))
            if len(done) == len(ids):
                latest = self._store.rollouts.latest(ids)
                return [latest[rid] for rid in ids]
            if time.monotonic() > end:
                missing = [rid for rid in ids if rid not in done]
                names = ", ".join(missing[:8])
                raise PhaseTimeout(f"{len(missing)} of {len(ids)} rollouts did not end in {deadline_s:.0f} s: {names}")
            if not find_serve(self._store.home):
                self.ensure_serve()
            time.sleep(POLL_S)

    def trajectories(self, rollouts: Sequence[Rollout]) -> list[Trajectory]:
        calls = self._store.calls.of_many([r.id for r in rollouts])
        return [Trajectory(rollout=r, calls=tuple(calls.get(r.id, ()))) for r in rollouts]

    def ensure_serve(self) -> None:
        """Starts `openforge serve` in a session of its own if none runs in this home. Raises InfrastructureError."""
        home = self._store.home
        if find_serve(home):
            return
        log = home.logs / "serve.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollout.serve", "--home", str(home.root), "--idle-exit", "600"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "OPENFORGE_HOME": str(home.root)},
            )
        end = time.monotonic() + SERVE_START_S
        while time.monotonic() < end:
            if find_serve(home):
                return
            if process.poll():
                raise InfrastructureError(f"openforge serve ended with {process.returncode}; see {log}")
            time.sleep(0.1)
        raise InfrastructureError(f"openforge serve did not come up within {SERVE_START_S:.0f} s; see {log}")


def _refuse_changed(known: Rollout, asked: Rollout) -> None:
    """Raises ConfigError for another digest of the task or the model under one id."""
    pairs = {
        f"task {asked.task_id} ({asked.task.bundle})": (known.task.digest, asked.task.digest),
        f"model {asked.model.name}": (known.model.digest, asked.model.digest),
    }
    for what, (before, now) in pairs.items():
        if before != now:
            raise ConfigError(
                f"rollout {asked.id} was asked for before with another {what}: digest {before[:12] or 'none'} then, "
                f"{now[:12] or 'none'} now; choose another --run, or restore what it was"
            )
