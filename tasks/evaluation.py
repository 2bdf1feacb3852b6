"""Prefect tasks: evaluation of a model, and the report of a run."""

from __future__ import annotations

import re
import time

from prefect import task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from evaluation.report import write_report
from evaluation.run import evaluate as evaluate_model
from rollout.bundle import load_tasks
from rollout.inference.launch import ensure_engine
from rollout.types import ResultRecord, Split, StageRecord
from tasks.checkpoints import checkpoint_of, required, stage_runs
from tasks.context import LEASE_S, StageContext, stage_context
from tasks.params import EvalParams, StageParams
from tasks.progress import in_run, publish
from tasks.retry import DAY_S, DELAYS_S, RETRIES, after_infrastructure

stage = task(
    retries=RETRIES,
    retry_delay_seconds=DELAYS_S,
    retry_condition_fn=after_infrastructure,
    timeout_seconds=DAY_S,
    cache_policy=NO_CACHE,
)


@stage
def evaluate(params: EvalParams) -> ResultRecord:
    """A model of the run on the held-out tasks; an engine is started only when there is something to do."""
    with stage_context(params, f"eval-{params.label}") as ctx:
        label, model = _target(ctx, params)
        done = ctx.store.records.get(ResultRecord, run=ctx.run, key=label)
        tasks = [task for task in load_tasks(ctx.tasks_dir) if task.split is Split.HELDOUT]
        ref = ctx.ref(model)
        with ctx.served(model):
            if done is None:
                ensure_engine(ctx.store, model, ctx.model(model).path, lease_s=LEASE_S)
            result = evaluate_model(
                ctx.store,
                ctx.preset.eval,
                run=ctx.run,
                label=label,
                model=ref,
                tasks=tasks,
                progress=ctx.progress,
                client=ctx.client,
            )
    _table(result)
    return result


@stage
def report(params: StageParams) -> StageRecord:
    """One HTML file of all that the run did; its engines are no longer needed."""
    with stage_context(params, "report") as ctx:
        ctx.make_room()
        began = time.monotonic()
        out = write_report(ctx.store, runs=stage_runs(ctx.run), out=ctx.home.reports / f"{ctx.run}.html")
        seconds = time.monotonic() - began
        record = StageRecord(run=ctx.run, stage="report", kept=1, seconds=seconds, details={"path": str(out)})
        ctx.store.records.put(record, run=ctx.run, key="report")
    publish(record)
    if in_run():
        create_link_artifact(out.as_uri(), link_text=str(out), key="report", description=f"run {record.run}")
    return record


def _target(ctx: StageContext, params: EvalParams) -> tuple[str, str]:
    """(label of the result, model) that the parameters ask for. Raises ConfigError when there is none yet."""
    if params.model:
        label = params.label if params.label != "latest" else re.sub(r"[^a-z0-9._-]+", "-", params.model.lower())
        model = params.model
    elif params.label == "latest":
        label, model = _latest(ctx)
    elif params.label == "base":
        label, model = "base", ctx.preset.model.name
    else:
        label, model = params.label, required(ctx.store, ctx.run, params.label)
    return (f"{label}-{time.strftime('%Y-%m-%d', time.gmtime())}" if params.daily else label), model


def _latest(ctx: StageContext) -> tuple[str, str]:
    for label in ("rl", "sft"):
        if found := checkpoint_of(ctx.store, ctx.run, label):
            return label, found
    return "base", ctx.preset.model.name


def _table(result: ResultRecord) -> None:
    if in_run():
        row = {"run": result.run, "model": result.label, **{k: round(v, 4) for k, v in result.metrics.items()}}
        key = re.sub(r"[^a-z0-9]+", "-", f"eval-{result.label}")
        create_table_artifact([row], key=key, description=f"held-out tasks, {result.model.name}")
