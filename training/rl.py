"""RL: the stage that trains the SFT checkpoint inside the harness. The parent half; `rl_process` holds the loop.

Idempotent: a run whose checkpoint stands returns its record at once; a killed one goes on from its last checkpoint.
The checkpoint `<home>/checkpoints/<run>/` is the best version by validation.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rollout.inference.launch import engine_name, stop_engine
from rollout.store import Store
from rollout.types import Record, StageRecord, StepRecord
from training.child import Event, Job, run_child
from training.collect import Progress
from training.config import RlConfig
from training.models import ENTRY, ModelEntry, resolve_model
from training.rl_state import LoopState

STAGE = "rl"
START_S = 300.0
"""Extra time of the child for imports, loading, the engine's start and the last validation."""
RESULT_FILE = "result.json"


class RlSpec(Record):
    """What the child needs; absolute paths."""

    home: str
    run: str
    model: str
    """The initial policy as the rollouts name it."""
    policy: ModelEntry
    tasks_dir: str
    work: str
    output: str
    config: RlConfig


def rl(store: Store, config: RlConfig, *, run: str, model: str, tasks_dir: Path, progress: Progress) -> StageRecord:
    """Trains `model` (a name or checkpoint folder); the checkpoint's path is in `details`.

    Raises ConfigError for missing tasks or an unusable model, PhaseTimeout past the deadline, InfrastructureError
    when the child failed.
    """
    output = store.home.checkpoints / run
    done = store.records.get(StageRecord, run=run, key=STAGE)
    if done is not None and (output / ENTRY).exists():
        return done
    work = store.home.checkpoints / f"{run}.work"
    if not (output / ENTRY).exists():
        spec = RlSpec(
            home=str(store.home.root),
            run=run,
            model=model,
            policy=resolve_model(store.home, model),
            tasks_dir=str(tasks_dir),
            work=str(work),
            output=str(output),
            config=config,
        )
        deadline = config.max_seconds + 2 * config.step_seconds + START_S
        job = Job("training.rl_process", work, store.home.logs / f"rl-{run}.log", deadline)
        try:
            run_child(job, spec, lambda event: _take(event, progress))
        finally:
            stop_engine(store, engine_name(model, exclusive=run))
    record = _record(store, run, output)
    store.records.put(record, run=run, key=STAGE)
    shutil.rmtree(work, ignore_errors=True)
    return record


def _take(event: Event, progress: Progress) -> None:
    if event.kind == "progress":
        progress(event.label, event.done, event.total)


def _record(store: Store, run: str, output: Path) -> StageRecord:
    result = LoopState.model_validate_json((output / RESULT_FILE).read_text())
    steps = [s for s in store.records.all(StepRecord, run=run) if s.kind in ("rl", "validation")]
    dropped: dict[str, int] = {}
    for step in steps:
        for reason, count in step.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return StageRecord(
        run=run,
        stage=STAGE,
        kept=sum(s.finished for s in steps),
        dropped=dropped,
        seconds=result.seconds,
        tokens=sum(s.tokens for s in steps),
        rollouts=sum(s.started for s in steps),
        details={
            "checkpoint": str(output),
            "steps": result.step,
            "best_step": result.best_step,
            "best_score": result.best_score,
            "stopped": result.stopped,
        },
    )
