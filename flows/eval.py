"""`eval/claw` and `eval/nightly`: a model of the run on the held-out tasks."""

from __future__ import annotations

from prefect import flow

from rollout.types import ResultRecord
from tasks import evaluation
from tasks.params import EvalParams


@flow(
    name="eval",
    description="Evaluates a model of the run on the held-out tasks: pass@1, pass@3, pass^3 with intervals",
)
def eval(params: EvalParams = EvalParams()) -> ResultRecord:
    """Evaluates a model of the run on the held-out tasks."""
    return evaluation.evaluate(params)
