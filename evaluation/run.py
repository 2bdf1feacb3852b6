"""Evaluates one model on held-out tasks: k trials of each through the rollout queue, then one `ResultRecord`.

Every model that is compared gets the same tasks, sampling and seeds. A trial that infrastructure, harness,
verifier or a timeout broke for good has no verdict: it counts as failed and in `dropped`. Idempotent: rollout
ids depend on run, label, task and trial alone, and a finished evaluation is read back from the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evaluation.metrics import outcomes, scores
from evaluation.types import EvalConfig, K, ModelSummary
from rollout.client import Plan, make_rollouts
from rollout.errors import Cancelled, ConfigError
from rollout.store import Store
from rollout.types import (
    ModelRef,
    Purpose,
    ResultRecord,
    Rollout,
    RolloutState,
    StageRecord,
    TaskSpec,
)

Progress = Callable[[str, int, int], None]
"""(label, done, total)"""

LABELS = ("base", "sft", "rl")


class Client(Protocol):
    """The half of `RolloutClient` that an evaluation needs."""

    def submit(self, rollouts: Sequence[Rollout]) -> list[str]: ...

    def wait(
        self, ids: Sequence[str], deadline_s: float, progress: Callable[[int, int], None] | None = None
    ) -> list[Rollout]: ...


def eval_run(run: str, label: str) -> str:
    """Name of the run under which the rollouts of one evaluation stand in the queue."""
    return f"{run}-eval-{label}"


def evaluate(
    store: Store,
    config: EvalConfig,
    *,
    run: str,
    label: str,
    model: ModelRef,
    tasks: Sequence[TaskSpec],
    progress: Progress,
    client: Client,
) -> ResultRecord:
    """The result of `model` on `tasks`, computed once a (run, label).

    Raises ConfigError without tasks, or when (run, label) stands for another model or other tasks; PhaseTimeout
    after `config.deadline_s`; Cancelled when trials were cancelled. Asked again after any of these it goes on
    where it was.
    """
    if not tasks:
        raise ConfigError("no held-out tasks to evaluate on; build a task set with tasks of the split `heldout` first")
    _refuse_other(store, run, label, model)
    done = store.records.get(ResultRecord, run=run, key=label)
    if done:
        _refuse_other_tasks(done, tasks)
        return done
    plan = Plan(
        run=eval_run(run, label),
        purpose=Purpose.EVAL,
        model=model,
        sampling=config.sampling,
        limits=config.limits,
        harness=config.harness,
        seed=config.seed,
    )
    ids = client.submit(make_rollouts(tasks, plan, config.trials))
    ended = client.wait(ids, config.deadline_s, lambda n, total: progress(f"eval-{label}", n, total))
    result = _result(config, run, label, ended)
    store.records.put(_stage(result, ended), run=run, key=f"eval-{label}")
    store.records.put(result, run=run, key=label)
    return result


def summary(result: ResultRecord, *, apart: bool = False) -> ModelSummary:
    """The row of a result: its main tasks, or with `apart` those of the families left out of training."""
    rows = passes(result, apart=apart)
    found = scores(rows, K)
    return ModelSummary(
        pass_at_1=found.pass_at_1,
        pass_at_3=found.pass_at_k,
        pass_hat_3=found.pass_hat_k,
        ci_low=found.interval.low,
        ci_high=found.interval.high,
        n_tasks=found.n_tasks,
        n_trials=found.n_trials,
        trials=rows,
    )


def passes(result: ResultRecord, *, apart: bool = False) -> dict[str, list[int]]:
    """Task id -> outcomes, of the main tasks or of the families apart."""
    chosen = {t: row for t, row in result.trials.items() if (result.families.get(t, "") in result.apart) == apart}
    return outcomes(chosen, result.metrics.get("pass_reward", 1.0))


def demo_json(
    results: Sequence[ResultRecord], stages: Sequence[StageRecord], seconds: float, peak_rss_mib: float
) -> dict[str, Any]:
    """What OPENFORGE_DEMO_JSON gets. Raises ConfigError when base, sft or rl is missing."""
    by_label = {r.label: r for r in results}
    missing = [label for label in LABELS if label not in by_label]
    if missing:
        raise ConfigError(f"no result of {', '.join(missing)}: evaluate them in this run first")
    return {
        **{label: summary(by_label[label]).model_dump() for label in LABELS},
        "stages": {s.stage: s.model_dump(exclude={"run", "stage", "details"}) for s in stages},
        "seconds": seconds,
        "peak_rss_mib": peak_rss_mib,
    }


def _refuse_other(store: Store, run: str, label: str, model: ModelRef) -> None:
    found = store.rollouts.query(run=eval_run(run, label), limit=1)
    if found and found[0].model != model:
        raise ConfigError(
            f"{label!r} of run {run!r} is an evaluation of {found[0].model.name} ({found[0].model.digest[:12]}), "
            f"not of {model.name} ({model.digest[:12]}); choose another run name or label"
        )


def _refuse_other_tasks(done: ResultRecord, tasks: Sequence[TaskSpec]) -> None:
    if set(done.trials) != {t.id for t in tasks}:
        raise ConfigError(
            f"{done.label!r} of run {done.run!r} was evaluated on {len(done.trials)} tasks that are not the "
            f"{len(tasks)} given now; choose another run name or label"
        )


def _result(config: EvalConfig, run: str, label: str, ended: Sequence[Rollout]) -> ResultRecord:
    cancelled = [r.id for r in ended if r.state is RolloutState.CANCELLED]
    if cancelled:
        raise Cancelled(f"{len(cancelled)} trials of {eval_run(run, label)} were cancelled: no result is recorded")
    first, groups = ended[0], _by_task(ended)
    harnesses = {r.harness for r in ended}
    bare = ResultRecord(
        run=run,
        label=label,
        model=first.model,
        harness=first.harness if len(harnesses) == 1 else "+".join(sorted(harnesses)),
        history=first.history,
        sampling=config.sampling,
        trials={t: [_reward(r) for r in rs] for t, rs in groups.items()},
        families={t: family_of(rs[0].task) for t, rs in groups.items()},
        rollouts={t: [r.id for r in rs] for t, rs in groups.items()},
        apart=config.apart,
        dropped=dict(Counter(_drop_class(r) for r in ended if r.verdict is None)),
        metrics={"pass_reward": config.pass_reward},
        seconds=max(r.ended or r.created for r in ended) - min(r.created for r in ended),
    )
    return bare.model_copy(update={"metrics": {**bare.metrics, **_numbers(bare)}})


def _numbers(result: ResultRecord) -> dict[str, float]:
    """The summary's numbers, for readers that take records as they are; empty when all families are apart."""
    if not passes(result):
        return {}
    return {k: float(v) for k, v in summary(result).model_dump(exclude={"trials"}).items()}


def _stage(result: ResultRecord, ended: Sequence[Rollout]) -> StageRecord:
    return StageRecord(
        run=result.run,
        stage=f"eval-{result.label}",
        kept=len(ended) - sum(result.dropped.values()),
        dropped=result.dropped,
        seconds=result.seconds,
        tokens=sum(r.tokens for r in ended),
        rollouts=len(ended),
    )


def _by_task(ended: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in sorted(ended, key=lambda r: (r.task_id, r.start_index)):
        groups.setdefault(rollout.task_id, []).append(rollout)
    return groups


def family_of(task: TaskSpec) -> str:
    return task.provenance.family or task.category


def _reward(rollout: Rollout) -> float:
    return rollout.verdict.reward if rollout.verdict else 0.0


def _drop_class(rollout: Rollout) -> str:
    return rollout.failure.kind.value if rollout.failure else rollout.state.value
