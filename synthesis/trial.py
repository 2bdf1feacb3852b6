"""Trial (the paper's Test stage): an open model attempts each built task once in the real harness and sandbox.

Its reward rejects nothing: a hard task is no broken one. A trial that ends in an infrastructure, harness or
verifier failure rejects the task. SFT tasks take no trial.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollout.bundle import load_task
from rollout.client import Plan, make_rollouts
from rollout.config import Home
from rollout.errors import ConfigError, FailureClass
from rollout.store import Store
from rollout.types import ModelRef, Purpose, StageRecord, TaskSpec
from synthesis.config import SynthConfig
from synthesis.folders import bundle_folder
from synthesis.ledger import Ledger, Query
from synthesis.rolls import note, outcome_of, run_all
from synthesis.stage import RL_MODE, Progress, Source, Spent, StageRun, advance_all, close, drain, drop
from synthesis.types import TRIAL_SCRIPT, Outcome, Proposal, Stage, State

SCRIPTED = "scripted:"
_BROKEN = (FailureClass.INFRASTRUCTURE, FailureClass.HARNESS, FailureClass.VERIFIER)


def trial(store: Store, ledger: Ledger, config: SynthConfig, run: str, progress: Progress) -> StageRecord:
    """Every built RL-mode task of the batch becomes trialled or rejected; outcomes stand in the ledger."""
    stage = StageRun(store, ledger, config, run, progress)
    spent = Spent()
    source = Source((State.BUILT,), RL_MODE)
    if ledger.count(Query(config.batch, source.states, source.splits)):
        model = serve_model(store, config.trial_model)
        spent.items = drain(stage, source, lambda claimed, owner: _work(stage, model, claimed, owner, spent))
    return close(stage, Stage.TRIAL, spent)


def serve_model(store: Store, name: str) -> ModelRef:
    """The model's reference, with an engine serving it. Raises ConfigError for one that is not there."""
    if name.startswith(SCRIPTED):
        return ModelRef(name=name)
    from rollout.inference.launch import ensure_engine

    path = model_folder(store.home, name)
    ensure_engine(store, name, str(path))
    return ModelRef(name=name, digest=json.loads((path / "openforge.json").read_text(encoding="utf-8"))["digest"])


def model_folder(home: Home, name: str) -> Path:
    path = Path(name) if Path(name).is_absolute() else home.models / name
    if not (path / "openforge.json").is_file():
        raise ConfigError(f"no model {name!r} ({path} has no openforge.json); add it: openforge models add {name}")
    return path


def load_all(
    stage: StageRun, name: Stage, claimed: list[Proposal], owner: str
) -> tuple[list[Proposal], list[TaskSpec]]:
    """The bundles of the claimed proposals; those that no longer load are rejected by `name`."""
    loaded: list[tuple[Proposal, TaskSpec]] = []
    broken: list[tuple[Proposal, State, dict[str, str]]] = []
    for proposal in claimed:
        try:
            loaded.append((proposal, load_task(bundle_folder(stage.store.home, proposal))))
        except ConfigError as error:
            broken.append((proposal, State.REJECTED, drop(proposal, name, "bundle", str(error))))
    advance_all(stage, owner, broken)
    return [p for p, _ in loaded], [t for _, t in loaded]


def _work(stage: StageRun, model: ModelRef, claimed: list[Proposal], owner: str, spent: Spent) -> None:
    config = stage.config
    kept, tasks = load_all(stage, Stage.TRIAL, claimed, owner)
    rollouts = [
        rollout
        for proposal, task in zip(kept, tasks, strict=True)
        for rollout in make_rollouts(
            [task],
            Plan(
                run=f"{stage.run}-trial-r{proposal.round}",
                purpose=Purpose.TRIAL,
                model=model,
                sampling=config.trial_sampling,
                limits=config.trial_limits,
                seed=config.seed,
            ),
            config.trial_attempts,
        )
    ]
    ended = run_all(stage, rollouts, owner, "trial")
    found = {p.id: [outcome_of(r, p, TRIAL_SCRIPT) for r in ended if r.task_id == p.id] for p in kept}
    note(stage, [o for outcomes in found.values() for o in outcomes], spent)
    advance_all(stage, owner, [_decide(p, found[p.id]) for p in kept])


def _decide(proposal: Proposal, outcomes: list[Outcome]) -> tuple[Proposal, State, dict[str, str]]:
    broken = next((o for o in outcomes if o.failure in _BROKEN), None)
    if broken is None:
        return proposal, State.TRIALLED, {}
    return proposal, State.REJECTED, drop(proposal, Stage.TRIAL, broken.failure, broken.message)
