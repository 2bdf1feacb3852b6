"""Prefect task: the student's weights, converted once."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.context import stage_context
from tasks.params import StageParams
from tasks.retry import DAY_S, DELAYS_S, RETRIES, after_infrastructure


@task(
    name="model",
    retries=RETRIES,
    retry_delay_seconds=DELAYS_S,
    retry_condition_fn=after_infrastructure,
    timeout_seconds=DAY_S,
    cache_policy=NO_CACHE,
)
def add(params: StageParams) -> str:
    """Adds the student (and the trial model) to the home; returns the student's digest."""
    with stage_context(params, "model") as ctx:
        ctx.provide(ctx.preset.synth.trial_model)
        return ctx.model(params.model or ctx.preset.model.name).digest
