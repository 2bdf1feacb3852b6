"""What the five stages have in common: their arguments, the claim-and-work loop, and the record they leave.

A stage works until no proposal of its batch is left in its source state. It can be killed at any point and asked
again: what is done is in the ledger, what was claimed by the dead process is free, and a stage with nothing left
to do returns the record it wrote before.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import PhaseTimeout
from rollout.store import Store
from rollout.types import Split, StageRecord
from synthesis.config import SynthConfig
from synthesis.ledger import Ledger, Query, owner_name
from synthesis.types import Proposal, Stage, State

Progress = Callable[[str, int, int], None]
"""(label, done, total)."""
RL_MODE = (Split.RL, Split.VALIDATION, Split.HELDOUT)
"""Splits whose tasks take the whole loop."""
ORDER = tuple(Stage)
POLL_S = 0.2
LEASE_MARGIN_S = 60.0


@dataclass(frozen=True)
class StageRun:
    """One run of one stage."""

    store: Store
    ledger: Ledger
    config: SynthConfig
    run: str
    progress: Progress

    @property
    def lease_s(self) -> float:
        return self.config.deadline_s + LEASE_MARGIN_S


@dataclass
class Spent:
    """What a stage used up, filled in as it works."""

    items: int = 0
    tokens: int = 0
    rollouts: int = 0
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Source:
    states: tuple[State, ...]
    splits: tuple[Split, ...] = ()
    chunk: int = 100_000
    """Proposals claimed at once."""


Work = Callable[[list[Proposal], str], None]
"""Takes claimed proposals and the owner's name; leaves each of them advanced."""


def drain(stage: StageRun, source: Source, work: Work) -> int:
    """Claims and works until nothing is left; returns how many proposals this call worked on.

    What a living process holds is waited for. Raises PhaseTimeout after the stage's deadline without progress.
    """
    query = Query(stage.config.batch, source.states, source.splits)
    owner = owner_name()
    worked = 0
    end = time.monotonic() + stage.lease_s
    try:
        while True:
            claimed = stage.ledger.claim(query, owner, source.chunk, stage.lease_s)
            if claimed:
                work(claimed, owner)
                worked += len(claimed)
                end = time.monotonic() + stage.lease_s
                continue
            left = stage.ledger.count(query)
            if not left:
                return worked
            if time.monotonic() > end:
                raise PhaseTimeout(f"{left} proposals of batch {stage.config.batch} are held by another live process")
            time.sleep(POLL_S)
    finally:
        stage.ledger.release(owner)


def close(stage: StageRun, name: Stage, spent: Spent, dropped: dict[str, int] | None = None) -> StageRecord:
    """Writes and returns the stage's record; the earlier one when there was nothing to do."""
    earlier = stage.store.records.get(StageRecord, run=stage.run, key=name.value)
    if earlier and not spent.items:
        return earlier
    rows = stage.ledger.all(Query(stage.config.batch, splits=RL_MODE if name in (Stage.TRIAL, Stage.REFINE) else ()))
    record = StageRecord(
        run=stage.run,
        stage=name.value,
        kept=sum(_passed(p, name) for p in rows),
        dropped=dict(Counter(p.reason for p in rows if p.stage == name.value)) | (dropped or {}),
        seconds=time.monotonic() - spent.started + (earlier.seconds if earlier else 0.0),
        tokens=spent.tokens + (earlier.tokens if earlier else 0),
        rollouts=spent.rollouts + (earlier.rollouts if earlier else 0),
        details={
            "batch": stage.config.batch,
            "states": {state.value: n for state, n in stage.ledger.states(stage.config.batch).items()},
            "kept_by_split": dict(Counter(p.split.value for p in rows if _passed(p, name))),
            "patched": sum(p.round > 0 for p in rows),
        },
    )
    stage.store.records.put(record, run=stage.run, key=name.value)
    return record


def _passed(proposal: Proposal, name: Stage) -> bool:
    return not proposal.stage or ORDER.index(Stage(proposal.stage)) > ORDER.index(name)


def drop(proposal: Proposal, name: Stage, reason: str, detail: str = "") -> dict[str, str]:
    """Changes of a proposal that `name` discards or rejects."""
    return {"stage": name.value, "reason": reason, "detail": detail[:2000]}


def advance_all(
    stage: StageRun, owner: str, steps: Sequence[tuple[Proposal, State, Mapping[str, Any]]]
) -> list[Proposal]:
    """Advances many at once; returns those that this owner still held."""
    return [p for p in stage.ledger.advance_many(steps, owner) if p is not None]
