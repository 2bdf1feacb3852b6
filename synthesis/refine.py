"""Refine: runs a task's own scripts through the real path, and accepts, patches or rejects it.

Accepted is what passes every check (checks.py). A task that fails one that its author can mend is composed anew
from another seed, built, tried and checked again, at most `rounds` times; what then still fails is rejected with
the reason.
"""

from __future__ import annotations

from rollout.client import Plan, make_rollouts, seed_of
from rollout.store import Store
from rollout.types import Limits, ModelRef, Purpose, Rollout, StageRecord, TaskSpec
from synthesis.build import build
from synthesis.checks import Problem, inspect, judge, scripts
from synthesis.config import SynthConfig
from synthesis.folders import bundle_folder, publish
from synthesis.ledger import Ledger, Query
from synthesis.propose import Draw, Group, proposal_of
from synthesis.rolls import note, outcome_of, run_all
from synthesis.stage import RL_MODE, Progress, Source, Spent, StageRun, advance_all, close, drain, drop
from synthesis.trial import load_all, trial
from synthesis.types import Outcome, Proposal, Stage, State, Twin

NO_MODEL = ModelRef(name="scripted:oracle")
"""The scripts of a bundle call no model."""
TWIN_DRAWS = 20


def refine(store: Store, ledger: Ledger, config: SynthConfig, run: str, progress: Progress) -> StageRecord:
    """Every trialled task of the batch becomes accepted or rejected."""
    stage = StageRun(store, ledger, config, run, progress)
    spent = Spent()
    for _ in range(config.rounds + 1):
        spent.items += drain(
            stage,
            Source((State.TRIALLED, State.REFINED), RL_MODE),
            lambda claimed, owner: _work(stage, claimed, owner, spent),
        )
        if not ledger.count(Query(config.batch, (State.SELECTED, State.BUILT), RL_MODE)):
            break
        build(store, ledger, config, run, progress)
        trial(store, ledger, config, run, progress)
    return close(stage, Stage.REFINE, spent)


def _work(stage: StageRun, claimed: list[Proposal], owner: str, spent: Spent) -> None:
    fresh = [p for p in claimed if p.state is State.TRIALLED]
    kept, tasks = load_all(stage, Stage.REFINE, fresh, owner)
    found = run_scripts(stage, kept, tasks, owner)
    note(stage, [o for outcomes in found.values() for o in outcomes], spent)
    passed = [p for p in claimed if p.state is State.REFINED]
    for proposal in kept:
        problem = inspect(bundle_folder(stage.store.home, proposal)) or judge(found[proposal.id])
        if problem is None:
            passed.append(proposal)
        else:
            _mend(stage, proposal, problem, owner)
    _accept(stage, passed, owner)


def run_scripts(
    stage: StageRun, proposals: list[Proposal], tasks: list[TaskSpec], owner: str
) -> dict[str, list[Outcome]]:
    """Outcomes of each proposal's oracle, idle and wrong solutions, all run at once."""
    asked: list[tuple[Proposal, str, Rollout]] = []
    for turn, (proposal, task) in enumerate(zip(proposals, tasks, strict=True)):
        for script, runs in scripts(task, stage.config.checks, turn).items():
            plan = Plan(
                run=f"{stage.run}-check-r{proposal.round}-{script.replace('/', '-')}",
                purpose=Purpose.TRIAL,
                model=NO_MODEL,
                limits=Limits(calls=1, tokens=1),
                harness=f"solution:{script}",
                seed=stage.config.seed,
            )
            asked += [(proposal, script, rollout) for rollout in make_rollouts([task], plan, runs)]
    ended = run_all(stage, [rollout for _, _, rollout in asked], owner, "refine")
    found: dict[str, list[Outcome]] = {p.id: [] for p in proposals}
    for (proposal, script, _), rollout in zip(asked, ended, strict=True):
        found[proposal.id].append(outcome_of(rollout, proposal, script))
    return found


def _accept(stage: StageRun, proposals: list[Proposal], owner: str) -> None:
    """Publishes each bundle, then says so in the ledger; a kill between the two is made good by asking again."""
    fresh = [p for p in proposals if p.state is State.TRIALLED]
    refined = [p for p in proposals if p.state is State.REFINED]
    refined += advance_all(stage, owner, [(p, State.REFINED, {}) for p in fresh])
    for proposal in refined:
        publish(stage.store.home, proposal)
    advance_all(stage, owner, [(p, State.ACCEPTED, {}) for p in refined])


def _mend(stage: StageRun, proposal: Proposal, problem: Problem, owner: str) -> None:
    """Back to selected with another seed while rounds are left; else rejected."""
    patched = problem.patch and proposal.round < stage.config.rounds
    for attempt in range(TWIN_DRAWS if patched else 0):
        seed = seed_of(stage.config.seed, proposal.id, proposal.round + 1, attempt)
        group = Group(proposal.split, proposal.family, 1)
        new = proposal_of(proposal.id, proposal.batch, group, Draw(seed, proposal.slots.luck))
        changes = {"seed": seed, "slots": new.slots, "identity": new.identity, "round": proposal.round + 1}
        try:
            stage.ledger.advance(
                proposal, State.SELECTED, owner, **changes, detail=f"{problem.reason}: {problem.detail}"
            )
            return
        except Twin:
            continue
    advance_all(
        stage, owner, [(proposal, State.REJECTED, drop(proposal, Stage.REFINE, problem.reason, problem.detail))]
    )
