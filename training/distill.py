"""Distillation: N teacher rollouts per SFT task, successes kept, the dataset written from the recorded ids.

Step of the path: task set -> teacher rollouts -> verdicts -> rejection sampling -> SFT dataset. Idempotent: rollout
ids depend on run, task and attempt alone, and a run whose dataset stands returns its record at once.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from urllib.parse import urlencode

from rollout.bundle import load_tasks
from rollout.client import Plan, RolloutClient, make_rollouts
from rollout.errors import ConfigError
from rollout.inference.launch import ensure_engine
from rollout.inference.scripted import is_scripted
from rollout.store import Store
from rollout.types import Limits, ModelRef, Purpose, Sampling, Split, StageRecord, Trajectory
from training.clean import clean
from training.collect import Collected, Progress, RolloutSource, Wait, collect, sort_by_end
from training.config import DistillConfig
from training.dataset import Origin, RowLimits, RowSet, check_rows, make_rows, read_manifest, write_dataset
from training.models import ModelEntry, resolve_model, writes_alike

STAGE = "distill"


def distill(
    store: Store,
    config: DistillConfig,
    *,
    run: str,
    tasks_dir: Path,
    student: str,
    progress: Progress,
    client: RolloutSource | None = None,
) -> StageRecord:
    """Writes `<home>/datasets/<run>/` and returns its record, with the dataset's folder in `details`.

    Raises ConfigError when there is no SFT task, when the teacher's ids are not the student's, or when no
    trajectory was worth keeping.
    """
    folder = store.home.datasets / run
    done = store.records.get(StageRecord, run=run, key=STAGE)
    if done is not None and read_manifest(folder) is not None:
        return done
    began = time.monotonic()
    tasks = [task for task in load_tasks(tasks_dir) if task.split is Split.SFT]
    if not tasks:
        raise ConfigError(f"{tasks_dir} has no task of the split `sft`; run `openforge synth` or pass another --tasks")
    model = resolve_model(store.home, student)
    if not is_scripted(config.teacher):
        serve_teacher(store, config.teacher, model)
    rollouts = make_rollouts(tasks, teacher_plan(config, run, student), config.attempts)
    wait = Wait(config.max_seconds, "teacher rollouts", progress)
    collected = collect(store, client or RolloutClient(store), rollouts, wait)
    kept = select_rows(collected, config, end_ids(Path(model.path)))
    check_rows(kept.rows)
    manifest = write_dataset(folder, kept.rows, Origin(run, ModelRef(name=student, digest=model.digest), kept.dropped))
    record = StageRecord(
        run=run,
        stage=STAGE,
        kept=manifest.trajectories,
        dropped=manifest.dropped,
        seconds=time.monotonic() - began,
        tokens=manifest.tokens,
        rollouts=len(rollouts),
        details={"dataset": str(folder), "rows": manifest.rows, "trained_tokens": manifest.trained_tokens},
    )
    store.records.put(record, run=run, key=STAGE)
    return record


def serve_teacher(store: Store, teacher: str, student: ModelEntry) -> None:
    """Sees to an engine for a real teacher. Raises ConfigError unless its recorded ids are the student's, too."""
    entry = resolve_model(store.home, teacher)
    if not writes_alike(entry, student):
        raise ConfigError(
            f"teacher {teacher!r} and student {student.name!r} have different tokenizers, chat templates or renderers, "
            "and rows are built from the ids that the teacher sampled; set distill.teacher to a model of the "
            "student's family or to scripted:oracle, or train a student of the teacher's family"
        )
    ensure_engine(store, teacher, entry.path)


def teacher_plan(config: DistillConfig, run: str, student: str) -> Plan:
    """What all teacher rollouts have in common. A scripted teacher writes with the student's tokenizer."""
    name = config.teacher
    if is_scripted(name):
        query = {"student": student, "lazy": config.shortcut_rate, "wrong": config.mistake_rate}
        name = f"{name}?{urlencode(query, safe='/')}"
    bounds = config.rollout
    return Plan(
        run=run,
        purpose=Purpose.TEACHER,
        model=ModelRef(name=name),
        sampling=Sampling(temperature=config.temperature, max_tokens=bounds.max_tokens),
        limits=Limits(calls=bounds.calls, tokens=bounds.tokens, context=bounds.context),
        seed=config.seed,
    )


def select_rows(collected: Collected, config: DistillConfig, ends: frozenset[int]) -> RowSet:
    """Rejection sampling, the cleaning rules, the cap and the row rules, each counted."""
    ended = sort_by_end(collected)
    cleaned = clean(ended.usable, config.clean)
    chosen = balance(cleaned.kept, config.keep)
    rows = make_rows(chosen, RowLimits(config.max_length, ends, config.merge))
    surplus = Counter(over_cap=len(cleaned.kept) - len(chosen))
    return RowSet(rows.rows, +(ended.dropped + cleaned.dropped + surplus + rows.dropped))


def balance(trajectories: Sequence[Trajectory], keep: int) -> list[Trajectory]:
    """At most `keep`: families in turn, and inside a family each task's first success before its second."""
    seen: Counter[str] = Counter()
    families: dict[str, list[tuple[int, int, Trajectory]]] = {}
    for at, trajectory in enumerate(trajectories):
        rollout = trajectory.rollout
        rank = seen[rollout.task_id]
        seen[rollout.task_id] += 1
        families.setdefault(rollout.task.provenance.family, []).append((rank, at, trajectory))
    queues = [sorted(members, key=lambda m: m[:2]) for _, members in sorted(families.items())]
    turns = [member[2] for turn in zip_longest(*queues) for member in turn if member is not None]
    return turns[:keep]


def end_ids(folder: Path) -> frozenset[int]:
    """Ids that end a turn, as a model folder's generation config (or config) names them."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
