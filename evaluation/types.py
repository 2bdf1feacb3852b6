"""What an evaluation is asked for (`EvalConfig`) and what it says of one model (`ModelSummary`)."""

from __future__ import annotations

from pydantic import Field

from rollout.types import Limits, Record, Sampling

K = 3
"""The k of the headline columns pass@k and pass^k (the paper's tables 4 and 5)."""


class EvalConfig(Record):
    trials: int = Field(3, ge=1, le=64)
    """Rollouts of each held-out task."""
    sampling: Sampling = Sampling()
    """Sampling of every call; the seed of each rollout is drawn from `seed`, its task and its trial."""
    limits: Limits = Limits()
    harness: str = ""
    """Overrides each task's own harness when set."""
    seed: int = 0
    """The same for all models that are compared, so that trial i of a task has one seed for all."""
    pass_reward: float = Field(1.0, gt=0, le=1)
    """A trial passes from this reward on."""
    apart: tuple[str, ...] = ()
    """Families that were left out of training: reported beside the table, never in it."""
    deadline_s: float = Field(3600.0, gt=0)
    """Seconds to wait for all trials of one model."""


class ModelSummary(Record):
    """One model's row: rates in [0, 1], a 95 % bootstrap interval of pass@1 over tasks."""

    pass_at_1: float
    pass_at_3: float
    pass_hat_3: float
    ci_low: float
    ci_high: float
    n_tasks: int
    n_trials: int
    trials: dict[str, list[int]]
    """Task id -> 1 for a passed trial, 0 for a failed or missing one, in trial order."""
