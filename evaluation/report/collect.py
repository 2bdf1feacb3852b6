"""Reads what a report shows from the store: results, stages, steps and the teacher's rollouts of the named runs.

A step's record has the mean of its rewards; their spread over groups is read from the step's rollouts, which are
those of its run and purpose that were sampled under its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from evaluation.run import LABELS, eval_run
from rollout.errors import ConfigError
from rollout.store import Store
from rollout.types import Purpose, ResultRecord, Rollout, StageRecord, StepRecord

STAGES = ("propose", "prune", "build", "trial", "refine", "distill", "sft", "rl")
TEACHER = "teacher"


@dataclass(frozen=True)
class Evaluated:
    label: str
    """Unique in the report."""
    result: ResultRecord


@dataclass(frozen=True)
class Batch:
    """Rollouts that one RL step or validation sampled."""

    run: str
    purpose: Purpose
    weight_version: int


@dataclass(frozen=True)
class Spread:
    """Mean reward of each group (all trials of a task) of a batch, and how many rollouts they are."""

    means: tuple[float, ...]
    rollouts: int


@dataclass(frozen=True)
class RunData:
    runs: tuple[str, ...]
    results: tuple[Evaluated, ...]
    """base, sft, rl, then others as they were made."""
    stages: tuple[StageRecord, ...]
    """In the order of the path."""
    steps: tuple[StepRecord, ...]
    teacher: tuple[Rollout, ...]
    spreads: Mapping[Batch, Spread] = field(default_factory=dict)


def collect(store: Store, runs: Sequence[str]) -> RunData:
    """Everything that the store holds of `runs`. Raises ConfigError when that is nothing."""
    results = [r for run in runs for r in store.records.all(ResultRecord, run=run)]
    stages = [s for run in runs for s in store.records.all(StageRecord, run=run) if _on_the_path(s)]
    steps = [s for run in runs for s in store.records.all(StepRecord, run=run)]
    if not (results or stages or steps):
        known = {r.run for r in store.records.all(ResultRecord)} | {s.run for s in store.records.all(StageRecord)}
        raise ConfigError(
            f"the store has no results, stages or steps of {', '.join(runs) or 'no run'}; "
            f"runs with records: {', '.join(sorted(known)) or 'none'}"
        )
    return RunData(
        runs=tuple(runs),
        results=tuple(sorted(_named(results), key=lambda e: _place(LABELS, e.label))),
        stages=tuple(sorted(stages, key=_stage_place)),
        steps=tuple(sorted(steps, key=lambda s: (s.kind, s.step))),
        teacher=tuple(r for run in runs for r in _teacher(store, run)),
        spreads=_spreads(store, runs),
    )


def compared(results: Sequence[Evaluated]) -> Sequence[Evaluated]:
    """The models that the headline tells apart: base, sft and rl; without any of these, all that there are."""
    return [e for e in results if e.label in LABELS] or results


def rollouts_of(store: Store, result: ResultRecord) -> dict[str, Rollout]:
    """All attempts of an evaluation by id."""
    return {r.id: r for r in store.rollouts.query(run=eval_run(result.run, result.label))}


def _teacher(store: Store, run: str) -> list[Rollout]:
    """The run's ended teacher rollouts."""
    return [r for r in store.rollouts.query(run=run, purpose=Purpose.TEACHER) if r.state.terminal]


def _spreads(store: Store, runs: Sequence[str]) -> dict[Batch, Spread]:
    groups: dict[Batch, dict[str, list[float]]] = {}
    for run in runs:
        for purpose in (Purpose.TRAIN, Purpose.VALIDATE):
            for r in store.rollouts.query(run=run, purpose=purpose):
                if r.verdict and r.weight_version is not None:
                    batch = groups.setdefault(Batch(run, purpose, r.weight_version), {})
                    batch.setdefault(r.group_id, []).append(r.verdict.reward)
    return {
        batch: Spread(tuple(fmean(rewards) for rewards in found.values()), sum(map(len, found.values())))
        for batch, found in groups.items()
    }


def _named(results: Sequence[ResultRecord]) -> list[Evaluated]:
    """A label that an earlier run used already gets its own run's name in front."""
    out: dict[str, Evaluated] = {}
    for result in results:
        label = result.label if result.label not in out else f"{result.run}/{result.label}"
        out[label] = Evaluated(label, result)
    return list(out.values())


def _on_the_path(stage: StageRecord) -> bool:
    """Neither the report itself nor a sum of the others."""
    return stage.stage in STAGES or stage.stage.startswith("eval-")


def _stage_place(stage: StageRecord) -> tuple[int, int]:
    if stage.stage.startswith("eval-"):
        return len(STAGES) + 1, _place(LABELS, stage.stage.removeprefix("eval-"))
    return _place(STAGES, stage.stage), 0


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)
