"""Prefect tasks: distillation, SFT and RL."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollout.types import StageRecord
from tasks.checkpoints import required, stage_run
from tasks.context import StageContext, stage_context
from tasks.params import StageParams
from tasks.progress import publish
from tasks.retry import DAY_S, DELAYS_S, RETRIES, after_infrastructure
from training.distill import distill as distill_tasks
from training.rl import rl as train_rl
from training.sft import sft as train_sft

WEEK_S = 7 * DAY_S
stage = task(
    retries=RETRIES,
    retry_delay_seconds=DELAYS_S,
    retry_condition_fn=after_infrastructure,
    timeout_seconds=WEEK_S,
    cache_policy=NO_CACHE,
)


def _distil(ctx: StageContext) -> StageRecord:
    student = ctx.params.model or ctx.preset.model.name
    ctx.provide(student)
    ctx.provide(ctx.preset.distill.teacher)
    with ctx.served(ctx.preset.distill.teacher):
        return distill_tasks(
            ctx.store,
            ctx.preset.distill,
            run=ctx.run,
            tasks_dir=ctx.tasks_dir,
            student=student,
            progress=ctx.progress,
            client=ctx.client,
        )


@stage
def distill(params: StageParams) -> StageRecord:
    with stage_context(params, "distill") as ctx:
        record = _distil(ctx)
    publish(record)
    return record


@stage
def sft(params: StageParams) -> StageRecord:
    """Trains on the run's dataset; a run without one is distilled first."""
    with stage_context(params, "sft") as ctx:
        dataset = Path(str(_distil(ctx).details["dataset"]))
        ctx.make_room()
        record = train_sft(
            ctx.store,
            ctx.preset.sft,
            run=stage_run(ctx.run, "sft"),
            student=params.model or ctx.preset.model.name,
            dataset=dataset,
            progress=ctx.progress,
        )
    publish(record)
    return record


@stage
def rl(params: StageParams) -> StageRecord:
    """RL from the run's SFT checkpoint, or from the model that is named."""
    with stage_context(params, "rl") as ctx:
        ctx.make_room()
        record = train_rl(
            ctx.store,
            ctx.preset.rl,
            run=stage_run(ctx.run, "rl"),
            model=params.model or required(ctx.store, ctx.run, "sft"),
            tasks_dir=ctx.tasks_dir,
            progress=ctx.progress,
        )
    publish(record)
    return record
