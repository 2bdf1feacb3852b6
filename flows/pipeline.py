"""`pipeline/claw`: the whole chain, from the model's weights to the report."""

from __future__ import annotations

from prefect import flow

from flows.distill import distill
from flows.eval import eval
from flows.rl import rl
from flows.sft import sft
from flows.synth import synth
from rollout.types import StageRecord
from tasks import evaluation, models
from tasks.hooks import release
from tasks.params import StageParams


@flow(
    name="pipeline",
    description="The whole chain: synth, eval, distill, sft, eval, rl, eval, report",
    on_cancellation=[release],
    on_crashed=[release],
    on_failure=[release],
)
def pipeline(params: StageParams = StageParams()) -> StageRecord:
    """The whole chain; synthesis is left out when a folder of tasks is given."""
    params = params.model_copy(update={"run": params.run_name})
    models.add(params)
    if not params.tasks:
        synth(params)
    eval(params.evaluate("base"))
    distill(params)
    sft(params)
    eval(params.evaluate("sft"))
    rl(params)
    eval(params.evaluate("rl"))
    return evaluation.report(params)
