"""Records of the ledger: a proposal, its states, and what its rollouts and stages cost.

    proposed -> selected -> built -> trialled -> refined -> accepted
        |          |  ^       |         |           |
        v          |  '-------|---------' patched   |
    discarded      '--------> '-----> rejected <----'

SFT tasks go from built to accepted: no trial, no refine.
"""

from __future__ import annotations

from enum import StrEnum

from rollout.errors import OpenForgeError
from rollout.types import Record, Split
from synthesis.families import Slots


class Stage(StrEnum):
    PROPOSE = "propose"
    PRUNE = "prune"
    BUILD = "build"
    TRIAL = "trial"
    REFINE = "refine"


class State(StrEnum):
    PROPOSED = "proposed"
    SELECTED = "selected"
    DISCARDED = "discarded"
    BUILT = "built"
    TRIALLED = "trialled"
    REFINED = "refined"
    ACCEPTED = "accepted"
    REJECTED = "rejected"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.PROPOSED: frozenset({State.SELECTED, State.DISCARDED}),
    State.SELECTED: frozenset({State.BUILT, State.REJECTED}),
    State.BUILT: frozenset({State.TRIALLED, State.ACCEPTED, State.REJECTED}),
    State.TRIALLED: frozenset({State.REFINED, State.SELECTED, State.REJECTED}),
    State.REFINED: frozenset({State.ACCEPTED, State.REJECTED}),
}


class Twin(OpenForgeError):
    """Another proposal has this identity."""


class Proposal(Record):
    """One task on its way. `seed` and `round` are what the author composes it from again after a patch."""

    id: str
    batch: str
    split: Split
    family: str
    seed: int
    slots: Slots
    identity: str
    state: State = State.PROPOSED
    round: int = 0
    """Times that refine had it written anew."""
    digest: str = ""
    """Of its bundle, once built."""
    stage: str = ""
    """Stage that dropped it."""
    reason: str = ""
    """Why it was dropped, in a word or two that can be counted."""
    detail: str = ""


TRIAL_SCRIPT = "trial"


class Outcome(Record):
    """What one trial or check rollout of a proposal came to."""

    rollout_id: str
    proposal_id: str
    round: int
    script: str
    """`trial`, `solve`, `idle` or `wrong/<name>`."""
    reward: float | None
    failure: str = ""
    message: str = ""
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Cost(Record):
    proposal_id: str
    stage: Stage
    seconds: float = 0.0
    tokens: int = 0
    rollouts: int = 0
