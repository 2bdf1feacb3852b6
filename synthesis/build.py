"""Build: writes the bundle of each selected proposal. An SFT task that passes the early checks is accepted here.

A bundle is Harbor's task directory. Its verifier is `verify_program.py` with the expected end beside it; its
solution scripts work through the same gateway as a policy.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.bundle import BundleSpec, write_bundle
from rollout.errors import ConfigError
from rollout.store import Store
from rollout.types import Domain, Provenance, Split, StageRecord, TaskSpec
from synthesis.checks import inspect
from synthesis.config import SynthConfig
from synthesis.families import family_named
from synthesis.folders import bundle_folder, draft_folder, publish
from synthesis.ledger import Ledger
from synthesis.play import dump_plan, script
from synthesis.procedural import Draft, compose, expected_end
from synthesis.stage import Progress, Source, Spent, StageRun, advance_all, close, drain, drop
from synthesis.types import Proposal, Stage, State

CHUNK = 32
VERIFY_PROGRAM = Path(__file__).with_name("verify_program.py")
TEST_SH = "#!/bin/bash\nexec python3 -I -S /tests/verify.py\n"


def build(store: Store, ledger: Ledger, config: SynthConfig, run: str, progress: Progress) -> StageRecord:
    """Every selected row becomes built or rejected, and every built SFT row accepted or rejected."""
    stage = StageRun(store, ledger, config, run, progress)
    spent = Spent()
    spent.items = drain(stage, Source((State.SELECTED,), chunk=CHUNK), lambda rows, owner: _build(stage, rows, owner))
    sft = Source((State.BUILT,), (Split.SFT,), CHUNK)
    spent.items += drain(stage, sft, lambda rows, owner: _accept(stage, rows, owner))
    return close(stage, Stage.BUILD, spent)


def _build(stage: StageRun, claimed: list[Proposal], owner: str) -> None:
    began = time.monotonic()
    steps: list[tuple[Proposal, State, dict[str, Any]]] = []
    for proposal in claimed:
        try:
            task = write_draft(stage, proposal)
        except ConfigError as error:
            steps.append((proposal, State.REJECTED, drop(proposal, Stage.BUILD, "bundle", str(error))))
        else:
            steps.append((proposal, State.BUILT, {"digest": task.digest}))
    advance_all(stage, owner, steps)
    _spent(stage, claimed, began)


def _accept(stage: StageRun, claimed: list[Proposal], owner: str) -> None:
    began = time.monotonic()
    steps: list[tuple[Proposal, State, dict[str, Any]]] = []
    for proposal in claimed:
        problem = inspect(bundle_folder(stage.store.home, proposal))
        if problem:
            steps.append((proposal, State.REJECTED, drop(proposal, Stage.BUILD, problem.reason, problem.detail)))
        else:
            publish(stage.store.home, proposal)
            steps.append((proposal, State.ACCEPTED, {}))
    advance_all(stage, owner, steps)
    _spent(stage, claimed, began)


def _spent(stage: StageRun, claimed: Sequence[Proposal], began: float) -> None:
    stage.ledger.book([p.id for p in claimed], Stage.BUILD, (time.monotonic() - began) / len(claimed))
    states = stage.ledger.states(stage.config.batch)
    total = sum(n for state, n in states.items() if state not in (State.PROPOSED, State.DISCARDED))
    stage.progress("build", total - states.get(State.SELECTED, 0), total)


def write_draft(stage: StageRun, proposal: Proposal) -> TaskSpec:
    """Composes the proposal and writes its bundle, in place of one that was left half-written."""
    folder = draft_folder(stage.store.home, proposal)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = compose(family_named(proposal.family), proposal.slots)
    return write_bundle(bundle_spec(proposal, draft, stage.config), folder)


def bundle_spec(proposal: Proposal, draft: Draft, config: SynthConfig) -> BundleSpec:
    """Pure: the bundle of a composed proposal."""
    family = draft.family
    return BundleSpec(
        id=proposal.id,
        instruction=draft.instruction,
        test=TEST_SH,
        description=f"{family.name}: {family.lookup}, then {family.action}",
        keywords=(family.name, *family.services),
        domain=Domain.CLAW,
        category=family.name,
        split=proposal.split,
        services=draft.services,
        tools=draft.tools,
        tests={
            "verify.py": VERIFY_PROGRAM.read_bytes(),
            "expected.json": json.dumps(expected_end(draft), ensure_ascii=False, sort_keys=True).encode(),
        },
        solve=script(draft.services, draft.oracle),
        wrong={name: script(draft.services, steps) for name, steps in draft.wrong.items()},
        plan={
            "oracle": dump_plan(draft.oracle),
            "shortcut": dump_plan(draft.shortcut),
            "mistake": dump_plan(draft.mistake),
            "wrong": {name: dump_plan(steps) for name, steps in draft.wrong.items()},
        },
        resources=config.resources,
        timeouts=config.timeouts,
        provenance=Provenance(
            author="procedural",
            family=family.name,
            batch=proposal.batch,
            seed=proposal.seed,
            identity=proposal.identity,
        ),
        metadata={"graded": [fact.model_dump(mode="json") for fact in draft.graded]},
    )
