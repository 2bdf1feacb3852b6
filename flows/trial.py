"""`trial/claw`: the paper's Test stage, an open model attempts each built task."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import synthesis
from tasks.params import StageParams


@flow(
    name="trial",
    description="The paper's Test stage: an open model attempts each built task",
)
def trial(params: StageParams = StageParams()) -> StageRecord:
    """The paper's Test stage: an open model attempts each built task."""
    return synthesis.trial(params)
