"""Asks for rollouts and waits for them with a deadline. Serves distillation and RL.

What has not ended by the deadline is named, cancelled and left out; a result that comes later is never looked at,
because a step reads its rollouts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollout.errors import PhaseTimeout
from rollout.store import Store
from rollout.types import Rollout, RolloutState, Trajectory

Progress = Callable[[str, int, int], None]
"""(label, done, total)."""

SETTLE_S = 30.0
"""Limit for reading rollouts that are known to have ended."""


class RolloutSource(Protocol):
    """The part of `rollout.client.RolloutClient` that training uses."""

    def submit(self, rollouts: Sequence[Rollout]) -> list[str]: ...

    def done(self, ids: Sequence[str]) -> set[str]: ...

    def wait(
        self, ids: Sequence[str], deadline_s: float, progress: Callable[[int, int], None] | None = None
    ) -> list[Rollout]: ...

    def trajectories(self, rollouts: Sequence[Rollout]) -> list[Trajectory]: ...


@dataclass(frozen=True)
class Wait:
    """How long to wait, and whom to tell."""

    deadline_s: float
    label: str
    progress: Progress


@dataclass(frozen=True)
class Collected:
    """What came of the rollouts asked for."""

    trajectories: tuple[Trajectory, ...]
    """Those that ended in time, whatever their end; in the order asked for."""
    missing: tuple[str, ...] = ()
    """Ids that had not ended at the deadline."""


def collect(store: Store, client: RolloutSource, rollouts: Sequence[Rollout], wait: Wait) -> Collected:
    """Submits (idempotently) and waits. Missing rollouts are cancelled, never waited for again."""
    ids = client.submit(rollouts)
    try:
        ended = client.wait(ids, wait.deadline_s, lambda done, total: wait.progress(wait.label, done, total))
        missing: tuple[str, ...] = ()
    except PhaseTimeout:
        finished = client.done(ids)
        missing = tuple(rid for rid in ids if rid not in finished)
        store.rollouts.cancel(ids=missing)
        ended = client.wait([rid for rid in ids if rid in finished], SETTLE_S)
    return Collected(tuple(client.trajectories(ended)), missing)


@dataclass(frozen=True)
class Sorted:
    """Trajectories by the failure policy (paper section 2)."""

    usable: tuple[Trajectory, ...]
    """Those that ran to a verdict."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Failure class (or `missing`, `policy_end`) -> rollouts that give no samples."""


def sort_by_end(collected: Collected, policy_ends: Literal["keep", "drop"] = "keep") -> Sorted:
    """Rollouts ended by infrastructure, harness, verifier or timeout give no samples, never a reward of 0.

    An end that the policy caused is a normal end with its reward, unless `policy_ends` is `drop`.
    """
    usable: list[Trajectory] = []
    dropped: Counter[str] = Counter(missing=len(collected.missing))
    for trajectory in collected.trajectories:
        rollout = trajectory.rollout
        if rollout.state is not RolloutState.SUCCEEDED or rollout.verdict is None:
            dropped[rollout.failure.kind.value if rollout.failure else rollout.state.value] += 1
        elif rollout.end_reason and policy_ends == "drop":
            dropped["policy_end"] += 1
        else:
            usable.append(trajectory)
    return Sorted(tuple(usable), +dropped)
