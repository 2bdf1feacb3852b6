"""SFT: the stage that trains the student on the teacher's recorded tokens. The parent half; `sft_process` trains.

Idempotent: a run whose checkpoint stands returns its record at once. The checkpoint `<home>/checkpoints/<run>/` is
a model folder like any other, float32, renamed into place when it is whole.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from itertools import count, zip_longest
from pathlib import Path

from rollout.store import Store
from rollout.types import Record, StageRecord, StepRecord
from training.child import Event, Job, run_child
from training.collect import Progress
from training.config import SftConfig
from training.dataset import SftRow, read_manifest, read_rows
from training.models import ENTRY, ModelEntry, resolve_model

STAGE = "sft"
SHARED_PREFIX = 0.7
"""Share of the shortest row over which rows of one batch agree: system turn and tools, not the instruction."""
START_S = 120.0
"""Extra time of the child for imports, loading and saving."""


class SftSpec(Record):
    """What the child needs; absolute paths."""

    run: str
    student: ModelEntry
    dataset: str
    output: str
    config: SftConfig


def sft(store: Store, config: SftConfig, *, run: str, student: str, dataset: Path, progress: Progress) -> StageRecord:
    """Trains `student` (a model name or folder) on a dataset folder; the checkpoint's path is in `details`.

    Raises ConfigError for a dataset that cannot be trained, PhaseTimeout past the deadline, InfrastructureError
    when the child died twice.
    """
    output = store.home.checkpoints / run
    done = store.records.get(StageRecord, run=run, key=STAGE)
    if done is not None and (output / ENTRY).exists():
        return done
    began = time.monotonic()
    rows = read_rows(dataset)
    entry = resolve_model(store.home, student)
    work = store.home.checkpoints / f"{run}.work"
    spec = SftSpec(run=run, student=entry, dataset=str(dataset), output=str(output), config=config)
    if not (output / ENTRY).exists():
        deadline = config.max_seconds + START_S
        job = Job("training.sft_process", work, store.home.logs / f"sft-{run}.log", deadline)
        run_child(job, spec, lambda event: _take(store, run, event, progress))
    shutil.rmtree(work, ignore_errors=True)
    record = _record(store, run, rows, time.monotonic() - began, {"checkpoint": str(output), "dataset": str(dataset)})
    store.records.put(record, run=run, key=STAGE)
    return record


def _take(store: Store, run: str, event: Event, progress: Progress) -> None:
    if event.step is not None:
        store.records.put(event.step, run=run, key=f"sft-{event.step.step:06d}")
    elif event.kind == "progress":
        progress(event.label, event.done, event.total)


def _record(store: Store, run: str, rows: Sequence[SftRow], seconds: float, paths: dict[str, str]) -> StageRecord:
    steps = [s for s in store.records.all(StepRecord, run=run) if s.kind == "sft"]
    manifest = read_manifest(Path(paths["dataset"]))
    last = [s.loss for s in steps[-8:] if s.loss is not None]
    return StageRecord(
        run=run,
        stage=STAGE,
        kept=len(rows),
        seconds=seconds,
        tokens=manifest.tokens if manifest else 0,
        details={**paths, "steps": len(steps), "loss": sum(last) / len(last) if last else None},
    )


def plan_rows(rows: Sequence[SftRow], config: SftConfig) -> list[SftRow]:
    """The rows in the order in which they are trained: step k takes the k-th `batch` of them.

    Each epoch has an order of its own. `grouped` fills batches with rows of one family that begin alike (the same
    tools) as far as they go, and takes a batch of each kind in turn: a run of one family would undo the others.
    """
    wanted = max(1, round(len(rows) * config.epochs))
    if config.max_steps:
        wanted = min(wanted, config.max_steps * config.batch)
    planned: list[SftRow] = []
    for epoch in count():
        if len(planned) >= wanted:
            return planned[:wanted]
        planned += _epoch(rows, config, random.Random(f"{config.seed}-{epoch}"))
    raise AssertionError


def _epoch(rows: Sequence[SftRow], config: SftConfig, chance: random.Random) -> list[SftRow]:
    order = list(rows)
    chance.shuffle(order)
    if config.batching == "mixed":
        return order
    shared = int(SHARED_PREFIX * min(len(row.token_ids) for row in rows))
    families: dict[tuple[str, tuple[int, ...]], list[SftRow]] = {}
    for row in order:
        families.setdefault((row.family, tuple(row.token_ids[:shared])), []).append(row)
    queues: list[list[list[SftRow]]] = []
    rest: list[SftRow] = []
    for members in families.values():
        whole = len(members) - len(members) % config.batch
        queues.append([members[at : at + config.batch] for at in range(0, whole, config.batch)])
        rest += members[whole:]
    chance.shuffle(queues)
    batches = [batch for turn in zip_longest(*queues) for batch in turn if batch is not None]
    return [row for batch in batches for row in batch] + rest
