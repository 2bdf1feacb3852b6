"""Prefect tasks: the five stages of synthesis over one ledger."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollout.types import StageRecord
from synthesis.build import build as build_tasks
from synthesis.config import SynthConfig
from synthesis.ledger import Ledger
from synthesis.propose import propose as propose_tasks
from synthesis.prune import prune as prune_tasks
from synthesis.refine import refine as refine_tasks
from synthesis.trial import trial as trial_tasks
from tasks.context import StageContext, stage_context
from tasks.params import StageParams
from tasks.progress import publish
from tasks.retry import DAY_S, DELAYS_S, RETRIES, after_infrastructure

stage = task(
    retries=RETRIES,
    retry_delay_seconds=DELAYS_S,
    retry_condition_fn=after_infrastructure,
    timeout_seconds=DAY_S,
    cache_policy=NO_CACHE,
)


@contextmanager
def _opened(params: StageParams, name: str) -> Iterator[tuple[StageContext, Ledger, SynthConfig]]:
    with stage_context(params, name, params.task_run) as ctx:
        ledger = Ledger.open(ctx.home)
        changes = {"batch": params.task_run, "trial_model": params.model or ctx.preset.synth.trial_model}
        try:
            yield ctx, ledger, ctx.preset.synth.model_copy(update=changes)
        finally:
            ledger.close()


@stage
def propose(params: StageParams) -> StageRecord:
    with _opened(params, "propose") as (ctx, ledger, config):
        record = propose_tasks(ctx.store, ledger, config, params.task_run, ctx.progress)
    publish(record)
    return record


@stage
def prune(params: StageParams) -> StageRecord:
    with _opened(params, "prune") as (ctx, ledger, config):
        record = prune_tasks(ctx.store, ledger, config, params.task_run, ctx.progress)
    publish(record)
    return record


@stage
def build(params: StageParams) -> StageRecord:
    with _opened(params, "build") as (ctx, ledger, config):
        record = build_tasks(ctx.store, ledger, config, params.task_run, ctx.progress)
    publish(record)
    return record


@stage
def trial(params: StageParams) -> StageRecord:
    """The paper's Test stage."""
    with _opened(params, "trial") as (ctx, ledger, config):
        ctx.provide(config.trial_model)
        with ctx.served(config.trial_model):
            record = trial_tasks(ctx.store, ledger, config, params.task_run, ctx.progress)
    publish(record)
    return record


@stage
def refine(params: StageParams) -> StageRecord:
    """Accepts or rejects; with a task folder in the parameters the accepted bundles are copied there."""
    with _opened(params, "refine") as (ctx, ledger, config):
        record = refine_tasks(ctx.store, ledger, config, params.task_run, ctx.progress)
        if params.tasks:
            _export(ctx.home.tasks / params.task_run, Path(params.tasks))
    publish(record)
    return record


def _export(batch: Path, target: Path) -> None:
    for bundle in sorted(batch.glob("*/task.toml")):
        if not (target / bundle.parent.name).exists():
            shutil.copytree(bundle.parent, target / bundle.parent.name)
