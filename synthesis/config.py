"""Settings of the synthesis stages: section `[synth]` of a preset."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.types import Limits, Resources, Sampling, Timeouts
from synthesis.families import FAMILIES, HELDOUT_FAMILIES


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Counts(Section):
    """Tasks to select for each split, divided evenly over the families."""

    sft: int = Field(160, ge=0, le=100_000)
    rl: int = Field(64, ge=0, le=100_000)
    validation: int = Field(24, ge=0, le=10_000)
    heldout: int = Field(48, ge=0, le=10_000)
    """Held-out tasks of the trained families: ids, names and fixtures that no training task has."""
    heldout_family: int = Field(12, ge=0, le=10_000)
    """Held-out tasks of the family that training never sees, reported apart."""


class Checks(Section):
    """How many rollouts `refine` spends on the checks of one task, after each solution was played in process."""

    wrong: Literal["all"] | int = "all"
    """Listed wrong solutions to run in a sandbox: all, or this many, in turn over the tasks. Idle always runs."""
    determinism_runs: int = Field(3, ge=1, le=20)
    """Runs of the oracle that must all score 1."""


class SynthConfig(Section):
    batch: str = Field("demo", pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$")
    """Name of the task set: its folder below `tasks/` in the home."""
    seed: int = Field(0, ge=0)
    """Drawn from it: everything. The same seed in a fresh home gives the same bundles."""
    counts: Counts = Counts()
    families: tuple[str, ...] = tuple(f.name for f in FAMILIES)
    """Families of the training splits and of `counts.heldout`."""
    heldout_family: str = HELDOUT_FAMILIES[0].name
    """Family of `counts.heldout_family`; never one of `families`."""
    luck_rate: float = Field(0.35, ge=0, le=1)
    """Share of instances where nothing was replaced: acting at once succeeds, which the prompt does not show."""
    oversample: float = Field(1.25, ge=1, le=10)
    """Proposals drafted for each task wanted; `prune` discards the rest."""
    resources: Resources = Resources(cpus=1.0, memory_mb=256, pids=32, disk_mb=16)
    """Limits of the sandbox of a built task."""
    timeouts: Timeouts = Timeouts(setup=60.0, agent=300.0, verify=30.0)
    """Seconds that each phase of a built task may take."""
    trial_model: str = "smollm2"
    """Open model that attempts each built RL-mode task: a name of `openforge models list` or a checkpoint folder."""
    trial_attempts: int = Field(1, ge=1, le=16)
    """Trial rollouts of a task."""
    trial_sampling: Sampling = Sampling(max_tokens=40)
    """Sampling of the trial model."""
    trial_limits: Limits = Limits(calls=4, tokens=160, context=1024)
    """Caps of a trial rollout."""
    checks: Checks = Checks()
    rounds: int = Field(2, ge=0, le=10)
    """Times that a task which failed a check is written anew before it is rejected."""
    deadline_s: float = Field(900.0, gt=0)
    """Longest wait for the rollouts of one stage, in seconds."""

    @model_validator(mode="after")
    def _families(self) -> SynthConfig:
        known = {f.name for f in (*FAMILIES, *HELDOUT_FAMILIES)}
        for name in (*self.families, self.heldout_family):
            if name not in known:
                raise ValueError(f"no task family {name!r}; there are: {', '.join(sorted(known))}")
        if len(set(self.families)) != len(self.families) or not self.families:
            raise ValueError("families must be distinct, and at least one")
        if self.heldout_family in self.families and self.counts.heldout_family:
            raise ValueError(f"heldout_family {self.heldout_family!r} is also in families; leave it out of one")
        return self
