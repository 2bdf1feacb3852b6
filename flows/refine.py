"""`refine/claw`: checks each trialled task, patches it, accepts or rejects it."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import synthesis
from tasks.params import StageParams


@flow(
    name="refine",
    description="Checks each trialled task, patches what fails, accepts or rejects",
)
def refine(params: StageParams = StageParams()) -> StageRecord:
    """Checks each trialled task, patches what fails, accepts or rejects."""
    return synthesis.refine(params)
