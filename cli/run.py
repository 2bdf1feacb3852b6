"""`openforge run TASK_DIR --harness H --model M`: one rollout, live, then its trajectory."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from cli.models import model_folder
from cli.tasks import find_task
from cli.trajectory import call_line, print_trajectory
from rollout.config import load_preset, open_home

if TYPE_CHECKING:
    from rollout.store import Store
    from rollout.types import ModelRef, Rollout

console = Console(highlight=False)
POLL_S = 0.3
SCRIPTED = "scripted:"
ORACLE = "scripted:oracle"


def run(task: str, /, *, harness: str = "react", model: str = "smollm2", preset: str = "demo", seed: int = 0) -> int:
    """Runs one task once and prints its trajectory; exit code 1 unless it passed its verifier.

    Parameters
    ----------
    task
        A task bundle's folder, or a task id of the home.
    harness
        The program that wraps the model.
    model
        A name of `openforge models list`, a checkpoint folder, or `scripted:oracle`.
    preset
        Sampling and limits are its section [rollout].
    seed
        Of the sampling.
    """
    from rollout.bundle import load_task
    from rollout.client import Plan, RolloutClient, make_rollouts
    from rollout.harness import make_harness
    from rollout.store import open_store
    from rollout.types import Purpose
    from tasks.preset import Preset

    chosen = load_preset(Preset, preset)
    settings = chosen.rollout
    make_harness(harness)
    spec = load_task(find_task(task))
    home = open_home()
    store = open_store(home)
    try:
        plan = Plan(
            run=f"run-{secrets.token_hex(4)}",
            purpose=Purpose.RUN,
            model=_model(store, model, chosen.model.name),
            sampling=settings.sampling,
            limits=settings.limits,
            harness=harness,
            seed=seed,
        )
        client = RolloutClient(store)
        client.ensure_serve()
        ids = client.submit(make_rollouts([spec], plan, 1))
        console.print(f"rollout {ids[0]}")
        follow = _Follow(store, ids[0])
        ended = client.wait(ids, settings.deadline_s, lambda *_: follow())[0]
        follow()
        print_trajectory(console, client.trajectories([ended])[0])
        return 0 if ended.verdict and ended.verdict.passed else 1
    finally:
        store.close()


class _Follow:
    """Prints each state and each call of a rollout once, as they come."""

    def __init__(self, store: Store, rollout_id: str) -> None:
        self._store, self._id = store, rollout_id
        self._state: Any = None
        self._calls = 0
        self._at = 0.0

    def __call__(self) -> None:
        if time.monotonic() - self._at < POLL_S:
            return
        self._at = time.monotonic()
        rollout: Rollout | None = self._store.rollouts.latest([self._id]).get(self._id)
        if rollout is None:
            return
        if rollout.state != self._state:
            self._state = rollout.state
            console.print(f"[dim]{rollout.state}[/dim]")
        calls = self._store.calls.of(rollout.id)
        for call in calls[self._calls :]:
            console.print(f"[dim]{escape(call_line(call))}[/dim]")
        self._calls = max(self._calls, len(calls))


def _model(store: Store, name: str, student: str) -> ModelRef:
    """The model's reference, with an engine serving it; a scripted one speaks with the student's tokens."""
    from rollout.inference.launch import ensure_engine
    from rollout.inference.scripted import read_scripted
    from rollout.types import ModelRef
    from training.models import resolve_model

    if name == ORACLE:
        return ModelRef(name=f"{name}?student={resolve_model(store.home, student).name}")
    if name.startswith(SCRIPTED):
        read_scripted(name)
        return ModelRef(name=name)
    console.print(f"engine for {name}")
    ensure_engine(store, name, str(model_folder(store.home, name)))
    return ModelRef(name=name, digest=resolve_model(store.home, name).digest)
