"""Rollouts of a stage: asked for in the store, waited for with a deadline, told as outcomes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout.client import RolloutClient
from rollout.errors import Cancelled, FailureClass
from rollout.types import Rollout
from synthesis.stage import Spent, StageRun
from synthesis.types import Outcome, Proposal

RENEW_S = 20.0


def run_all(stage: StageRun, rollouts: Sequence[Rollout], owner: str, label: str) -> list[Rollout]:
    """Enqueues the rollouts and waits for all; the claims are renewed meanwhile.

    Raises PhaseTimeout past the stage's deadline, Cancelled when someone cancelled one of them.
    """
    renewed = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal renewed
        stage.progress(label, done, total)
        if time.monotonic() - renewed > RENEW_S:
            renewed = time.monotonic()
            stage.ledger.renew(owner, stage.lease_s)

    client = RolloutClient(stage.store)
    client.ensure_serve()
    ended = client.wait(client.submit(rollouts), stage.config.deadline_s, progress)
    gone = [r.id for r in ended if r.failure and r.failure.kind is FailureClass.CANCELLED]
    if gone:
        raise Cancelled(
            f"{len(gone)} rollouts were cancelled, among them {gone[0]}; run the stage again with a new run name"
        )
    return ended


def outcome_of(rollout: Rollout, proposal: Proposal, script: str) -> Outcome:
    return Outcome(
        rollout_id=rollout.id,
        proposal_id=proposal.id,
        round=proposal.round,
        script=script,
        reward=rollout.verdict.reward if rollout.verdict else None,
        failure=rollout.failure.kind.value if rollout.failure else "",
        message=rollout.failure.message[:500] if rollout.failure else "",
        calls=rollout.calls,
        tokens=rollout.tokens,
        seconds=max(0.0, (rollout.ended or 0.0) - (rollout.started or rollout.ended or 0.0)),
    )


def note(stage: StageRun, every: Sequence[Outcome], spent: Spent) -> None:
    """Writes the outcomes into the ledger and adds them to what the stage used."""
    stage.ledger.note(every)
    spent.rollouts += len(every)
    spent.tokens += sum(o.tokens for o in every)
