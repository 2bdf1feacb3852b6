"""What a stage needs around it: home, store, rollout client, engine, progress; and one of each stage at a time.

A stage that is asked for twice at once runs once: the second waits on a lock file (which the system frees when
its holder dies) and then finds the work done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from rollout.client import RolloutClient
from rollout.config import Home, open_home
from rollout.errors import EngineError, InfrastructureError
from rollout.inference.launch import LEASE_S as STAGE_LEASE_S
from rollout.inference.launch import ensure_engine, stop_engine
from rollout.processes import alive, follow
from rollout.store import Store, open_store
from rollout.types import EngineRecord, ModelRef, RolloutState
from tasks.params import StageParams
from tasks.preset import Preset
from tasks.progress import StageProgress, logger
from training.models import ModelEntry, add_model, resolve_model

BUILTIN = ("smollm2", "smollm2-tiny")
LEASE_S = 600.0
"""An engine that no stage has renewed for so long is stopped by whoever looks for engines next."""
RENEW_S = 60.0
WATCH_S = 3.0
JOIN_S = 30.0
FOLLOW_VARIABLE = "OPENFORGE_FOLLOW"
"""Set where a flow must end with the process that started it: the worker or the command."""
LIVE = tuple(state for state in RolloutState if not state.terminal)
LOCK_S = 24 * 3600.0
"""Longest wait for another process that runs the same stage of the same run."""


@dataclass(frozen=True)
class StageContext:
    params: StageParams
    preset: Preset
    home: Home
    store: Store
    client: RolloutClient
    progress: StageProgress

    @property
    def run(self) -> str:
        return self.params.run_name

    @property
    def tasks_dir(self) -> Path:
        """The task set of the run: the folder given, else what `synth` accepted."""
        return Path(self.params.tasks) if self.params.tasks else self.home.tasks / self.params.task_run

    def model(self, name: str) -> ModelEntry:
        """A model by name or folder; the built-in ones are made when they are missing. Raises ConfigError."""
        self.provide(name)
        return resolve_model(self.home, name)

    def provide(self, name: str) -> None:
        """Makes a built-in model that is missing; does nothing for any other."""
        if name in BUILTIN:
            add_model(self.home, name, progress=self.progress)

    def ref(self, name: str) -> ModelRef:
        return ModelRef(name=name, digest=self.model(name).digest)

    @contextmanager
    def served(self, model: str) -> Iterator[None]:
        """While the block runs, the shared engine of `model`, once it was started, is kept alive and leased.

        One that was not there before keeps only a short lease afterwards, unless a user has leased it for longer.
        """
        stop = threading.Event()
        before = self._engine(model)

        def keep() -> None:
            while not stop.wait(WATCH_S):
                self._keep(model)

        thread = threading.Thread(target=keep, name="engine-keeper", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(JOIN_S)
            after = self._engine(model)
            if before is None and after is not None and after.lease_until <= time.time() + STAGE_LEASE_S:
                self.store.engines.put(after.model_copy(update={"lease_until": time.time() + LEASE_S}))

    def _engine(self, model: str) -> EngineRecord | None:
        return next((e for e in self.store.engines.all() if e.model == model and not e.exclusive), None)

    def _keep(self, model: str) -> None:
        found = self._engine(model)
        if found is None:
            return
        if alive(found.pid, found.process_started) and found.lease_until - time.time() > LEASE_S - RENEW_S:
            return
        try:
            ensure_engine(self.store, model, found.path, lease_s=LEASE_S)
        except EngineError as error:
            logger().error("the engine of %s is gone and did not come back: %s", model, error)

    def make_room(self) -> None:
        """Stops shared engines on a short lease that no live rollout needs: training wants their memory."""
        live = {r.model.name for state in LIVE for r in self.store.rollouts.query(state=state)}
        for engine in self.store.engines.all():
            short = engine.lease_until - time.time() <= LEASE_S
            if short and not engine.exclusive and engine.model not in live:
                stop_engine(self.store, engine.id)


@contextmanager
def stage_context(params: StageParams, stage: str, run: str = "") -> Iterator[StageContext]:
    """Opens everything for one stage and closes it again. Raises ConfigError, InfrastructureError."""
    _follow_starter()
    preset = params.load()
    home = open_home()
    name = run or params.run_name
    with _alone(home, name, stage):
        progress = StageProgress(home, name, stage)
        store = open_store(home)
        try:
            yield StageContext(params, preset, home, store, RolloutClient(store), progress)
            progress.end()
        finally:
            store.close()


@cache
def _follow_starter() -> None:
    """A flow that nobody watches any more ends, and its training child with it: the next one goes on from the store."""
    if os.environ.get(FOLLOW_VARIABLE):
        follow(os.getppid())


def stage_lock(home: Home, run: str, stage: str) -> FileLock:
    """Held by the process that runs this stage of this run."""
    folder = home.run / "stages"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{run}-{stage}.lock")


@contextmanager
def _alone(home: Home, run: str, stage: str) -> Iterator[None]:
    lock = stage_lock(home, run, stage)
    end = time.monotonic() + LOCK_S
    while True:
        try:
            lock.acquire(timeout=5.0)
            break
        except Timeout as error:
            logger().info("%s of %s runs in another process: waiting for it", stage, run)
            if time.monotonic() > end:
                raise InfrastructureError(
                    f"{stage} of {run} has been held by another process for {LOCK_S:.0f} s"
                ) from error
    try:
        yield
    finally:
        lock.release()
