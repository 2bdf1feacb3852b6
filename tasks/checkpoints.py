"""Where a run's trained weights lie: what the records of its stages say.

`sft` and `rl` of a run are kept as `<run>-sft` and `<run>-rl`, so that each has a checkpoint folder of its own.
"""

from __future__ import annotations

from pathlib import Path

from rollout.errors import ConfigError
from rollout.store import Store
from rollout.types import StageRecord

TRAINED = ("sft", "rl")


def stage_run(run: str, stage: str) -> str:
    return f"{run}-{stage}"


def stage_runs(run: str) -> list[str]:
    """All names under which the stages of a run leave records."""
    return [run, *(stage_run(run, stage) for stage in TRAINED)]


def checkpoint_of(store: Store, run: str, stage: str) -> str:
    """Folder of the checkpoint that `sft` or `rl` of this run left; empty when there is none."""
    record = store.records.get(StageRecord, run=stage_run(run, stage), key=stage)
    folder = str(record.details.get("checkpoint", "")) if record else ""
    return folder if folder and Path(folder).is_dir() else ""


def required(store: Store, run: str, stage: str) -> str:
    """The same, but raises ConfigError that says what to run when there is none."""
    if found := checkpoint_of(store, run, stage):
        return found
    raise ConfigError(f"run {run!r} has no {stage} checkpoint yet; run `openforge {stage}` first, or name a --model")
